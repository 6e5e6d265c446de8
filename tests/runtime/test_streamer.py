"""The streamer against an arena that knows what it holds and complains about every illegal access."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from penstock.runtime.streamer import Streamer
from penstock.schedule.errors import SourceError, StreamError
from penstock.schedule.model import (
    Arena,
    Drop,
    Hardware,
    Plan,
    Range,
    Schedule,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.verify import verify_plan
from tests.runtime.honest_arena import HonestArena

UNIT = 4
HARDWARE = Hardware("test", 1e9, 1e9, 1e9, 0)


def make_plan(graphs: int = 1, *, wrap: str = "overlap") -> Plan:
    """Four storages of four units, one read a step; storage 3 is resident, two others fit beside it."""
    layout = tuple(UNIT * i for i in range(4))
    arena = Arena("paged", "anonymous", 1, layout, (Range(0, 16),))
    names = ("forward", "decode")
    traces = tuple(
        Trace(names[g], g, "", tuple(Step(f"s{k}", (k,), 1, 1) for k in range(4)), 0, 0, "modelled")
        for g in range(graphs)
    )
    transfers = (Transfer(0, 4, 0, -3), Transfer(4, 8, 1, -2), Transfer(8, 12, 2, 0))
    drops = tuple(Drop(UNIT * k, UNIT * (k + 1), k) for k in range(3))
    boundary = (Range(12, 16), Range(0, 8))
    if graphs > 1:  # what streams stays within its call: storage 2 only
        transfers, drops = transfers[2:], drops[2:]
    return Plan(
        budget=12,
        arena=arena,
        arena_bytes=12,
        outside=(),
        addresses=(),
        resident=(Range(12, 16),) if graphs == 1 else (Range(0, 8), Range(12, 16)),
        boundary=boundary,
        wrap=wrap,  # type: ignore[arg-type]
        schedules=tuple(Schedule(g, transfers, drops, 1) for g in range(graphs)),
        traces=traces,
        hardware=HARDWARE,
    )


STORAGES = tuple(Storage(UNIT, "streamable") for _ in range(4))


def run_pass(
    streamer: Streamer, arena: HonestArena, graph: int = 0, order: tuple[int, ...] = (0, 1, 2, 3)
) -> None:
    streamer.begin(graph)
    for step in order:
        probed = step in streamer.methods[graph].probed
        if probed:
            streamer.acquire(graph, step)
        arena.require(UNIT * step, UNIT * (step + 1))
        if probed:
            streamer.release(graph, step)
    streamer.end(graph)


@pytest.fixture
def arena() -> HonestArena:
    return HonestArena(12)


@pytest.fixture
def streamer(arena: HonestArena):
    streamer = Streamer(make_plan(), STORAGES, arena)
    yield streamer
    streamer.close()


def test_every_read_finds_its_bytes_pass_after_pass(streamer, arena):
    for _ in range(50):
        run_pass(streamer, arena)
    assert streamer.counters.passes == 50
    assert streamer.counters.misses == 0
    assert arena.peak <= 12
    assert set(arena.fills) == {(0, 8), (0, 4), (4, 8), (8, 12), (12, 16)}
    assert arena.fills.count((12, 16)) == 1, "resident bytes are loaded once"


def test_the_resident_step_is_not_probed(streamer):
    assert streamer.methods[0].probed == (0, 1, 2)


def test_prefetch_crosses_the_end_of_a_call(streamer, arena):
    run_pass(streamer, arena)
    wait_until(lambda: set(range(8)) <= arena.held)
    before = streamer.counters.stall_ns
    streamer.begin(0)
    streamer.acquire(0, 0)
    assert streamer.counters.stall_ns == before


def test_a_barrier_waits_for_the_prefetch(arena):
    streamer = Streamer(make_plan(wrap="barrier"), STORAGES, arena)
    run_pass(streamer, arena)
    assert set(range(8)) <= arena.held
    streamer.close()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 3), (0, 2, 1, 3), (0, 0, 1, 2, 3), ()])
def test_an_order_not_foreseen_is_slower_never_wrong(streamer, arena, order):
    run_pass(streamer, arena)
    run_pass(streamer, arena, order=order)
    misses = streamer.counters.misses
    assert (misses > 0) == bool(order)
    run_pass(streamer, arena)
    run_pass(streamer, arena)
    assert streamer.counters.misses == misses


def test_a_failed_read_raises_once_and_the_next_call_works(streamer, arena):
    run_pass(streamer, arena)
    arena.fail_at = {8}
    with pytest.raises(SourceError, match="disk error at 8"):
        run_pass(streamer, arena)
    streamer.abort()
    run_pass(streamer, arena)
    assert arena.fills.count((12, 16)) == 1


def test_a_failed_read_of_a_resident_range_raises_too(arena):
    arena.gate = threading.Event()
    arena.fail_at = {12}
    streamer = Streamer(make_plan(), STORAGES, arena)
    threading.Timer(0.05, arena.gate.set).start()
    with pytest.raises(SourceError):
        run_pass(streamer, arena)
    streamer.abort()
    run_pass(streamer, arena)
    streamer.close()


def test_a_failure_between_calls_is_raised_by_the_next_or_mended(streamer, arena):
    arena.fail_at = {0}
    for _ in range(3):
        try:
            run_pass(streamer, arena)
        except SourceError:
            streamer.abort()
    run_pass(streamer, arena)


def test_abort_in_the_middle_forgets_all_but_the_resident(streamer, arena):
    streamer.begin(0)
    streamer.acquire(0, 0)
    streamer.abort()
    run_pass(streamer, arena)
    assert arena.fills.count((12, 16)) == 1


def test_a_release_without_its_acquire_is_refused(streamer):
    streamer.begin(0)
    with pytest.raises(StreamError, match="step 2"):
        streamer.release(0, 2)


def test_close_ends_the_readers_even_while_a_transfer_runs(arena):
    arena.gate = threading.Event()
    streamer = Streamer(make_plan(), STORAGES, arena)
    threading.Timer(0.05, arena.gate.set).start()
    streamer.close()
    streamer.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-reader")]


def test_closing_wakes_a_waiting_call(arena):
    arena.gate = threading.Event()
    streamer = Streamer(make_plan(), STORAGES, arena)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run_pass(streamer, arena)
        except BaseException as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    threading.Timer(0.05, arena.gate.set).start()
    streamer.close()
    caller.join(10)
    assert not caller.is_alive()
    assert all(isinstance(e, StreamError) for e in raised)


def test_methods_that_share_an_arena_follow_one_another(arena):
    arena.capacity = 16
    streamer = Streamer(make_plan(graphs=2), STORAGES, arena)
    for graph in (0, 1, 1, 0, 1):
        run_pass(streamer, arena, graph)
    assert streamer.counters.misses == 0
    assert arena.fills.count((8, 12)) == 5
    streamer.close()


def switching_plan() -> Plan:
    """Two methods; storage 0 comes late in a pass and stays over its end for step 0 of the next."""
    both = make_plan(graphs=2)
    arena = replace(both.arena, layout=(0, 4, 8, 12))
    steps = tuple(Step(f"s{k}", (k,), 1, 1) for k in (0, 1, 2, 0))
    traces = tuple(replace(t, steps=steps) for t in both.traces)
    schedules = tuple(
        Schedule(g, (Transfer(4, 8, 1, 0), Transfer(8, 12, 2, 0), Transfer(0, 4, 3, 1)), SWITCHING_DROPS, 1)
        for g in range(2)
    )
    boundary = (Range(0, 4),)
    return replace(
        both, arena=arena, resident=(), boundary=boundary, schedules=schedules, traces=traces, wrap="overlap"
    )


SWITCHING_DROPS = (Drop(0, 4, 0), Drop(4, 8, 1), Drop(8, 12, 2))


def run_switching(streamer: Streamer, arena: HonestArena, graph: int) -> None:
    streamer.begin(graph)
    for step, storage in enumerate((0, 1, 2, 0)):
        streamer.acquire(graph, step)
        arena.require(UNIT * storage, UNIT * (storage + 1))
        streamer.release(graph, step)
    streamer.end(graph)


def test_another_method_after_a_failure_gets_the_boundary_too(arena):
    plan = switching_plan()
    verify_plan(STORAGES, plan.traces, plan)
    streamer = Streamer(plan, STORAGES, arena)
    run_switching(streamer, arena, 0)
    for graph in (1, 0, 1):
        with streamer._work:  # as where the readers are slow to wake up: nothing is issued meanwhile
            streamer.abort()
            run_switching(streamer, arena, graph)
    streamer.close()


@pytest.mark.parametrize("phase", ["begin", "abort"])
def test_a_second_interrupt_does_not_leave_the_readers_paused(streamer, arena, monkeypatch, phase):
    run_pass(streamer, arena)
    streamer.begin(0)
    if phase == "begin":
        streamer.end(0)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, "drop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            streamer.abort()
    caller = threading.Thread(target=run_pass, args=(streamer, arena), daemon=True)
    caller.start()
    caller.join(10)
    assert not caller.is_alive()


def test_schedules_are_those_of_their_graphs_in_any_order(arena):
    plan = make_plan(graphs=2)
    other = replace(plan.traces[1], steps=plan.traces[1].steps[:3])
    plan = replace(plan, traces=(other, plan.traces[0]))
    streamer = Streamer(plan, STORAGES, arena)
    assert {graph: method.steps for graph, method in streamer.methods.items()} == {0: 4, 1: 3}
    streamer.close()


def test_readers_that_cannot_start_leave_none_behind(arena, monkeypatch):
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StreamError, match="fewer readers"):
        Streamer(make_plan(), STORAGES, arena)
    assert not started[0].is_alive()


def wait_until(condition) -> None:
    deadline = threading.Event()
    for _ in range(1000):
        if condition():
            return
        deadline.wait(0.005)
    raise AssertionError("did not happen within five seconds")


def test_what_needs_no_waiting_is_filled_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HonestArena(12)
    fillers: list[threading.Thread] = []

    def fill_ready(start: int, stop: int) -> int:
        fillers.append(threading.current_thread())
        return arena.fill(start, stop)

    streamer = Streamer(make_plan(), STORAGES, arena)  # type: ignore[arg-type]
    for _ in range(2):
        run_pass(streamer, arena)  # the boundary is loaded by readers
    monkeypatch.setattr(arena, "fill_ready", fill_ready)
    moved = streamer.counters.bytes_moved
    for _ in range(3):
        run_pass(streamer, arena)
    assert set(fillers) == {threading.current_thread()}
    assert streamer.counters.bytes_moved - moved <= 3 * 12 + 12
    assert streamer.counters.misses == 0
    streamer.close()


def test_a_fill_on_the_callers_thread_that_fails_is_raised_and_forgotten() -> None:
    arena = HonestArena(12)
    streamer = Streamer(make_plan(), STORAGES, arena)  # type: ignore[arg-type]
    run_pass(streamer, arena)
    arena.fill_ready = arena.fill  # type: ignore[method-assign]
    arena.fail_at.add(8)
    with pytest.raises(SourceError, match="disk error at 8"):
        run_pass(streamer, arena)
    streamer.abort()
    run_pass(streamer, arena)
    streamer.close()

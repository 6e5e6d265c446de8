"""The streamer against an arena that knows what it holds and complains about every illegal access."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.runtime.stream import streamer as arena_streamer
from penstock.runtime.stream.engine import PIECE, first_pass, tabulate
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.model import Drop, Range, Schedule, Step, Transfer
from penstock.schedule.verify.proof import verify_plan
from tests.runtime.arena.honest_arena import HonestArena
from tests.runtime.stream.four_steps import STORAGES, UNIT, make_plan, run_pass


@pytest.fixture
def arena():
    return HonestArena(12)


@pytest.fixture
def streamer(arena):
    streamer = ArenaStreamer(make_plan(), STORAGES, arena)
    yield streamer
    streamer.close()


@pytest.mark.parametrize(("granule", "piece", "size"), [(1, 3, 3), (2, 3, 2), (4, 3, 4), (1, None, 4)])
def test_transfers_are_cut_so_that_readers_share_them(granule, piece, size):
    plan = make_plan()
    plan = replace(plan, arena=replace(plan.arena, granule=granule))
    (schedule,), (trace,) = plan.schedules, plan.traces
    queue = tabulate(plan, schedule, trace, STORAGES, piece=piece).steady
    assert [(p.start, p.stop, p.step, p.after) for p in queue.pieces] == [
        (start, min(start + size, t.stop), t.step, t.after)
        for t in schedule.transfers
        for start in range(t.start, t.stop, size)
    ]
    assert queue.counts[:3] == (-(-UNIT // size),) * 3


def test_each_step_waits_for_what_it_is_the_first_to_read():
    plan = make_plan()
    (schedule,), (trace,) = plan.schedules, plan.traces
    table = tabulate(plan, schedule, trace, STORAGES, piece=UNIT)
    for loaded in (False, True):
        queue = first_pass(plan, table, resident_loaded=loaded, piece=UNIT)
        resident = [] if loaded else [(12, 16, 4, -1)]  # which the call itself waits for
        streams = [(0, 4, 0, -1), (4, 8, 1, -1), (8, 12, 2, 0)]
        assert [(p.start, p.stop, p.step, p.after) for p in queue.pieces] == resident + streams


@pytest.mark.parametrize(("probed", "step"), [((0, 1, 2), 2), ((), 4)])
def test_what_only_another_method_reads_is_waited_for_by_the_last_step_or_the_call(probed, step):
    plan = make_plan()
    (schedule,), (trace,) = plan.schedules, plan.traces
    table = replace(tabulate(plan, schedule, trace, STORAGES), needs=((),) * 4, probed=probed)
    queue = first_pass(plan, table, resident_loaded=True, piece=UNIT)
    assert [(p.start, p.step) for p in queue.pieces if p.after == -1] == [(0, step), (4, step)]


def test_what_crosses_calls_is_what_starts_before_one_or_a_boundary_of_its_own():
    (alone,), both = make_plan().schedules, make_plan(graphs=2)
    (trace, _) = both.traces
    assert tabulate(make_plan(), alone, trace, STORAGES).crosses_calls
    within = both.schedules[0]
    assert not tabulate(both, within, trace, STORAGES).crosses_calls
    own = replace(within, boundary=both.boundary)
    assert tabulate(both, own, trace, STORAGES).crosses_calls


def test_a_call_ends_before_what_it_has_started_for_the_next_one_is_there(streamer, arena):
    streamer.begin(0)
    for step in streamer.probed(0):
        streamer.acquire(0, step)
        if step == 2:
            arena.gate = threading.Event()  # from here on nothing arrives
        streamer.release(0, step)
    streamer.end(0)
    assert arena.held.isdisjoint(range(4, 8))  # whose transfer waits for step 2
    arena.gate.set()
    run_pass(streamer, arena)


def test_a_step_out_of_turn_is_refused_where_any_method_keeps_values(arena):
    both = make_plan(graphs=2)
    steps = list(both.traces[0].steps)
    steps[2] = replace(steps[2], reads=(), writes=(2,))
    plan = replace(both, traces=(replace(both.traces[0], steps=tuple(steps)), both.traces[1]))
    arena.capacity, arena.fill_ready = 16, arena.fill
    streamer = ArenaStreamer(plan, STORAGES, arena, readers=0)
    streamer.begin(1)
    with pytest.raises(StreamError, match="step 1 of graph 1 came out of turn"):
        streamer.acquire(1, 1)
    streamer.close()


def test_a_miss_counts_the_time_that_its_reads_took(arena, clock):
    def fill(start, stop):
        clock.now += 5
        return HonestArena.fill(arena, start, stop)

    arena.fill = arena.fill_ready = fill
    streamer = ArenaStreamer(make_plan(), STORAGES, arena, readers=0)
    streamer.begin(0)
    before = streamer.counters.stall_ns
    streamer.acquire(0, 2)
    assert (streamer.counters.stall_ns - before, streamer.counters.misses) == (5, 1)
    streamer.close()


def test_no_piece_is_larger_than_what_a_reader_copies_at_a_time(arena):
    plan, scale = make_plan(), PIECE
    (schedule,) = plan.schedules
    large = tuple(replace(t, start=t.start * scale, stop=t.stop * scale) for t in schedule.transfers)
    plan = replace(plan, schedules=(replace(schedule, transfers=large),))
    streamer = ArenaStreamer(plan, STORAGES, arena, readers=0)
    pieces = streamer.methods[0].steady.pieces
    assert {p.stop - p.start for p in pieces} == {PIECE}
    assert len(pieces) == 3 * UNIT
    streamer.close()


def test_the_resident_step_is_not_probed(streamer):
    assert streamer.methods[0].probed == (0, 1, 2)


def test_prefetch_crosses_the_end_of_a_call(streamer, arena):
    run_pass(streamer, arena)
    settle(streamer)
    assert set(range(8)) <= arena.held
    before = streamer.counters.stall_ns
    streamer.begin(0)
    streamer.acquire(0, 0)
    assert streamer.counters.stall_ns == before


def test_a_barrier_waits_for_the_prefetch(arena):
    streamer = ArenaStreamer(make_plan(wrap="barrier"), STORAGES, arena)
    run_pass(streamer, arena)
    assert set(range(8)) <= arena.held
    streamer.close()


def test_a_failed_read_of_a_resident_range_raises_too(arena):
    arena.fail_at, arena.fill_ready = {12}, arena.fill  # within the call, and not before it
    streamer = ArenaStreamer(make_plan(), STORAGES, arena, readers=0)
    with pytest.raises(SourceError, match="disk error at 12"):
        run_pass(streamer, arena)
    streamer.abort()
    run_pass(streamer, arena)
    streamer.close()


def test_what_is_resident_comes_again_where_not_all_of_it_came(arena):
    arena.capacity, arena.fail_at = 16, {12}
    arena.fill_ready = arena.fill
    plan = make_plan(graphs=2)
    assert plan.resident == (Range(0, 8), Range(12, 16))
    streamer = ArenaStreamer(plan, STORAGES, arena, readers=0)
    with pytest.raises(SourceError, match="disk error at 12"):
        run_pass(streamer, arena)
    streamer.abort()
    for graph in (0, 1):
        run_pass(streamer, arena, graph)
    assert arena.fills.count((0, 8)) == 2
    assert arena.fills.count((12, 16)) == 1
    streamer.close()


@pytest.fixture
def clock(monkeypatch):
    """The time that the streamer sees, which stands until `now`, in nanoseconds, is set."""
    clock = SimpleNamespace(now=0)
    clock.perf_counter_ns = lambda: clock.now
    monkeypatch.setattr(arena_streamer, "time", clock)
    return clock


def test_a_file_that_changes_behind_the_last_step_fails_the_pass(streamer, arena, clock):
    for change_after in (2, 0):
        arena.changed = False
        streamer.begin(0)
        for step in streamer.probed(0):
            streamer.acquire(0, step)
            streamer.release(0, step)
            arena.changed |= step == change_after  # no time passes, so that no step looks
        with pytest.raises(SourceError, match="a file has changed"):
            streamer.end(0)
        streamer.abort()


def test_files_are_looked_at_every_few_milliseconds_of_a_pass(streamer, arena, clock):
    streamer.begin(0)
    looked = []
    for step, now in enumerate((1_000_000, 10_000_000, 11_000_000)):
        clock.now, before = now, arena.checks
        streamer.acquire(0, step)
        streamer.release(0, step)
        looked.append(arena.checks - before)
    assert looked == [0, 1, 0]
    streamer.end(0)
    streamer.begin(0)
    clock.now, arena.changed = 30_000_000, True
    with pytest.raises(SourceError, match="a file has changed"):
        streamer.acquire(0, 0)


def test_close_ends_the_readers_even_while_a_transfer_runs(arena):
    arena.gate = threading.Event()
    streamer = ArenaStreamer(make_plan(), STORAGES, arena)
    closer = threading.Thread(target=streamer.close)
    closer.start()
    arena.gate.set()
    closer.join(60)
    streamer.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-reader")]


def switching_plan():
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


def run_switching(streamer, arena, graph):
    streamer.begin(graph)
    for step, storage in enumerate((0, 1, 2, 0)):
        streamer.acquire(graph, step)
        arena.require(UNIT * storage, UNIT * (storage + 1))
        streamer.release(graph, step)
    streamer.end(graph)


def test_another_method_after_a_failure_gets_the_boundary_too(arena):
    plan = switching_plan()
    verify_plan(STORAGES, plan.traces, plan)
    streamer = ArenaStreamer(plan, STORAGES, arena)
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

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, "drop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            streamer.abort()
    caller = threading.Thread(target=run_pass, args=(streamer, arena), daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()


def test_schedules_are_those_of_their_graphs_in_any_order(arena):
    plan = make_plan(graphs=2)
    other = replace(plan.traces[1], steps=plan.traces[1].steps[:3])
    plan = replace(plan, traces=(other, plan.traces[0]))
    streamer = ArenaStreamer(plan, STORAGES, arena)
    assert {graph: method.steps for graph, method in streamer.methods.items()} == {0: 4, 1: 3}
    streamer.close()


def test_readers_that_cannot_start_leave_none_behind(arena, monkeypatch):
    real = threading.Thread.start
    started = []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StreamError, match="fewer readers"):
        ArenaStreamer(make_plan(), STORAGES, arena)
    assert not started[0].is_alive()


def settle(streamer):
    """Waits until no reader copies anything and nothing may start."""
    with streamer._arrived:
        assert streamer._arrived.wait_for(lambda: not (streamer._in_flight or streamer._startable()), 60)

"""The streamer against an arena that knows what it holds and complains about every illegal access."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.runtime.stream import streamer as arena_streamer
from penstock.runtime.stream.engine import PIECE
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.schedule.facts.errors import SourceError, StreamError
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


def test_a_step_out_of_turn_is_refused_where_any_method_keeps_values(arena):
    both = make_plan(graphs=2)
    steps = list(both.traces[0].steps)
    steps[2] = replace(steps[2], reads=(), writes=(2,))
    plan = replace(both, traces=(replace(both.traces[0], steps=tuple(steps)), both.traces[1]))
    arena.capacity = 16
    streamer = ArenaStreamer(plan, STORAGES, arena)
    streamer.begin(1)
    with pytest.raises(StreamError, match="step 1 of graph 1 came out of turn"):
        streamer.acquire(1, 1)
    streamer.close()


def test_a_miss_counts_the_time_that_its_reads_took(arena, clock):
    def fill(start, stop):
        clock.now += 5 * (threading.current_thread() is threading.main_thread())
        return HonestArena.fill(arena, start, stop)

    arena.fill = fill
    streamer = ArenaStreamer(make_plan(), STORAGES, arena)
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


def test_a_barrier_waits_for_the_prefetch(arena):
    streamer = ArenaStreamer(make_plan(wrap="barrier"), STORAGES, arena)
    run_pass(streamer, arena)
    assert set(range(8)) <= arena.held
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

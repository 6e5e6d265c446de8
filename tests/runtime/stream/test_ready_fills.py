"""Fills that need no waiting happen on the caller's thread."""

import threading

import pytest

from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.schedule.facts.errors import SourceError
from tests.runtime.arena.honest_arena import HonestArena
from tests.runtime.stream.four_steps import STORAGES, make_plan, run_pass


def test_what_needs_no_waiting_is_filled_on_the_callers_thread(monkeypatch):
    arena = HonestArena(12)
    fillers = []

    def fill_ready(start, stop):
        fillers.append(threading.current_thread())
        return arena.fill(start, stop)

    streamer = ArenaStreamer(make_plan(), STORAGES, arena)  # type: ignore[arg-type]
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


def test_a_fill_on_the_callers_thread_that_fails_is_raised_and_forgotten():
    arena = HonestArena(12)
    streamer = ArenaStreamer(make_plan(), STORAGES, arena)  # type: ignore[arg-type]
    run_pass(streamer, arena)
    arena.fill_ready = arena.fill  # type: ignore[method-assign]
    arena.fail_at.add(8)
    with pytest.raises(SourceError, match="disk error at 8"):
        run_pass(streamer, arena)
    streamer.abort()
    run_pass(streamer, arena)
    streamer.close()

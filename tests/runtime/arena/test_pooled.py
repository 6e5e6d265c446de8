"""The pooled arena: granules that move, are counted exactly, and are never allocated again."""

import ctypes
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.arena import reading
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.arena.reading import AnonymousArena, PooledArena
from penstock.runtime.files.source import Source
from penstock.schedule.facts.errors import PlanError, SourceError, StreamError

GRANULE = 2 << 20


@pytest.fixture
def plan(stack):
    return stack.open().plan("50%", arena="pooled")


@pytest.fixture
def source(stack):
    program = stack.open()
    with Source(program.payload.files, program.path) as source:
        yield source


@pytest.fixture
def arena(stack, plan, source):
    arena = open_arena(plan, stack.open().payload.storages, source, poison=True)
    assert isinstance(arena, PooledArena)
    yield arena
    arena.close()


def weights_within(stack, start, stop):
    """Parts that lie wholly between two layout offsets."""
    payload = stack.open().payload
    layout = stack.open().plan("50%", arena="pooled").arena.layout
    return [
        (w, w.parts[0])
        for w in payload.weights
        for s in [w.parts[0].storage]
        if start <= layout[s] and layout[s] + payload.storages[s].nbytes <= stop
    ]


def test_filled_granules_hold_the_weights_wherever_they_moved(stack, arena, plan):
    values = stack.exported.state_dict
    granules = plan.arena_bytes // GRANULE
    stop = plan.arena.segments[-1].stop
    for _ in range(3):
        for start in range(0, stop - granules * GRANULE + 1, GRANULE):
            arena.fill(start, start + granules * GRANULE)
            for weight, part in weights_within(stack, start, start + granules * GRANULE):
                assert arena.view(part).equal(values[weight.fqn])
            assert arena.held_bytes == plan.arena_bytes
            arena.drop(start, start + granules * GRANULE)


def test_the_pool_takes_memory_as_it_is_filled_and_never_grows(arena, plan):
    stop = plan.arena.segments[-1].stop
    assert arena.mapped_bytes() == 0
    arena.fill(0, GRANULE)
    assert arena.mapped_bytes() == GRANULE
    arena.fill(GRANULE, plan.arena_bytes)
    arena.drop(0, plan.arena_bytes)
    for start in range(0, stop, GRANULE):
        assert arena.mapped_bytes() == plan.arena_bytes
        arena.fill(start, start + GRANULE)
        arena.drop(start, start + GRANULE)


def test_dropped_granules_are_poisoned(stack, arena):
    arena.fill(0, GRANULE)
    _, part = weights_within(stack, 0, GRANULE)[0]
    view = arena.view(part)
    assert not view.isnan().any()
    arena.drop(0, GRANULE)
    assert view.isnan().all()


def test_more_than_the_pool_is_refused_and_given_back(arena, plan):
    stop = plan.arena.segments[-1].stop
    with pytest.raises(StreamError, match="more than its arena holds"):
        arena.fill(0, stop)
    assert arena.held_bytes == 0
    arena.fill(0, GRANULE)


def test_a_range_that_is_filled_in_part_gives_all_of_it_back(arena, plan):
    arena.fill(GRANULE, 2 * GRANULE)
    arena.drop(0, 3 * GRANULE)
    assert arena.held_bytes == 0
    arena.fill(0, plan.arena_bytes)
    assert arena.held_bytes == arena.mapped_bytes() == plan.arena_bytes


def test_a_failed_read_gives_its_granules_back(arena, source, monkeypatch):
    def fail(*args):
        raise SourceError("disk error")

    with monkeypatch.context() as broken:
        broken.setattr(source, "read_into", fail)
        for _ in range(20):
            with pytest.raises(SourceError):
                arena.fill(0, GRANULE)
    arena.fill(0, GRANULE)
    assert arena.held_bytes == GRANULE


def test_ranges_are_whole_granules(arena):
    with pytest.raises(PlanError, match="whole granules"):
        arena.fill(4096, GRANULE)


def test_segments_that_cut_a_granule_are_not_pooled(stack, plan, source):
    segment = plan.arena.segments[0]
    cut = replace(plan.arena, segments=(replace(segment, stop=segment.stop - 4096),))
    arena = open_arena(replace(plan, arena=cut), stack.open().payload.storages, source)
    assert isinstance(arena, AnonymousArena)
    arena.close()


def test_a_layout_that_reaches_into_the_pool_is_refused(stack, plan, source):
    layout = tuple(place + GRANULE if place >= 0 else place for place in plan.arena.layout)
    beyond = replace(plan, arena=replace(plan.arena, layout=layout))
    with pytest.raises(PlanError, match="reach to byte"):
        open_arena(beyond, stack.open().payload.storages, source)


def test_a_move_that_the_system_refuses_loses_nothing(arena, monkeypatch):

    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as limited:
        limited.setattr(reading, "move", refuse)
        for _ in range(20):
            with pytest.raises(StreamError, match="max_map_count"):
                arena.fill(0, GRANULE)
    arena.fill(0, GRANULE)


def test_granules_move_under_several_threads(stack, arena, plan):
    values = stack.exported.state_dict
    wrong = []

    def work(start):
        for _ in range(30):
            arena.fill(start, start + GRANULE)
            for weight, part in weights[start]:
                if not arena.view(part).equal(values[weight.fqn]):
                    wrong.append(weight.fqn)
            arena.drop(start, start + GRANULE)

    starts = [0, 2 * GRANULE, 4 * GRANULE]
    weights = {start: weights_within(stack, start, start + GRANULE) for start in starts}
    threads = [threading.Thread(target=work, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.held_bytes == 0


def test_reading_a_dropped_granule_faults_when_debugging(stack, plan, source):
    _, part = weights_within(stack, 0, GRANULE)[0]
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        import faulthandler

        faulthandler.disable()
        arena = open_arena(plan, stack.open().payload.storages, source, debug=True)
        arena.fill(0, GRANULE)
        address = arena.view(part).data_ptr()
        ctypes.string_at(address, 1)
        os.write(say, b"read")
        arena.drop(0, GRANULE)
        os.write(say, b", dropped")
        ctypes.string_at(address, 1)
        os._exit(0)
    os.close(say)
    with open(said) as words:
        assert words.read() == "read, dropped"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_system_that_cannot_move_pages_gives_them_back_instead(stack, plan, source, monkeypatch):
    from penstock.runtime.arena import kinds as module

    monkeypatch.setattr(module, "supports_move", lambda: False)
    arena = open_arena(plan, stack.open().payload.storages, source)
    assert isinstance(arena, AnonymousArena)
    arena.close()


def test_nothing_is_left_after_close(arena, plan):
    arena.fill(0, GRANULE)
    address = arena._memory.address
    arena.close()
    assert arena.mapped_bytes() == 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    assert not [1 for low, high in ends if low <= address < high]

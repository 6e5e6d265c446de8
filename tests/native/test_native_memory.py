"""The memory that the native engine takes: refused before it streams, and no more of it while it runs."""

import ctypes
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from examples.demo.cgroup import join_group, make_group
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Storage
from tests.runtime.stream.cases import one_case

pytestmark = pytest.mark.usefixtures("native")
MIB = 1 << 20


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated():
    """Bytes that malloc has given out."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a libc without mallinfo2")
@pytest.mark.parametrize("kind", ["contiguous", "mapped", "adaptive"])
def test_passes_keep_nothing_of_what_they_allocate(kind, tmp_path):
    case = one_case(kind, folder=tmp_path)
    with case.streamer("native", log=False) as streamer:
        run_passes(streamer, 20)
        before = allocated()
        run_passes(streamer, 300)
        assert allocated() - before < 16 << 10
        assert streamer.counters.misses == 0


def run_passes(streamer, count):
    for _ in range(count):
        streamer.begin(0)
        for k in streamer.probed(0):
            streamer.acquire(0, k)
            streamer.release(0, k)
        streamer.end(0)


def in_group(limit, case):
    """What opening an engine and a pass end with in a forked process that gets `limit` bytes more."""
    with make_group(limit) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                join_group(group.folder)
                with case.streamer("native", log=False) as streamer:
                    run_passes(streamer, 3)
                said = "ran"
            except StreamError as error:
                said = str(error)
            except BaseException as error:
                said = repr(error)
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as told:
            said = told.read()
        return said if not group.kills else "killed"


def test_memory_that_a_group_does_not_leave_is_refused_before_it_is_taken():
    case = one_case("contiguous")
    said = in_group(case.plan.arena_bytes + 4 * MIB, case)
    assert said.startswith(f"weights take {case.plan.arena_bytes} bytes of memory")
    assert said.endswith("lower the budget, or raise the group's limit")
    assert in_group(case.plan.arena_bytes + 24 * MIB, case) == "ran"


def with_outside(case, nbytes):
    """The case with a storage more, which stays outside of the arena."""
    extent = replace(case.storages[0].extents[0], storage_offset=0, nbytes=1)
    arena = replace(case.plan.arena, layout=(*case.plan.arena.layout, -1))
    plan = replace(case.plan, outside=(len(case.storages),), arena=arena)
    return replace(case, plan=plan, storages=(*case.storages, Storage(nbytes, "streamable", (extent,))))


def test_what_stays_outside_of_the_arena_counts_in_what_a_group_has_to_leave():
    case = with_outside(one_case("paged"), 32 * MIB)
    weights = case.plan.arena_bytes + 32 * MIB
    said = in_group(case.plan.arena_bytes + 24 * MIB, case)
    assert said.startswith(f"weights take {weights} bytes of memory")
    assert in_group(weights + 24 * MIB, case) == "ran"


def test_a_mapped_plan_is_refused_only_for_what_stays_outside(tmp_path):
    case = with_outside(one_case("adaptive", folder=tmp_path), 32 * MIB)
    said = in_group(36 * MIB, case)
    assert said.startswith(f"weights take {32 * MIB} bytes of memory")


def test_where_a_group_leaves_no_room_for_private_granules_files_are_only_mapped(tmp_path):
    case = one_case("adaptive", folder=tmp_path)
    assert in_group(case.plan.arena_bytes + 6 * MIB, case) == "ran"


def test_a_forked_child_asks_nothing_of_an_engine_whose_lock_may_be_held_for_ever():
    with one_case("contiguous").streamer("native", log=False) as streamer:
        run_passes(streamer, 2)
        child = os.fork()
        if child == 0:
            try:
                streamer._library = SimpleNamespace(ps_close=lambda _: None)  # nothing else may be called
                assert streamer.counters.misses == 0
                streamer.free()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

"""The memory that the native engine takes: refused before it streams, and no more of it while it runs."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.demo.cgroup import join_group, make_group
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Storage
from tests.runtime.stream.cases import Case, one_case

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


def allocated() -> int:
    """Bytes that malloc has given out."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a libc without mallinfo2")
@pytest.mark.parametrize("kind", ["contiguous", "mapped", "adaptive"])
def test_passes_keep_nothing_of_what_they_allocate(kind: str, tmp_path: Path) -> None:
    case = one_case(kind, folder=tmp_path)
    with case.streamer("native", log=False) as streamer:
        run_passes(streamer, 20)
        before = allocated()
        run_passes(streamer, 300)
        assert allocated() - before < 16 << 10
        assert streamer.counters.misses == 0


def run_passes(streamer: Any, count: int) -> None:
    for _ in range(count):
        streamer.begin(0)
        for k in streamer.probed(0):
            streamer.acquire(0, k)
            streamer.release(0, k)
        streamer.end(0)


def in_group(limit: int, case: Case) -> str:
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


def test_memory_that_a_group_does_not_leave_is_refused_before_it_is_taken() -> None:
    case = one_case("pooled")
    said = in_group(case.plan.arena_bytes + 4 * MIB, case)  # without the refusal the kernel kills it
    assert said.startswith(f"weights take {case.plan.arena_bytes} bytes of memory")
    assert said.endswith("lower the budget, or raise the group's limit")
    assert in_group(case.plan.arena_bytes + 24 * MIB, case) == "ran"


def test_what_stays_outside_of_the_arena_counts_in_what_a_group_has_to_leave() -> None:
    case = one_case("pooled")
    outside, first = 32 * MIB, case.storages[0].extents[0]
    plan = replace(
        case.plan,
        outside=(len(case.storages),),
        arena=replace(case.plan.arena, layout=(*case.plan.arena.layout, -1)),
    )
    extent = replace(first, storage_offset=0, nbytes=1)
    bigger = replace(case, plan=plan, storages=(*case.storages, Storage(outside, "streamable", (extent,))))
    said = in_group(case.plan.arena_bytes + 24 * MIB, bigger)
    assert said.startswith(f"weights take {case.plan.arena_bytes + outside} bytes of memory")
    assert in_group(case.plan.arena_bytes + outside + 24 * MIB, bigger) == "ran"


def test_where_a_group_leaves_no_room_for_private_granules_files_are_only_mapped(tmp_path: Path) -> None:
    case = one_case("adaptive", folder=tmp_path)
    assert in_group(case.plan.arena_bytes + 6 * MIB, case) == "ran"

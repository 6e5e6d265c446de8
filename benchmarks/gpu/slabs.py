"""Host memory of every kind that a device can copy from: huge pages or small, near the device or far."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.target import Report, Target, require
from penstock.runtime.system.first_touch import cpus_by_node, cpus_near
from penstock.runtime.system.memory import HUGE_PAGE, resident_bytes
from penstock.schedule.facts.errors import StreamError

_ADVICE = {True: mmap.MADV_HUGEPAGE, False: 15}
"""By whether pages are huge. Python has no name for MADV_NOHUGEPAGE, which is 15 in Linux."""


def measure_slabs(target: Target, report: Report, nbytes: int, pci: str | None) -> None:
    """Report a line for each kind: seconds a GiB to touch and to register it, and the rate of copies.

    `pci` is the address of the device, which says what node is near.
    """
    arena = torch.empty(nbytes, dtype=torch.uint8, device=target.where)
    nodes, (near, _) = cpus_by_node(), cpus_near(pci)
    for huge, (node, cpus) in product((False, True), nodes.items() if len(nodes) > 1 else [(None, set())]):
        host = map_memory(nbytes, huge=huge)
        address, began = host.data_ptr(), time.perf_counter()
        with on_cpus(cpus) as placed:
            ctypes.memset(address, 1, nbytes)
        touched = time.perf_counter()
        with registered(target, address, nbytes) as is_registered:
            ready = time.perf_counter()
            seconds = target.usual_seconds(partial(arena.copy_, host, non_blocking=True))
            equal = bool((arena == 1).all())
        report(
            what="slab",
            huge=huge,
            huge_bytes=huge_bytes(address, nbytes),
            node=node,
            near=bool(near & cpus) if near else None,
            placed=placed,
            registered=is_registered,
            touch_s_a_gib=(touched - began) * 2**30 / nbytes,
            register_s_a_gib=(ready - touched) * 2**30 / nbytes if is_registered else None,
            bytes_per_s=nbytes / seconds,
            equal=equal,
        )
        require(equal, "a copy from a slab arrived with other bytes")


def map_memory(nbytes: int, *, huge: bool) -> torch.Tensor:
    """Return untouched memory that begins at a huge page; a kernel without huge pages takes no advice."""
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE)
    with suppress(OSError):
        mapping.madvise(_ADVICE[huge])
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]


def huge_bytes(address: int, nbytes: int) -> int | None:
    """Return the bytes that lie in huge pages; None where the system does not tell."""
    with suppress(StreamError):
        return resident_bytes(address, address + nbytes, huge=True)
    return None


@contextmanager
def on_cpus(cpus: Set[int]) -> Iterator[bool]:
    """Run the calling thread on these processors; yield whether the system allows it."""
    before = os.sched_getaffinity(0)
    try:
        if cpus & before:
            os.sched_setaffinity(0, cpus & before)
        yield bool(cpus & before)
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def registered(target: Target, address: int, nbytes: int) -> Iterator[bool]:
    """Register memory with CUDA's driver; yield False on a device that has no such call."""
    if target.where.type != "cuda":
        yield False
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    require(not int(runtime.cudaHostRegister(address, nbytes, 0)), "the driver did not register a slab")
    try:
        yield True
    finally:
        target.finish()
        runtime.cudaHostUnregister(address)

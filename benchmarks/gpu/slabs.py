"""Host memory of every kind that a device can copy from: huge pages or small, near the device or far."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.target import Report, Target, require

NODES = Path("/sys/devices/system/node")
HUGE = 2 << 20
_ADVICE = {True: mmap.MADV_HUGEPAGE, False: 15}
"""By whether pages are huge. Python has no name for MADV_NOHUGEPAGE, which is 15 in Linux."""


def measure_slabs(target: Target, report: Report, nbytes: int) -> None:
    """Report a line for each kind: seconds a GiB to touch and to register it, and the rate of copies."""
    arena = torch.empty(nbytes, dtype=torch.uint8, device=target.where)
    nodes = cpus_by_node()
    near = node_of_device(target)
    for huge, node in product((False, True), nodes if len(nodes) > 1 else [None]):
        host = map_memory(nbytes, huge=huge)
        address, before = host.data_ptr(), huge_bytes()
        began = time.perf_counter()
        with on_cpus(nodes.get(node, set()) if node is not None else set()) as placed:
            ctypes.memset(address, 1, nbytes)
        touched = time.perf_counter()
        with registered(target, address, nbytes) as is_registered:
            ready = time.perf_counter()
            seconds = target.usual_seconds(partial(arena.copy_, host, non_blocking=True))
            equal = bool((arena == 1).all())
        report(
            what="slab",
            huge=huge,
            huge_bytes=huge_bytes() - before,
            node=node,
            near=None if node is None or near is None else node == near,
            placed=placed,
            registered=is_registered,
            touch_s_a_gib=(touched - began) * 2**30 / nbytes,
            register_s_a_gib=(ready - touched) * 2**30 / nbytes if is_registered else None,
            bytes_per_s=nbytes / seconds,
            equal=equal,
        )
        require(equal, "a copy from a slab arrived with other bytes")


def map_memory(nbytes: int, *, huge: bool) -> torch.Tensor:
    """Return untouched memory that begins at a huge page, with the kernel's advice for its pages."""
    mapping = mmap.mmap(-1, nbytes + HUGE)
    mapping.madvise(_ADVICE[huge])
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + nbytes]


def huge_bytes() -> int:
    """Return the bytes of this process that lie in huge pages, by the kernel's count."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def cpus_by_node() -> dict[int, set[int]]:
    """Return the processors of each NUMA node that has any."""
    found = {}
    for path in sorted(NODES.glob("node[0-9]*/cpulist")):
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        if cpus := {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}:
            found[int(path.parent.name.removeprefix("node"))] = cpus
    return found


def node_of_device(target: Target) -> int | None:
    """Return the NUMA node that the device is attached to, None where the system does not know it."""
    if target.where.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(target.where)
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    path = Path("/sys/bus/pci/devices") / address / "numa_node"
    node = int(path.read_text()) if path.is_file() else -1
    return node if node >= 0 else None


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[bool]:
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

"""Takes fresh memory that a device copies from: in huge pages, by many threads, on the device's NUMA node.

A page lies on the node of the CPU that first touches it. So threads that may run on the CPUs of that node
alone touch the memory, and end: no thread of the caller's ever changes where it runs.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock.runtime.system.memory import (
    HUGE_PAGE,
    PAGE,
    FreshMemory,
    huge_pieces,
    resident_bytes,
    round_down,
    round_up,
)
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size

SYSFS = Path("/sys")

_THREADS = 16
"""The most threads that take memory at once."""

_log = logging.getLogger(__name__)


def take_near(address: int, nbytes: int, pci: str | None, device: str) -> None:
    """Take the whole pages from `address` on; where they are small or may be far, log why, at INFO.

    Args:
        address: Where the memory begins, at a page.
        nbytes: Its size, rounded up to whole pages, all of which must be the caller's.
        pci: The PCI address of the device that copies from it (`0000:3b:00.0`), or None if nobody knows it.
        device: The name of that device, for the log.

    Raises:
        StreamError: If there is not enough memory.
    """
    nbytes = round_up(nbytes, PAGE)
    cpus, far = cpus_near(pci)
    fresh, pieces = FreshMemory(), list(huge_pieces(address, nbytes))
    threads = min(_THREADS, len(cpus or _allowed_cpus()), len(pieces))

    def touch(first: int) -> str:
        refused = _run_on(cpus)
        for piece in pieces[first::threads]:
            fresh.take(*piece)
        return refused

    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-first-touch") as pool:
        refusals = list(pool.map(touch, range(threads)))
    size = format_size(nbytes)
    if far := far or max(refusals):
        _log.info("%s of host memory for %s may lie on any NUMA node: %s", size, device, far)
    if small := _why_small(address, nbytes, fresh):
        _log.info("%s of host memory for %s are not all in huge pages: %s", size, device, small)


def _run_on(cpus: frozenset[int]) -> str:
    """Have the calling thread run on these CPUs, if there are any. Returns why the system refused it."""
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"no thread may choose its CPUs ({error.strerror})"
    return ""


def cpus_near(pci: str | None) -> tuple[frozenset[int], str]:
    """The CPUs on a PCI device's node that this process may use, or none and why, if there are several."""
    nodes = cpus_by_node()
    if len(nodes) < 2:
        return frozenset(), ""
    if pci is None:
        return frozenset(), "the PCI address of the device is not known"
    file = SYSFS / "bus" / "pci" / "devices" / pci.lower() / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError) as error:
        return frozenset(), f"{file} does not tell the node of the device ({error})"
    if node not in nodes:
        return frozenset(), f"{file} names node {node}, which has no CPUs"
    cpus = nodes[node] & _allowed_cpus()
    return cpus, "" if cpus else f"this process may run on no CPU of the device's node {node}"


def cpus_by_node() -> dict[int, frozenset[int]]:
    """Returns the CPUs of each NUMA node that has any. The memory of some GPUs is a node without CPUs."""
    nodes = {}
    for folder in (SYSFS / "devices" / "system" / "node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            if cpus := _parse_cpus((folder / "cpulist").read_text()):
                nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _parse_cpus(listed: str) -> frozenset[int]:
    spans = [span.partition("-") for span in listed.strip().split(",") if span]
    return frozenset(cpu for low, _, high in spans for cpu in range(int(low), int(high or low) + 1))


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _why_small(address: int, nbytes: int, fresh: FreshMemory) -> str:
    """Returns why not all whole huge pages of memory that was taken are huge; nothing where they are."""
    whole = round_down(address + nbytes, HUGE_PAGE) - round_up(address, HUGE_PAGE)
    file = SYSFS / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    if whole <= 0:
        return ""
    with suppress(OSError):
        if "[never]" in file.read_text():
            return f"{file} is set to never"
    if fresh.refused:
        return fresh.refused
    with suppress(StreamError):  # a system that does not tell
        if (huge := resident_bytes(address, address + nbytes, huge=True)) < whole:
            return f"the system had {format_size(huge)} in huge pages"
    return ""

"""Tells how much memory and address space this process could still take, and which limit says so."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHARE = 0.8
"""The share of the available memory that may be used; other processes, and this one, may need the rest."""

_UNLIMITED = 1 << 60  # version 1 shows a number of at least this size if there is no limit

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_KEPT = {
    "total_rss": ("total_rss", "total_shmem"),
    "anon": ("anon", "shmem", "kernel_stack", "pagetables", "percpu", "slab_unreclaimable", "sock"),
}
"""What a group cannot give back, by names in `memory.stat`: of version 1, which has `total_rss`, and of 2."""


@dataclass(frozen=True)
class Limit:
    """A limit of which `left` bytes are left: what sets it, and of what, in words."""

    left: int
    name: str
    of: str = "memory"


def memory_limit(proc: Path = _PROC, groups: Path = _GROUPS) -> Limit | None:
    """Returns the limit that leaves the least memory, or None where the system does not say.

    It is what the system has available, or the limit of a control group of memory (version 1 or 2), from this
    process's up to the root. The page cache of a group counts as left, because it can be reclaimed; memory of
    programs, files in memory (tmpfs) and the kernel's own do not.
    """
    found = [
        Limit(int(line.split()[1]) << 10, "the system")
        for line in _lines(proc / "meminfo")
        if re.fullmatch(r"MemAvailable:\s+\d+ kB", line)
    ]
    return min((*found, *_group_limits(proc, groups)), key=lambda one: one.left) if found else None


def address_limit(proc: Path = _PROC) -> Limit | None:
    """Returns the limit on address space (RLIMIT_AS), in which also what is only reserved counts."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    sizes = _lines(proc / "self/statm")
    if most == resource.RLIM_INFINITY or not sizes:
        return None
    taken = int(sizes[0].split()[0]) * resource.getpagesize()
    return Limit(max(0, most - taken), "the limit RLIMIT_AS (`ulimit -v`)", "address space")


def available_bytes() -> int | None:
    """Returns the bytes that could hold data or page cache, or None where the system does not say."""
    found = memory_limit()
    return None if found is None else found.left


def usable_bytes() -> int | None:
    """Returns four fifths of the available bytes, which may be locked unasked; None if they are unknown."""
    available = available_bytes()
    return None if available is None else int(available * _SHARE)


def _group_limits(proc: Path, groups: Path) -> Iterator[Limit]:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, name = groups / "memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = groups, "memory.max"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            for limit in _lines(folder / name):
                if limit.isdecimal() and int(limit) < _UNLIMITED:
                    named = f"control group /{folder.relative_to(root)}".removesuffix(".")
                    yield Limit(max(0, int(limit) - _kept(folder)), named)


def _kept(group: Path) -> int:
    """Returns the bytes of a control group that are not page cache and cannot be reclaimed."""
    pairs = [line.partition(" ") for line in _lines(group / "memory.stat")]
    stat = {name: int(value) for name, _, value in pairs if value.isdecimal()}
    names = next((_KEPT[first] for first in _KEPT if first in stat), ())
    return sum(stat.get(name, 0) for name in names)


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file of the system, which are none where the system has no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []

"""Tells how much memory this process could still use within the limits of its control groups."""

from __future__ import annotations

import re
from pathlib import Path

_SHARE = 0.8
"""The share of the available memory that may be used; other processes, and this one, may need the rest."""

_UNLIMITED = 1 << 60  # version 1 shows a number of at least this size if there is no limit


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes that could hold data or page cache, or None where the system does not say.

    They are the least of what the system has available and of what is left of the limit of each control group
    of memory (version 1 or 2) from this process's up to the root. The page cache of a group counts as
    available, because it can be reclaimed; what cannot be reclaimed does not.
    """
    found = [
        int(line.split()[1]) << 10
        for line in _lines(proc / "meminfo")
        if re.fullmatch(r"MemAvailable:\s+\d+ kB", line)
    ]
    return min(found + _group_limits(proc, groups)) if found else None


def usable_bytes() -> int | None:
    """Returns four fifths of the available bytes, which may be locked unasked; None if they are unknown."""
    available = available_bytes()
    return None if available is None else int(available * _SHARE)


def _group_limits(proc: Path, groups: Path) -> list[int]:
    limits = []
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
                    limits.append(max(0, int(limit) - _kept(folder)))
    return limits


def _kept(group: Path) -> int:
    """Returns the bytes of a control group that are not page cache and cannot be reclaimed."""
    pairs = [line.partition(" ") for line in _lines(group / "memory.stat")]
    stat = {name: int(value) for name, _, value in pairs if value.isdecimal()}
    return stat.get("total_rss", stat.get("anon", 0))


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file of the system, which are none where the system has no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []

"""How much memory this process could still use, within the limits of its control groups."""

from __future__ import annotations

from pathlib import Path

_SHARE = 0.8
"""Of what is available; the rest is for what others, and this process, take meanwhile."""

_UNLIMITED = 1 << 60  # version 1 writes a number of this size where there is no limit


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that could hold data or page cache: what the system has available, within every limit.

    Of the limit of each control group of memory (version 1 or 2) from this process's up to the root,
    what its page cache has counts as available, and what cannot be reclaimed does not. None where the
    system does not say.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    limits = list(_group_limits(proc, groups))
    return min(found + limits) if found else None


def usable_bytes() -> int | None:
    """Bytes that may be locked without asking the user: four fifths of what is available."""
    available = available_bytes()
    return None if available is None else int(available * _SHARE)


def _group_limits(proc: Path, groups: Path) -> list[int]:
    limits = []
    try:
        memberships = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in memberships:
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
            limits += [max(0, limit - _kept(folder)) for limit in _limit(folder / name)]
    return limits


def _kept(group: Path) -> int:
    """Bytes of a control group that are not page cache, and cannot be reclaimed."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    pairs = [line.partition(" ") for line in lines]
    stat = {name: int(value) for name, _, value in pairs if value.isdecimal()}
    return stat.get("total_rss", stat.get("anon", 0))


def _limit(file: Path) -> list[int]:
    """The limit in a control group's file, if it has one."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() and int(text) < _UNLIMITED else []

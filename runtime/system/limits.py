"""The limits that a control group or the system sets."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A file system's type (`ext4`) and device (`/dev/vda1`), which are empty where nobody knows them."""

    kind: str
    device: str


def find_mount(path: Path, table: Path = Path("/proc/mounts")) -> Mount:
    """Returns the file system that holds `path`, which need not exist."""
    try:
        mounts = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return Mount("", "")
    real = path.resolve()
    around = [fields for fields in mounts if real.is_relative_to(unescape(fields[1]))]
    if not around:
        return Mount("", "")
    # Of several mounts on one folder the last one covers the others.
    device, _, kind, *_ = max(reversed(around), key=lambda fields: len(fields[1]))
    return Mount(kind, device)


def unescape(field: str) -> str:
    """Return the text of a field of a table of mounts, which has blanks and the like as octal numbers."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda code: chr(int(code[1], 8)), field)


_SHARE = 0.8
"""The share of the available memory that may be used; other processes, and this one, may need the rest."""

_UNLIMITED = 1 << 60  # version 1 shows a number of at least this size if there is no limit

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
"""The files with limits, by the version of control groups. Above memory.high the kernel lets a process
allocate no faster than it takes memory back. Version 1's memory.soft_limit_in_bytes limits nothing by itself.
"""

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
    process's up to the root of what is mounted. The page cache of a group counts as left, because it can be
    reclaimed; memory of programs, files in memory (tmpfs) and the kernel's own do not.
    """
    limits = [
        Limit(int(line.split()[1]) << 10, "the system")
        for line in _lines(proc / "meminfo")
        if re.fullmatch(r"MemAvailable: +[0-9]{1,19} kB", line)
    ]
    return min((*limits, *_group_limits(proc, groups)), key=lambda limit: limit.left) if limits else None


def address_limit(proc: Path = _PROC) -> Limit | None:
    """Returns the limit on address space (RLIMIT_AS), in which also what is only reserved counts."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _number(_text(proc / "self/statm").partition(" ")[0])
    if most == resource.RLIM_INFINITY or pages is None:
        return None
    taken = pages * resource.getpagesize()
    return Limit(max(0, most - taken), "the limit RLIMIT_AS (`ulimit -v`)", "address space")


def available_bytes() -> int | None:
    """Returns the bytes that could hold data or page cache, or None where the system does not say."""
    limit = memory_limit()
    return None if limit is None else limit.left


def usable_bytes() -> int | None:
    """Returns four fifths of the available bytes, which may be locked unasked; None if they are unknown."""
    available = available_bytes()
    return None if available is None else int(available * _SHARE)


class OwnGroup(NamedTuple):
    """A control group of this process: the version of its hierarchy, its folder, the mount point above."""

    version: int
    folder: Path
    mount: Path


def own_groups(proc: Path = _PROC, groups: Path = _GROUPS) -> list[OwnGroup]:
    """Return the control group of memory that this process is in, for each place where it is mounted.

    A mount may show only a group above the process's own, which is then returned, or none of them, which is
    then left out. `groups` is the folder of the hierarchies if the system does not list its mounts.
    """
    own_groups = []
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        for mount, (mounted, root) in _mounts(proc, groups).items():
            names = _below(path, root) if version == mounted and path.startswith("/") else None
            if names is not None:
                own_groups.append(OwnGroup(version, mount.joinpath(*names), mount))
    return own_groups


def _mounts(proc: Path, groups: Path) -> dict[Path, tuple[int, str]]:
    """Return the version of the hierarchy of memory on each mount point, and the path of the group there."""
    mounts = {}
    for line in _lines(proc / "self/mountinfo"):
        first, _, last = line.partition(" - ")
        match first.split(" "), last.split(" "):
            case [_, _, _, root, point, *_], [kind, _, options, *_]:
                memory = kind == "cgroup" and "memory" in options.split(",")
                # A later mount on the same folder covers the earlier one, whatever it is.
                version = 1 if memory else 2 if kind == "cgroup2" else 0
                mounts[Path(unescape(point))] = version, unescape(root)
    of_groups = {point: mount for point, mount in mounts.items() if mount[0]}
    return of_groups or {groups / "memory": (1, "/"), groups: (2, "/")}


def _below(path: str, root: str) -> list[str] | None:
    """Return the names of the groups from that at a mount point, `root`, down to `path`; None if not below.

    Both are relative to the namespace, from which `..` leads up. If `root` lies further up than `path` does,
    the names between are unknown, and only the group at the mount point is known to hold the process.
    """
    names, above = ([name for name in place.split("/") if name] for place in (path, root))
    if names[: len(above)] == above:
        below = names[len(above) :]
        return None if ".." in below else below
    return [] if set(above) == {".."} else None


def _group_limits(proc: Path, groups: Path) -> Iterator[Limit]:
    for group in own_groups(proc, groups):
        for folder in (group.folder, *group.folder.parents):
            limits = [_number(_text(folder / name)) for name in _LIMITS[group.version]]
            least = min((limit for limit in limits if limit is not None), default=_UNLIMITED)
            if least < _UNLIMITED:
                name = os.fsencode(folder.relative_to(group.mount)).decode(errors="replace")
                yield Limit(max(0, least - _kept(folder)), f"control group /{name}".removesuffix("."))
            if folder == group.mount:
                break


def _kept(group: Path) -> int:
    """Returns the bytes of a control group that are not page cache and cannot be reclaimed."""
    pairs = [line.partition(" ") for line in _lines(group / "memory.stat")]
    stat = {name: number for name, _, value in pairs if (number := _number(value)) is not None}
    names = next((_KEPT[first] for first in _KEPT if first in stat), ())
    return sum(stat.get(name, 0) for name in names)


def _number(text: str) -> int | None:
    """Return the number that up to 19 digits stand for; None for any other text, such as `max`."""
    return int(text) if re.fullmatch("[0-9]{1,19}", text) else None


def _text(file: Path) -> str:
    """Return the text of a file of the system without blanks around it; an empty one if there is no file."""
    return "\n".join(_lines(file)).strip()


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the system. A group's name may hold what else ends a line in Python."""
    try:
        return os.fsdecode(file.read_bytes()).split("\n")
    except OSError:
        return []

"""A memory cgroup: a cap that the kernel enforces on the processes that join it.

Linux offers two controllers. Version 1 has a tree of its own below `/sys/fs/cgroup/memory`. Version 2
has one tree for all controllers, in which a group with processes cannot enable the memory controller for
groups below it; the new group is then made beside the caller's group. If neither tree is writable, there
is no cap, and `make_group` returns None.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.system.limits import OwnGroup, own_groups


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup of version 1 or 2 that allows its processes `limit_bytes` in all."""

    folder: Path
    version: int
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the group held, page cache included; 0 for version 2 before Linux 5.19."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        try:
            return int((self.folder / name).read_text())
        except FileNotFoundError:
            return 0

    @property
    def kills(self) -> int:
        """The number of processes that the kernel killed because the group was full."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(fields.get("oom_kill", 0))

    def remove(self) -> None:
        """Remove the group, and retry for a while, since a process that was just killed may still hold it."""
        deadline = time.monotonic() + 5
        while True:
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def join_group(folder: Path) -> None:
    """Move the calling process into a group. Memory that it already has stays charged to its old group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def make_group(limit_bytes: int, *, own: Sequence[OwnGroup] | None = None) -> Iterator[MemoryGroup | None]:
    """Yield a memory cgroup of `limit_bytes`, which is removed at the end; None if none can be made.

    `own` are the groups that this process is in, as the system says by default.
    """
    group = None
    for parent, version in list_parents(own_groups() if own is None else own):
        group = _try_group(parent / f"penstock-{os.getpid()}-{time.monotonic_ns()}", version, limit_bytes)
        if group is not None:
            break
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def list_parents(groups: Sequence[OwnGroup]) -> list[tuple[Path, int]]:
    """The folders in which a group could be made, the best first, each with the controller's version."""
    parents = []
    for group in groups:
        folder = group.folder if group.folder.is_dir() else group.mount
        parents.append((folder, group.version))
        if group.version == 2 and folder != group.mount:
            parents.append((folder.parent, 2))
    return sorted(parents, key=lambda parent: parent[1])


def _try_group(folder: Path, version: int, limit_bytes: int) -> MemoryGroup | None:
    """Make the group and set its limit, swap included. If that fails, remove the group and return None."""
    limit, swap = ("limit_in_bytes", "memsw.limit_in_bytes") if version == 1 else ("max", "swap.max")
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        _write_setting(folder / f"memory.{limit}", limit_bytes)
        # Version 1 limits memory and swap together, and version 2 swap alone. The file does not exist
        # if the kernel does not count swap.
        with contextlib.suppress(FileNotFoundError):
            _write_setting(folder / f"memory.{swap}", limit_bytes if version == 1 else 0)
    except OSError:
        folder.rmdir()
        return None
    return MemoryGroup(folder, version, limit_bytes)


def _write_setting(path: Path, value: int) -> None:
    """Write to a file that the kernel made. If there is none, as outside a cgroup, none is created."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)

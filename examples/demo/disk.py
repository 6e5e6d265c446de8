"""Measures the rate of the disk itself: reads of a file past the page cache, without other work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.files.artifact_files import stamp_file
from penstock.runtime.files.source import Source
from penstock.runtime.machine.rates import measure_read as measure_rate
from penstock.runtime.system.limits import find_mount

_SECONDS = 5.0
IN_MEMORY = {"tmpfs", "ramfs"}
"""File systems whose files are in memory: a demo there would measure no disk, and take much memory."""


@dataclass(frozen=True)
class ReadRate:
    """The bytes and the rate of raw reads. If not `direct`, they went through a cold page cache."""

    nbytes: int
    bytes_per_s: float
    direct: bool


def drop_cache(path: Path) -> None:
    """Write the file back, and ask the kernel to drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_read(weights: Path) -> ReadRate:
    """Read a whole safetensors file as penstock does when it streams, without other work."""
    drop_cache(weights)
    with Source([stamp_file(weights, recorded_path=weights.name)], weights.parent) as source:
        nbytes = weights.stat().st_size
        rate = measure_rate(source, nbytes=nbytes, seconds=_SECONDS)
        return ReadRate(nbytes, rate.median, source.mode == "direct")


def find_folder(nbytes: int) -> Path | None:
    """A folder for temporary files with `nbytes` to spare, on a disk and not in memory; None if none has."""
    for folder in list_folders():
        with contextlib.suppress(OSError):
            space = os.statvfs(folder)
            roomy = space.f_bavail * space.f_frsize >= nbytes
            if roomy and os.access(folder, os.W_OK) and find_mount(folder).kind not in IN_MEMORY:
                return folder
    return None


def list_folders() -> tuple[Path, ...]:
    """Folders for temporary files, the best first."""
    return Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()

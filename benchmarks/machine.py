"""Facts from the kernel: memory of a process, the page cache, the disk, and the machine itself.

Linux only: everything is read from /proc or asked of the page cache.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process: anonymous, mapped from files, both with shared memory, and the peak."""

    anonymous: int
    mapped: int
    total: int
    peak: int


def read_memory(pid: int | str = "self") -> Memory:
    """The memory of a process now; raises OSError where it is gone."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    fields = {line[0]: int(line[1]) << 10 for line in lines if line[-1] == "kB"}
    if "VmHWM:" not in fields:
        raise ProcessLookupError(f"process {pid} has no memory any more")
    return Memory(fields["RssAnon:"], fields["RssFile:"], fields["VmRSS:"], fields["VmHWM:"])


def forget_peak() -> None:
    """Let this process's peak count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def read_disk_bytes() -> int:
    """Bytes that this process has caused to be read from storage, without those that the page cache had."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def read_available_memory() -> int:
    """Bytes that processes could still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo has no line MemAvailable")


def advise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2), without the GIL (the mmap module's own keeps it); raises OSError."""
    if _LIBC.madvise(address, nbytes, advice):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def drop_cache(paths: Iterable[Path], *, unmap: bool = False) -> None:
    """Drop the files from the page cache; with `unmap` first from this process's own page tables.

    A page that some process has mapped stays: that is how what penstock holds in a mapped arena, and has
    paid for in its budget, survives. The peers own no such claim, so theirs are unmapped (they
    fault in again, from the disk).
    """
    names = {str(path.resolve()) for path in paths}
    if unmap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names:
                start, stop = (int(value, 16) for value in fields[0].split("-"))
                advise(start, stop - start, mmap.MADV_DONTNEED)
    for name in names:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(paths: Iterable[Path]) -> None:
    """Read the files once, through a small buffer, so that the page cache holds them."""
    buffer = memoryview(bytearray(_CHUNK))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_cached(paths: Iterable[Path]) -> float:
    """The share of the files' pages that the page cache holds, by mincore(2); 0 for no files."""
    held = pages = 0
    for path in paths:
        nbytes = path.stat().st_size
        if nbytes == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            vector = np.zeros(math.ceil(nbytes / mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            if _LIBC.mincore(address, nbytes, vector.ctypes.data):
                raise OSError(ctypes.get_errno(), f"mincore failed on {path}")
        held += int((vector & 1).sum())
        pages += len(vector)
    return held / pages if pages else 0.0


def describe_machine() -> dict[str, object]:
    """The hardware and software that a result holds for."""
    import torch

    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.split(": ", 1)[1] for line in cpu if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }

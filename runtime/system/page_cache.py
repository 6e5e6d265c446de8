"""Tells how much of a file the page cache holds, without reading it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_WINDOW = 2 << 20
_LOW_BITS = bytes(value & 1 for value in range(256))
_MAP_FAILED = ctypes.c_void_p(-1).value


def cached_fraction(fd: int, nbytes: int, windows: int = 64) -> float:
    """The share of a file's first `nbytes` in the page cache, 0 to 1, from up to `windows` windows of 2 MiB.

    0 where the system does not say. A window is mapped at a time, never the file: the caller may
    live under a limit on its address space.
    """
    count = min(windows, -(-nbytes // _WINDOW))
    last = max(0, nbytes - _WINDOW)
    offsets = [last * i // max(1, count - 1) // mmap.PAGESIZE * mmap.PAGESIZE for i in range(count)]
    probe = _mapped_pages if may_ask_mincore(fd) else _readable_pages
    pages = [probe(fd, offset, min(_WINDOW, nbytes - offset)) for offset in offsets]
    total = sum(asked for _, asked in pages)
    return sum(found for found, _ in pages) / total if total else 0.0


def may_ask_mincore(fd: int) -> bool:
    """Whether mincore(2) tells the truth about a file."""
    # Of a file that one neither owns nor may write, Linux says that everything is cached.
    status = os.fstat(fd)
    return os.geteuid() in (0, status.st_uid)


def _mapped_pages(fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Pages of a window that are cached, and pages asked for, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return 0, 0
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        return 0, 0
    try:
        residency = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        if libc.mincore(address, nbytes, residency) != 0:
            return 0, 0
        return residency.raw.translate(_LOW_BITS).count(1), len(residency)
    finally:
        libc.munmap(address, nbytes)


def _readable_pages(fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """As `_mapped_pages`, of the window's first page, by a read that must not wait for the disk."""
    no_wait = getattr(os, "RWF_NOWAIT", 0)
    if not no_wait:
        return 0, 0
    try:
        os.preadv(fd, [bytearray(min(nbytes, mmap.PAGESIZE))], offset, no_wait)
    except OSError as error:
        return 0, int(error.errno == errno.EAGAIN)
    return 1, 1

"""Tells how much of a file the page cache holds, without reading it, and opens files to read past it."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

from penstock.runtime.system.memory import Reservation, cached_pages
from penstock.schedule.facts.errors import StreamError

_WINDOW = 2 << 20


def cached_fraction(fd: int, nbytes: int, windows: int = 64) -> float:
    """Returns the share of a file's first `nbytes` that the page cache holds, from 0 to 1.

    It is estimated from up to `windows` windows of 2 MiB, and 0 where the system does not say. Only one of
    them is mapped at a time, because the caller may live under a limit on its address space.
    """
    count = min(windows, -(-nbytes // _WINDOW))
    last = max(0, nbytes - _WINDOW)
    offsets = [last * i // max(1, count - 1) // mmap.PAGESIZE * mmap.PAGESIZE for i in range(count)]
    pages = [_pages(fd, offset, min(_WINDOW, nbytes - offset)) for offset in offsets]
    total = sum(asked for _, asked in pages)
    return sum(cached for cached, _ in pages) / total if total else 0.0


def open_uncached(path: Path, fd: int) -> int:
    """Returns another descriptor of the open file `fd`, which reads past the page cache, or -1."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        uncached = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flag) if flag else -1
    except OSError:
        return -1
    if uncached >= 0:
        with suppress(OSError):  # the path may have been renamed over since `fd` was opened
            if os.path.samestat(os.fstat(uncached), os.fstat(fd)):
                return uncached
        with suppress(OSError):
            os.close(uncached)
    return -1


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Tells whether the page cache holds any page of a range of a file, which begins at a page."""
    return _pages(fd, offset, nbytes)[0] > 0


def _pages(fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Returns the number of pages of a window that are cached, and the number of pages looked at."""
    return (_mapped_pages if may_ask_mincore(fd) else _readable_pages)(fd, offset, nbytes)


def may_ask_mincore(fd: int) -> bool:
    """Tells whether mincore(2) tells the truth about a file."""
    # For a file that the process neither owns nor may write, Linux says that all of it is cached.
    with suppress(OSError):
        return os.geteuid() in (0, os.fstat(fd).st_uid)
    return False


def _mapped_pages(fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Asks mincore(2) for all pages of a window."""
    try:
        with Reservation(nbytes) as window:
            window.map_file(0, window.nbytes, fd, offset)
            cached = cached_pages(window.address, window.nbytes)
    except StreamError:  # no address space for it
        return 0, 0
    return sum(cached), len(cached)


def _readable_pages(fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Asks for the first page of a window, by a read that must not wait for the disk."""
    no_wait = getattr(os, "RWF_NOWAIT", 0)
    if not no_wait:
        return 0, 0
    try:
        os.preadv(fd, [bytearray(min(nbytes, mmap.PAGESIZE))], offset, no_wait)
    except OSError as error:
        return 0, int(error.errno == errno.EAGAIN)
    return 1, 1

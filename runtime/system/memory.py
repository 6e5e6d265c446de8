"""The memory of this process and system: what is free, what is taken, and what the page cache keeps."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from penstock.schedule.facts.errors import StreamError

_STATUS = Path("/proc/self/status")
_ALLOCATOR = ctypes.CDLL(None)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as glibc's malloc.h names them

_LARGE = 2 << 20


def anonymous_bytes(status: Path = _STATUS) -> int:
    """Returns the bytes of memory that no file holds as well, or 0 where the system does not say."""
    with suppress(OSError):
        return sum(
            int(kib) << 10 for kib in re.findall(r"^RssAnon:\s+(\d+)", status.read_text(), re.MULTILINE)
        )
    return 0


def give_back_unused() -> None:
    """Collect garbage, and give free pages of the heap back to the system, where its C library can.

    After an export of a Llama of 16 layers this gave back 9 of 76 MiB, and took 0.3 s.
    """
    gc.collect()
    give_back_free()


def give_back_free() -> None:
    """Give free pages of the heap back to the system, where its C library can."""
    trim = getattr(_ALLOCATOR, "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_when_freed(large: int = _LARGE) -> None:
    """Let large blocks go back to the system when they are freed, where its C library can, from now on.

    glibc raises the size from which it does so to that of each larger block that is freed, up to 32 MiB.
    Then tensors lie in the heap, and the holes between them stay. In few runs a call of a Llama with 1,024
    tokens, whose tensors take 47 MiB, took 60 to 97 MiB, and with a threshold of 2 MiB 57 to 61. It takes 3 %
    more of the processor for such a small model, as the system clears the pages that it gives.
    """
    option = getattr(_ALLOCATOR, "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, large)
        option(_TRIM_THRESHOLD, large)


def made_code_bytes() -> int:
    """Return about what code that libraries have made takes, such as kernels for shapes, in about 1 ms.

    It is two thirds of the code's address space, as of oneDNN's linear layers (torch 2.13, x86): their
    kernels take 2.3 MiB in the heap for each 3.5 MiB of that.
    """
    with suppress(StreamError), _proc("maps") as lines:
        extents = re.findall(rb"^(\w+)-(\w+) ..x. \w+ \S+ 0 *$", lines.read(), re.MULTILINE)
        return sum(int(stop, 16) - int(start, 16) for start, stop in extents) * 2 // 3
    return 0


PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20

# Numbers that the mmap module does not name in every version. They are Linux's, and the same on
# every architecture that torch runs on.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

# Without NORESERVE, memory that is only filled in part would count in full against overcommitment.
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

# The first library releases the interpreter lock during a call, the second keeps it.
_LIBC, _KEEPING = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_LIBC.mmap.argtypes = (_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_int64)
_LIBC.mmap.restype = _ADDRESS
_LIBC.munmap.argtypes = (_ADDRESS, _SIZE)
_LIBC.mprotect.argtypes = _LIBC.madvise.argtypes = _KEEPING.madvise.argtypes = (_ADDRESS, _SIZE, _INT)
if hasattr(_LIBC, "mincore"):
    _KEEPING.mincore.argtypes = (_ADDRESS, _SIZE, ctypes.POINTER(ctypes.c_ubyte))
if hasattr(_LIBC, "mremap"):
    _KEEPING.mremap.argtypes = (_ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS)
    _KEEPING.mremap.restype = _ADDRESS

# MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP: what is left behind stays ours, and empty.
_MOVE = 1 | 2 | 4

_SLOW = 1e9
"""Memory that comes at fewer bytes per second than this comes slowly: a disk brings more."""

_PATIENCE = 4
"""After so many slow pieces in a row, small pages are asked for."""

Advise = Callable[[int, int, int], None]


def round_down(value: int, unit: int) -> int:
    return value - value % unit


def round_up(value: int, unit: int) -> int:
    return value + -value % unit


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise(2) on page-aligned memory, again after an interruption. Raises OSError where it fails."""
    _madvise(_LIBC, address, nbytes, advice)


def _madvise(libc: ctypes.CDLL, address: int, nbytes: int, advice: int) -> None:
    while libc.madvise(address, nbytes, advice):
        error = _last_error()
        if error.errno not in (errno.EAGAIN, errno.EINTR):
            raise error


def hint(address: int, nbytes: int, advice: int) -> None:
    """Call madvise(2) as `advise` does, and ignore a kernel that does not know the advice."""
    with suppress(OSError):
        advise(address, nbytes, advice)


def drop_pages(address: int, nbytes: int) -> None:
    """Give page-aligned memory back with MADV_DONTNEED. Raises OSError where that fails.

    The call keeps the GIL: it takes microseconds, and getting the GIL back from a reader takes many more.
    """
    _madvise(_KEEPING, address, nbytes, mmap.MADV_DONTNEED)


def protect(address: int, nbytes: int, protection: int) -> None:
    """Call mprotect(2) on page-aligned memory. Raises OSError where it fails."""
    if _LIBC.mprotect(address, nbytes, protection):
        raise _last_error()


def supports_populate(ask: Advise = advise) -> bool:
    """Tells whether the kernel knows MADV_POPULATE_READ (Linux 5.14 and later); tests give another `ask`.

    Without it a file mapping cannot be filled safely: touching a page past the end of a file that
    shrank kills the process with SIGBUS, where populating returns an error.
    """
    return _works(lambda address: ask(address, PAGE, MADV_POPULATE_READ))


def _works(attempt: Callable[[int], None]) -> bool:
    """Tells whether this system is Linux and a call on the first of two pages of private memory succeeds."""
    if sys.platform != "linux":
        return False
    with Reservation(2 * PAGE) as pages:
        pages.map_anonymous(0, 2 * PAGE)
        try:
            attempt(pages.address)
        except OSError:
            return False
    return True


def move(old: int, new: int, nbytes: int) -> None:
    """Move private pages from one address to another without a copy. Raises OSError where that fails.

    mremap(2) moves a huge page, or a whole page table, by one entry: 6 us for 2 MiB.
    """
    if _KEEPING.mremap(old, nbytes, nbytes, _MOVE, new) != new:
        raise _last_error()


def cached_pages(address: int, nbytes: int) -> list[bool]:
    """Returns for each page of a mapped file whether the page cache holds it; nothing where nobody tells.

    Of private memory it tells which pages have been touched, a read of one that was never written included.
    mincore(2) is asked, which does not tell the truth about a file that is neither ours nor writable to us.
    """
    pages = round_up(nbytes, PAGE) // PAGE
    answer = (ctypes.c_ubyte * pages)()
    if not hasattr(_KEEPING, "mincore") or _KEEPING.mincore(address, nbytes, answer):
        return []
    return [bool(page & 1) for page in answer]


def supports_move() -> bool:
    """Tells whether pages can be moved while their old place stays reserved (Linux 5.7 and later)."""
    return _works(lambda address: move(address, address + PAGE, PAGE))


class Reservation:
    """Holds `nbytes` of address space that begin at a multiple of 2 MiB.

    Nothing can be read there until memory or a file is mapped into it. A huge page of the page
    cache is mapped whole only where address and file offset agree modulo 2 MiB. An inaccessible
    page on either side stops overruns, and keeps the kernel from merging our areas with a
    neighbour's, so that `resident_bytes` counts only ours. Raises StreamError where the address
    space does not suffice.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, 1), PAGE)
        size = self.nbytes + 2 * PAGE + HUGE_PAGE
        base = _map(None, size, PROT_NONE, _ANONYMOUS)
        self.address = round_up(base + PAGE, HUGE_PAGE)
        self._start, self._stop = self.address - PAGE, self.address + self.nbytes + PAGE
        if self._start > base:
            _LIBC.munmap(base, self._start - base)
        if base + size > self._stop:
            _LIBC.munmap(self._stop, base + size - self._stop)

    def map_anonymous(self, start: int, nbytes: int) -> None:
        """Map zeroed, private, writable pages at byte `start`. They take no memory until they are touched."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _map(self.address + start, nbytes, protection, _ANONYMOUS | _MAP_FIXED)

    def map_file(self, start: int, nbytes: int, descriptor: int, offset: int) -> None:
        """Map `nbytes` of a file, from `offset` on, at byte `start`, read-only. Both are whole pages."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _map(self.address + start, nbytes, mmap.PROT_READ, flags, file=(descriptor, offset))

    def resident_bytes(self) -> int:
        """Returns the bytes of whole pages that this process's page tables hold here (/proc/self/smaps)."""
        return resident_bytes(self._start, self._stop)

    def close(self) -> None:
        """Unmap everything. A second call does nothing."""
        nbytes, self._stop = self._stop - self._start, self._start
        # The address is forgotten first: after an interrupt, a second unmapping could hit other mappings.
        if nbytes:
            _LIBC.munmap(self._start, nbytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def huge_pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields address and size of each huge page of some memory, and of the parts of some at its ends."""
    stop = address + nbytes
    for start in range(round_down(address, HUGE_PAGE), stop, HUGE_PAGE):
        first = max(start, address)
        yield first, min(start + HUGE_PAGE, stop) - first


class FreshMemory:
    """Takes memory that has never been touched, piece by piece, from any thread.

    Huge pages mostly come faster than small ones, and cost fewer misses of the TLB later. But what a virtual
    machine has free in whole huge pages its host may have taken back: 514 MiB then took 0.7 s where small
    pages took 0.13, and reads at the same time ran at a fifth of their speed. So after some pieces that came
    slowly, small ones are asked for; direct reads fill both as fast, once they are there. `refused` then says
    why, and also where the system refuses huge pages.
    """

    def __init__(self) -> None:
        self._slow, self.refused = 0, ""

    def take(self, address: int, nbytes: int) -> None:
        """Take memory for whole pages at `address`. Raises StreamError where there is not enough."""
        huge = self._slow < _PATIENCE
        try:
            advise(address, nbytes, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
        except OSError as error:  # small pages will do
            self.refused = f"madvise refuses them ({error.strerror})"
        began = time.thread_time()  # processor time of this thread alone
        _populate(address, nbytes)
        if huge:
            slow = nbytes < _SLOW * (time.thread_time() - began)
            self._slow = self._slow + 1 if slow else 0
        else:
            self.refused = self.refused or f"{_PATIENCE} in a row came slower than 1 GB/s"


def _populate(address: int, nbytes: int) -> None:
    try:
        advise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise StreamError(
                f"{nbytes} bytes of memory for weights could not be had ({error.strerror}): lower the "
                "budget or free memory"
            ) from error
        ctypes.memset(address, 0, nbytes)


def resident_bytes(start: int, stop: int, *, huge: bool = False) -> int:
    """Returns the resident bytes, or those in huge pages, of every mapping that touches `start` to `stop`.

    The system counts while it is read, in ascending order, so nothing is read of what lies behind.
    """
    total, inside, counted = 0, False, b"AnonHugePages:" if huge else b"Rss:"
    with _proc("smaps") as lines:
        for line in lines:
            head, _, fields = line.partition(b" ")
            if not head.endswith(b":"):
                low, high = (int(end, 16) for end in head.split(b"-"))
                if low >= stop:
                    break
                inside = low < stop and high > start
            elif inside and head == counted:
                total += int(fields.split()[0]) * 1024
    return total


def _map(
    address: int | None, size: int, protection: int, flags: int, *, file: tuple[int, int] = (-1, 0)
) -> int:
    """Call mmap(2) for `size` bytes of `file` (descriptor, offset). Raises StreamError where it fails."""
    mapped = _LIBC.mmap(address, size, protection, flags, *file)
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise StreamError(
            f"the system refused {size} bytes of address space for weights ({os.strerror(code)}): raise "
            f"the process's limits (ulimit -v, vm.max_map_count, vm.overcommit_memory) or lower the budget"
        )
    return int(mapped)


def _proc(name: str) -> BinaryIO:
    """Opens a file of /proc/self. Raises StreamError where the system has none."""
    path = f"/proc/self/{name}"
    try:
        return open(path, "rb")
    except OSError as error:
        raise StreamError(
            f"{path} cannot be read ({error.strerror}): only Linux tells what is mapped"
        ) from error


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


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

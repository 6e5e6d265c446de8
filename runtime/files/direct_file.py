"""Files that are read by position past the page cache, and the file that values leave memory for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from io import FileIO
from pathlib import Path

from penstock.runtime.files.artifact_files import check_open_file, locate
from penstock.runtime.files.safetensors_file import RECOMPILE, open_descriptor, reading
from penstock.runtime.system.memory import PAGE, open_uncached
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Storage, WeightFile
from penstock.schedule.plan import Plan

# Linux reads at most 0x7ffff000 bytes a call; a multiple of every block size stays below it.
_LARGEST_READ = 1 << 30
_BLOCK_SIZES = (512, 4096)
_BUFFER_WRITE = 0x200  # PyBUF_WRITE


AGAIN = "open the artifact again, or load the model again"


class Contents:
    """The ctime of an open file, and `compare`, which raises an error if the file has other bytes by now.

    Whoever writes to a file can put back its size and its modification time, and not its ctime. That changes
    without a write as well, when a file gets other rights or another name, so only its bytes tell.
    """

    def __init__(self, ctime_ns: int) -> None:
        self.ctime_ns = ctime_ns
        self.compare: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def check(self, ctime_ns: int) -> None:
        """Compare the bytes if the file has another ctime than it had when they were last compared."""
        if ctime_ns != self.ctime_ns:
            with self._lock:
                if ctime_ns != self.ctime_ns:
                    self.compare()
                    self.ctime_ns = ctime_ns


@dataclass(frozen=True)
class DirectFile:
    """A file of `nbytes`, last modified at `mtime_ns` when it was opened, as `file`.

    `direct` reads it past the page cache, in multiples of `block`. It is None, and `block` is 0, where only
    buffered reads work; `note` then says why, if direct ones were asked for. `contents` is None for a file
    that is written all the time.
    """

    path: Path
    nbytes: int
    mtime_ns: int
    file: FileIO
    direct: FileIO | None = None
    block: int = 0
    note: str = ""
    contents: Contents | None = None

    @property
    def fd(self) -> int:
        """The descriptor of buffered reads. Raises ValueError once it is closed."""
        return self.file.fileno()

    @property
    def direct_fd(self) -> int:
        """The descriptor of direct reads; -1 where there are none."""
        return self.direct.fileno() if self.direct else -1

    def read_into(self, offset: int, address: int, nbytes: int, *, through_cache: bool = False) -> None:
        """Fill `nbytes` of memory at `address` from byte `offset` on, or raise SourceError.

        With `through_cache` the page cache holds the bytes afterwards; the system is told of all at once.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise SourceError(
                f"bytes {offset} to {offset + nbytes} were asked of {self.path}, which has {self.nbytes}: "
                "the payload does not belong to this file; compile again"
            )
        if not nbytes:
            return  # advice about zero bytes would apply to all bytes that follow
        if through_cache:
            with suppress(OSError, AttributeError):  # the advice is optional; some systems lack it
                os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
        if through_cache or not self.block:
            self._read(self.fd, offset, address, nbytes)
        elif (offset - address) % self.block == 0:
            self._read_in_place(offset, address, nbytes)
        else:
            for at in range(0, nbytes, _LARGEST_READ):
                part = min(_LARGEST_READ, nbytes - at)
                if not self._read_and_move(offset + at, address + at, part):
                    self._read(self.fd, offset + at, address + at, part)
        # Only a check after the read shows that all of its bytes are those of the file that was opened.
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise SourceError unless the file is as it was opened (one fstat, or all bytes)."""
        with reading(self.path):
            status = os.fstat(self.fd)
        if status.st_size < self.nbytes:
            raise SourceError(
                f"{self.path} has been truncated while in use: expected {self.nbytes} bytes, "
                f"got {status.st_size}; restore the file and {AGAIN}"
            )
        if (status.st_size, status.st_mtime_ns) != (self.nbytes, self.mtime_ns):
            raise SourceError(
                f"{self.path} has been changed while in use: expected {self.nbytes} bytes of "
                f"{_time(self.mtime_ns)}, got {status.st_size} of {_time(status.st_mtime_ns)}; leave the "
                f"file alone, and {AGAIN}"
            )
        if self.contents is not None:
            self.contents.check(status.st_ctime_ns)

    def close(self) -> None:
        """Close both descriptors. It may be called again, also after an interrupt."""
        _close(self.file)
        if self.direct is not None:
            _close(self.direct)

    def _read_in_place(self, offset: int, address: int, nbytes: int) -> None:
        head = min(-offset % self.block, nbytes)
        whole = (nbytes - head) // self.block * self.block
        done = head + whole
        self._read(self.fd, offset, address, head)
        self._read(self.direct_fd, offset + head, address + head, whole)
        self._read(self.fd, offset + done, address + done, nbytes - done)

    def _read_and_move(self, offset: int, address: int, nbytes: int) -> bool:
        """Read all blocks that hold the bytes at once and directly. Returns False where some did not come.

        The first block and the last ones are read to memory of their own, and those between into the range
        itself, behind their places, and are then moved. For a cold GiB this took 0.19 s of processor time,
        reading through the page cache 1.20 s, or 0.39 s with each piece announced to it, and reading where
        offset and address agree 0.06 s. The times of the disk differed by about a tenth
        (benchmarks/disk/reading.py of commit bc62d93e).
        """
        block, stop = self.block, address + nbytes
        first = offset // block * block
        start = address + first + block - offset  # the place of the second block
        place = -(-start // block) * block
        whole = max(0, (stop - place) // block * block)
        remaining = max(0, stop - (start + whole))
        edges = memoryview(mmap.mmap(-1, 4 * block))
        tail = edges[block : block + -(-remaining // block) * block]
        between = [memory_view(place, whole)] if whole else []
        try:
            got = os.preadv(self.direct_fd, [edges[:block], *between, tail], first)
        except OSError:
            return False  # the buffered read says why, if it fails as well
        if got < offset + nbytes - first:
            return False
        ctypes.memmove(start, place, whole)
        skipped, head = offset - first, min(nbytes, start - address)
        memory_view(address, head)[:] = edges[skipped : skipped + head]
        memory_view(start + whole, remaining)[:] = tail[:remaining]
        return True

    def _read(self, fd: int, offset: int, address: int, nbytes: int) -> None:
        stop = offset + nbytes
        while offset < stop:
            part = memory_view(address, min(stop - offset, _LARGEST_READ))
            try:
                got = os.preadv(fd, [part], offset)
            except OSError as error:
                # If the file now ends within a block, a direct read behind its end fails with EINVAL.
                self.check_unchanged()
                raise SourceError(
                    f"reading bytes {offset} to {stop} of {self.path} failed ({error.strerror}); "
                    "check the disk, then try again"
                ) from error
            if got == 0:
                self.check_unchanged()
                raise SourceError(f"{self.path} ended at byte {offset} while it was read; try again")
            offset += got
            address += got


def open_direct_file(file: WeightFile, folder: Path, *, direct: bool, check: bool) -> DirectFile:
    """Open a weight file of the artifact `folder`. With `check`, raise SourceError unless its stamp holds."""
    path = locate(file, folder)
    in_place = Path(file.path).is_absolute()
    with ExitStack() as opened:
        try:
            with reading(path):
                source = FileIO(path, opener=lambda *_: open_descriptor(path, RECOMPILE))
                opened.callback(_close, source)
                fd = source.fileno()
                status = os.fstat(fd)  # taken before the check, so that a change meanwhile is noticed later
                if check:
                    check_open_file(fd, path, file, in_place=in_place)
                uncached_fd = open_uncached(path, fd) if direct else -1
                past, block = usable_directly(uncached_fd) if uncached_fd >= 0 else (None, 0)
        except SourceError as error:
            if not in_place:
                raise
            raise SourceError(
                f"{error}; an identical copy is accepted by `penstock relink {folder} {path.name}`"
            ) from error
        opened.pop_all()
    note = "" if block or not direct else f"the file system of {path} lacks O_DIRECT: buffered reads"
    contents = Contents(status.st_ctime_ns)
    return DirectFile(path, file.nbytes, status.st_mtime_ns, source, past, block, note, contents)


def _time(ns: int) -> str:
    """A time of a file for people, in local time: `2026-11-23 08:00:00.000000001`."""
    seconds, nanoseconds = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}.{nanoseconds:09d}"


def memory_view(address: int, nbytes: int) -> memoryview:
    """Returns a writable view of raw memory, which it does not keep alive."""
    from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
    from_memory.restype = ctypes.py_object
    from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: memoryview = from_memory(address, nbytes, _BUFFER_WRITE)
    return view


def usable_directly(fd: int) -> tuple[FileIO | None, int]:
    """Returns what reads past the page cache, and its block in bytes, or closes it: (None, 0)."""
    direct, block = FileIO(fd), _direct_block(fd)
    if block:
        return direct, block
    _close(direct)
    return None, 0


def _close(file: FileIO) -> None:
    with suppress(OSError):  # of what was read, nothing can be lost
        file.close()


def _direct_block(fd: int) -> int:
    # Some file systems accept the flag and refuse the reads, so only a read shows whether it works.
    with mmap.mmap(-1, 2 * max(_BLOCK_SIZES)) as memory, memoryview(memory) as view:
        for block in _BLOCK_SIZES:
            with view[block : 2 * block] as aligned_to_block:
                try:
                    os.preadv(fd, [aligned_to_block], 0)
                    return block
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        break
    return 0


_LARGEST_WRITE = 1 << 30
_WHERE = "the folder for values that leave memory"
_ELSEWHERE = "name another folder with load(spill=...)"


@dataclass(frozen=True)
class SpillFile(DirectFile):
    """An open file in the folder `path`, which nobody else can open; `elsewhere` says how to name another."""

    elsewhere: str = _ELSEWHERE

    def read_into(self, offset: int, address: int, nbytes: int, *, through_cache: bool = False) -> None:
        try:
            super().read_into(offset, address, nbytes, through_cache=through_cache)
        except SourceError as error:
            raise SourceError(
                f"what left memory for a file in {self.path}, {_WHERE}, could not be read back ({error}): "
                f"{self.elsewhere}"
            ) from error

    def check_unchanged(self) -> None:
        """Does nothing, because the file is written all the time."""

    def write_from(self, offset: int, address: int, nbytes: int) -> None:
        """Write `nbytes` of memory at `address` from byte `offset` on, or raise SourceError.

        Whole pages go past the page cache where offset and address agree, which would hold them beside the
        budget. Pages, and not blocks: a page of which one thread writes a part past the cache, while another
        writes the rest through it, may lose either.
        """
        head, whole = nbytes, 0
        if self.block and (offset - address) % self.block == 0:
            unit = max(self.block, PAGE)
            head = min(-offset % unit, nbytes)
            whole = (nbytes - head) // unit * unit
        done = head + whole
        self._write(self.fd, offset, address, head)
        self._write(self.direct_fd, offset + head, address + head, whole)
        self._write(self.fd, offset + done, address + done, nbytes - done)

    def _write(self, fd: int, offset: int, address: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            part = memory_view(address + done, min(nbytes - done, _LARGEST_WRITE))
            try:
                wrote = os.pwritev(fd, [part], offset + done)
            except OSError as error:
                raise self._refused(nbytes, str(error.strerror)) from error
            if not wrote:
                raise self._refused(nbytes, "no byte was written")
            done += wrote

    def _refused(self, nbytes: int, why: str) -> SourceError:
        return SourceError(
            f"writing {nbytes} bytes to a file in {self.path}, {_WHERE}, failed ({why}): "
            f"{_instead(self.elsewhere)}"
        )


def with_places(storages: Sequence[Storage], plan: Plan, file: int) -> tuple[Storage, ...]:
    """The storages, of which those that are produced have places in the spill file, which has number `file`.

    They follow one another in the order of the catalog, each from a multiple of the granule in whole pages
    on, so that no two of them share a page.
    """
    placed, end, unit = [], 0, _round_up(plan.arena.granule, PAGE)
    for storage in storages:
        extents = storage.extents
        if storage.kind == "produced" and storage.nbytes:
            extents = (Extent(file, end, 0, storage.nbytes),)
            end = _round_up(end + storage.nbytes, unit)
        placed.append(replace(storage, extents=extents))
    return tuple(placed)


def spills(plan: Plan) -> bool:
    """Tells whether a plan has values leave memory."""
    return any(t.direction == "out" for schedule in plan.schedules for t in schedule.transfers)


def open_spill_file(folder: str | os.PathLike[str] | None, storages: Sequence[Storage]) -> SpillFile:
    """Opens a file for the produced storages in a folder, by default the system's for temporary files.

    Raises SourceError where the folder has no room for them now, or no file can be made there.
    """
    where = Path(tempfile.gettempdir() if folder is None else folder)
    produced = [storage for storage in storages if storage.kind == "produced"]
    ends = [extent.file_offset + extent.nbytes for storage in produced for extent in storage.extents]
    return open_scratch(where, max(ends, default=0), needed=sum(storage.nbytes for storage in produced))


def open_scratch(
    where: Path, size: int, *, needed: int | None = None, elsewhere: str = _ELSEWHERE
) -> SpillFile:
    """Opens a file of `size` bytes in a folder, of which `needed` bytes are written, by default all.

    Errors end in `elsewhere`.

    Raises SourceError as `open_spill_file` does.
    """
    needed = size if needed is None else needed
    with ExitStack() as opened:
        try:
            status = os.statvfs(where)
            free = status.f_bavail * status.f_frsize
            if free < needed:
                raise SourceError(
                    f"{where}, {_WHERE}, has {free} bytes free, and {needed} may be written there: "
                    f"{_instead(elsewhere)}"
                )
            file = opened.enter_context(FileIO(where, opener=lambda *_: _unnamed(where)))
            os.ftruncate(file.fileno(), size)
            direct, block = _open_past_cache(file.fileno())
        except OSError as error:
            raise SourceError(
                f"no file of {size} bytes can be made in {where}, {_WHERE} ({error.strerror}): "
                f"{_instead(elsewhere)}"
            ) from error
        opened.pop_all()
    return SpillFile(where, size, 0, file, direct, block, elsewhere=elsewhere)


def _instead(elsewhere: str) -> str:
    return f"free some room there, or {elsewhere}"


def _unnamed(folder: Path) -> int:
    """Returns a descriptor of a new file without a name; some file systems need one for a moment."""
    flag = getattr(os, "O_TMPFILE", 0)
    if flag:
        with suppress(OSError):
            return os.open(folder, os.O_RDWR | os.O_CLOEXEC | flag, 0o600)
    fd, name = tempfile.mkstemp(prefix="penstock-", dir=folder)
    os.unlink(name)
    return fd


def _open_past_cache(fd: int) -> tuple[FileIO | None, int]:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None, 0
    try:
        return usable_directly(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | flag))
    except OSError:
        return None, 0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

"""Reads weight bytes from safetensors files into raw memory, past the page cache where possible.

A `Source` holds every weight file of an artifact open. Reads are positioned, take no shared lock
while they run and release the interpreter lock, so several threads read at once. Direct reads
(O_DIRECT) need file offset and memory address congruent modulo the device's logical block; what
lies before the first and after the last whole block is read through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from penstock.runtime.safetensors_file import open_error
from penstock.runtime.stamp import check_open_file, locate
from penstock.schedule.errors import SourceError
from penstock.schedule.model import Storage, WeightFile

Mode = Literal["direct", "buffered"]

# Linux reads at most 0x7ffff000 bytes a call; a multiple of every block size stays below it.
_LARGEST_READ = 1 << 30
_BLOCK_SIZES = (512, 4096)
_BUFFER_WRITE = 0x200  # PyBUF_WRITE


class Source:
    """The open weight files of an artifact.

    `files` are those of the payload's catalog, `folder` the artifact's (relative paths are
    inside it). With `check`, every file is compared with its stamp first; SourceError names the
    first that is missing, unreadable or changed. `mode` asks for a way of reading; where a file
    system cannot read directly, reads are buffered and `note` says why.

    Methods may be called from any thread. `close` waits for reads in flight.
    """

    def __init__(
        self, files: Sequence[WeightFile], folder: Path, *, mode: Mode = "direct", check: bool = True
    ) -> None:
        self._idle = threading.Condition()
        self._reading = 0
        self._closed = False
        self._files: list[_OpenFile] = []
        try:
            for file in files:
                self._files.append(_open(file, folder, direct=mode == "direct", check=check))
        except BaseException:
            self.close()
            raise
        self._asked = mode

    @property
    def mode(self) -> Mode:
        """How whole blocks are really read: `direct` only if every file can be."""
        direct = self._asked == "direct" and all(f.block for f in self._files)
        return "direct" if direct else "buffered"

    @property
    def note(self) -> str:
        """Why reads are buffered though direct ones were asked for; empty otherwise."""
        return next((f.note for f in self._files if f.note), "")

    @property
    def block(self) -> int:
        """The modulus by which file offset and address must agree for a direct read (1: any)."""
        return max((f.block for f in self._files), default=0) or 1

    def path(self, file: int) -> Path:
        """Where file number `file` of the catalog lies."""
        return self._files[file].path

    def fd(self, file: int) -> int:
        """The buffered descriptor of a file, for mapping it; it belongs to this Source."""
        if self._closed:
            raise SourceError(_CLOSED)
        return self._files[file].fd

    def check_size(self, file: int) -> None:
        """Raise SourceError if the file has become shorter than its stamp says (one fstat)."""
        with self._in_flight():
            _check_size(self._files[file])

    def read_into(self, file: int, offset: int, address: int, nbytes: int) -> None:
        """Fill `nbytes` of memory at `address` with the file's bytes from `offset` on.

        The memory must be writable and stay alive until this returns. Raises SourceError when not
        all bytes could be read; the memory then holds an unspecified mixture.
        """
        with self._in_flight():
            opened = self._files[file]
            if offset < 0 or nbytes < 0 or offset + nbytes > opened.nbytes:
                raise SourceError(
                    f"bytes {offset} to {offset + nbytes} were asked of {opened.path}, which has "
                    f"{opened.nbytes}: the payload does not belong to this file"
                )
            head = -offset % opened.block if opened.block else nbytes
            direct = opened.block and (offset - address) % opened.block == 0 and nbytes - head >= opened.block
            if not direct:
                _read(opened, opened.fd, offset, address, nbytes)
                return
            whole = (nbytes - head) // opened.block * opened.block
            tail = head + whole
            _read(opened, opened.fd, offset, address, head)
            _read(opened, opened.direct_fd, offset + head, address + head, whole)
            _read(opened, opened.fd, offset + tail, address + tail, nbytes - tail)

    def read_storage(self, storage: Storage, address: int) -> None:
        """Fill memory with a storage that begins at `address`, all its extents; errors as `read_into`."""
        for extent in storage.extents:
            self.read_into(extent.file, extent.file_offset, address + extent.storage_offset, extent.nbytes)

    def close(self) -> None:
        """Close every descriptor once the reads in flight have ended; may be called again."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._reading == 0)
            files, self._files = self._files, []
        for opened in files:
            opened.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        # A descriptor closed under a running read could be reused by another file, whose bytes
        # would then arrive as weights.
        with self._idle:
            if self._closed:
                raise SourceError(_CLOSED)
            self._reading += 1
        try:
            yield
        finally:
            with self._idle:
                self._reading -= 1
                self._idle.notify_all()


_CLOSED = "the weight files have been closed; open the artifact again to read from it"


@dataclass(frozen=True)
class _OpenFile:
    """A weight file's descriptors; `block` is 0, and `direct_fd` -1, where only buffered reads work."""

    path: Path
    nbytes: int
    fd: int
    direct_fd: int = -1
    block: int = 0
    note: str = ""

    def close(self) -> None:
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)


def memory_view(address: int, nbytes: int) -> memoryview:
    """A writable view of raw memory, which it does not keep alive."""
    from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
    from_memory.restype = ctypes.py_object
    from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view = from_memory(address, nbytes, _BUFFER_WRITE)
    assert isinstance(view, memoryview)
    return view


def open_direct(path: Path) -> tuple[int, int]:
    """A descriptor that reads past the page cache, and its block in bytes; (-1, 0) where none works."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1, 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError:
        return -1, 0
    # Some file systems take the flag and refuse the reads, so only a read tells.
    with mmap.mmap(-1, 2 * max(_BLOCK_SIZES)) as memory, memoryview(memory) as view:
        for block in _BLOCK_SIZES:
            try:
                with view[block : 2 * block] as aligned_to_block:
                    os.preadv(fd, [aligned_to_block], 0)
                return fd, block
            except OSError as error:
                if error.errno != errno.EINVAL:
                    break
    os.close(fd)
    return -1, 0


def _open(file: WeightFile, folder: Path, *, direct: bool, check: bool) -> _OpenFile:
    path = locate(file, folder)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise open_error(path, error) from error
    try:
        if check:
            check_open_file(fd, path, file, in_place=Path(file.path).is_absolute())
        direct_fd, block = open_direct(path) if direct else (-1, 0)
    except BaseException:
        os.close(fd)
        raise
    note = f"the file system of {path} lacks O_DIRECT: buffered reads" if direct and not block else ""
    return _OpenFile(path, file.nbytes, fd, direct_fd, block, note)


def _read(opened: _OpenFile, fd: int, offset: int, address: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        part = memory_view(address + done, min(nbytes - done, _LARGEST_READ))
        try:
            got = os.preadv(fd, [part], offset + done)
        except OSError as error:
            # Behind a new end that is in the middle of a block a direct read fails with EINVAL.
            _check_size(opened)
            raise SourceError(
                f"reading bytes {offset + done} to {offset + nbytes} of {opened.path} failed: "
                f"{error.strerror}; check the disk, then try again"
            ) from error
        if got == 0:
            _check_size(opened)
            raise SourceError(f"{opened.path} ended at byte {offset + done} while it was read; try again")
        done += got


def _check_size(opened: _OpenFile) -> None:
    found = os.fstat(opened.fd).st_size
    if found < opened.nbytes:
        raise SourceError(
            f"{opened.path} has been truncated while in use: expected {opened.nbytes} bytes, got {found}; "
            "restore the file and open the artifact again"
        )

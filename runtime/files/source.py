"""Reads weight bytes from an artifact's files into raw memory, by several readers at once."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from penstock.runtime.files.artifact_files import CHUNK_BYTES, PAYLOAD, note_seen, read_seen
from penstock.runtime.files.direct_file import AGAIN, DirectFile, SpillFile, open_direct_file
from penstock.runtime.files.safetensors_file import read_exactly
from penstock.runtime.system.limits import available_bytes
from penstock.runtime.system.memory import HUGE_PAGE, MADV_HUGEPAGE, cached_fraction, hint, round_up
from penstock.runtime.system.threads import ReaderThreads
from penstock.schedule.facts.errors import PlanError, SourceError
from penstock.schedule.facts.model import Extent, Storage, WeightFile

_log = logging.getLogger(__name__)

Mode = Literal["direct", "buffered"]

WARM_FRACTION = 0.95
"""The share of the files in the page cache from which on reading through the cache is the faster way.

With a smaller share, the other bytes would enter the cache in small folios, which slow a mapping in every
pass.
"""

_WINDOWS, _FEWEST_WINDOWS = 128, 4  # windows in which the page cache is asked, of all files and of each

_OPENERS = 8  # threads that open files: stamps are compared by many small reads

_CLOSED = f"the weight files have been closed; to read from them, {AGAIN}"


class Source:
    """The open weight files of an artifact.

    `files` are those of the payload's catalog, `folder` the artifact's (relative paths are
    inside it). With `check`, every file is compared with its stamp first; SourceError names the
    first that is missing, unreadable or changed. `mode` asks for a way of reading; where a file
    system cannot read directly, reads are buffered and `note` says why. `repeated` is how many
    bytes will be read in every pass: after the first one they go through the page cache, if it has room.
    If only the ctime of a file has changed, the bytes of `storages` are compared with their hashes; those
    without hashes are not.

    Methods may be called from any thread. `close` waits for reads in flight.
    """

    def __init__(
        self,
        files: Sequence[WeightFile],
        folder: Path,
        *,
        mode: Mode = "direct",
        check: bool = True,
        repeated: int = 0,
        storages: Sequence[Storage] = (),
    ) -> None:
        self._process = os.getpid()
        self._idle = threading.Condition()
        self._reading = 0
        self._closed = False
        self._direct = mode == "direct"
        self._files: list[DirectFile] = []
        self._storages = storages
        self.spill: SpillFile | None = None
        opening = partial(open_direct_file, folder=folder, direct=self._direct, check=check)
        try:
            for file in _in_order(opening, files):
                self._files.append(file)
                assert file.contents is not None
                file.contents.compare = partial(self._compare_in_use, len(self._files) - 1)
            if check:
                self._compare_unseen(files, folder)
        except BaseException:
            self.close()
            raise
        self._keeping = _Keeping(self, repeated) if repeated and self._direct else None

    @property
    def mode(self) -> Mode:
        """How whole blocks are read: `direct` only if every file can be read so."""
        return "direct" if self._direct and all(file.block for file in self._files) else "buffered"

    @property
    def note(self) -> str:
        """The reason why reads are buffered although direct reads were asked for; empty otherwise."""
        return next((file.note for file in self._files if file.note), "")

    @property
    def block(self) -> int:
        """The modulus by which file offset and address must agree for a direct read (1: any)."""
        return max((file.block for file in self._files), default=0) or 1

    @property
    def files(self) -> tuple[DirectFile, ...]:
        """The open files in the catalog's order; empty once closed."""
        return tuple(self._files)

    def path(self, file: int) -> Path:
        """Returns the path of a file."""
        return self._open(file).path

    def fd(self, file: int) -> int:
        """Returns the buffered descriptor of a file, for mapping it; it belongs to this Source."""
        return self._open(file).fd

    def check_unchanged(self, file: int) -> None:
        """Raise SourceError if the file has been truncated or written to since it was opened (one fstat)."""
        with self._in_flight():
            self._open(file).check_unchanged()

    def check_all_unchanged(self) -> None:
        """Check every file as `check_unchanged` does."""
        for file in self._files:
            file.check_unchanged()

    def read_into(self, file: int, offset: int, address: int, nbytes: int) -> None:
        """Fill `nbytes` of memory at `address` with the file's bytes from `offset` on.

        The memory must be writable and stay alive until this returns. Raises SourceError when not
        all bytes could be read; the memory then holds an unspecified mixture.
        """
        keeping = self._keeping if file < len(self._files) else None
        with self._in_flight():
            through = keeping is not None and keeping.through_cache
            self._open(file).read_into(offset, address, nbytes, through_cache=through)
            if keeping is not None:
                keeping.count(nbytes)

    def add_spill(self, file: SpillFile) -> None:
        """Have the file for what leaves the arena be the one behind the catalog's; it belongs to this."""
        self.spill = file

    def write_from(self, file: int, offset: int, address: int, nbytes: int) -> None:
        """Write memory to the spill file, from byte `offset` on, or raise SourceError."""
        with self._in_flight():
            spill = self._open(file)
            assert isinstance(spill, SpillFile)
            spill.write_from(offset, address, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self._files)

    def cached_fraction(self) -> float:
        """Estimates, without reading, which share of all files the page cache holds, from 0 to 1."""
        with self._in_flight():
            return self._cached_fraction()

    def is_warm(self) -> bool:
        """Tells whether the page cache holds the files now, so that reading through it is the faster way."""
        return self.cached_fraction() >= WARM_FRACTION

    def _cached_fraction(self) -> float:
        """Does what `cached_fraction` does, for a caller that counts as a read in flight."""
        total = self.nbytes
        windows = max(_FEWEST_WINDOWS, _WINDOWS // max(1, len(self._files)))
        cached = sum(cached_fraction(file.fd, file.nbytes, windows) * file.nbytes for file in self._files)
        return cached / total if total else 0.0

    def _compare_unseen(self, files: Sequence[WeightFile], folder: Path) -> None:
        """Compare the bytes of files in place whose ctime is not the one at which that was done before."""
        seen = read_seen(folder)
        unseen: dict[str, int] = {}
        for number, (stamped, opened) in enumerate(zip(files, self._files, strict=True)):
            assert opened.contents is not None
            packed = not Path(stamped.path).is_absolute()
            if packed or seen.get(stamped.path) == opened.contents.ctime_ns or not self._hashed(number):
                continue
            if changed := self._changed(number):
                raise SourceError(
                    f"{opened.path} is not the file that was compiled: {changed}; put the original back, or "
                    "compile again"
                )
            unseen[stamped.path] = opened.contents.ctime_ns
        if unseen and ((folder / PAYLOAD).is_file() or seen):  # others are no folders of artifacts
            note_seen(folder, {**seen, **unseen})

    def _compare_in_use(self, number: int) -> None:
        if changed := self._changed(number):
            raise SourceError(
                f"{self._files[number].path} has been changed while in use: {changed}; leave the file alone, "
                f"and {AGAIN}"
            )

    def _changed(self, number: int) -> str:
        """Say which hash of a file's weights is another one by now; empty if there is none."""
        hashed = self._hashed(number)
        if hashed:
            _log.info("%s is not as it was left: all of its weights are compared", self._files[number].path)
        for storage in hashed:
            digest = hashlib.sha256()
            for extent in storage.extents:
                file = self._files[extent.file]
                for start in range(extent.file_offset, extent.file_offset + extent.nbytes, CHUNK_BYTES):
                    nbytes = min(CHUNK_BYTES, extent.file_offset + extent.nbytes - start)
                    digest.update(read_exactly(file.fd, start, nbytes, file.path))
            if (computed := digest.hexdigest()) != storage.sha256:
                return f"the sha256 of a weight was {storage.sha256} and is {computed}"
        return ""

    def _hashed(self, number: int) -> list[Storage]:
        return [s for s in self._storages if s.sha256 and any(e.file == number for e in s.extents)]

    def close(self) -> None:
        """Close every descriptor once the reads in flight have ended; may be called again."""
        if os.getpid() != self._process:
            # In a forked child the threads that were reading do not exist, so nobody would ever
            # end those reads or release the lock.
            self._close_files()
            return
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._reading == 0)
            self._close_files()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _close_files(self) -> None:
        self._closed = True
        for file in (*self._files, *([self.spill] if self.spill else [])):
            file.close()
        self._files, self.spill = [], None

    def _open(self, file: int) -> DirectFile:
        if self._closed:
            raise SourceError(_CLOSED)
        if file == len(self._files):
            if self.spill is None:
                raise PlanError("the plan reads back what it never copies out: plan again")
            return self.spill
        return self._files[file]

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


def open_source(
    files: Sequence[WeightFile], folder: Path, *, storages: Sequence[Storage], repeated: int = 0
) -> Source:
    """Opens weight files, to read them through the page cache where it holds them now, and else past it."""
    with Source(files, folder, mode="buffered", check=False) as source:
        mode: Mode = "buffered" if source.is_warm() else "direct"
    return Source(files, folder, mode=mode, repeated=repeated, storages=storages)


def _in_order(
    opening: Callable[[WeightFile], DirectFile], files: Sequence[WeightFile]
) -> Iterator[DirectFile]:
    """Yields the files that `opening` opens, in order, on several threads; closes those that nobody took."""
    pool = ThreadPoolExecutor(_OPENERS)
    running: deque[Future[DirectFile]] = deque()
    try:
        if len(files) > 1:
            with suppress(RuntimeError):  # no thread can be started, or no more at exit
                for file in files:
                    running.append(pool.submit(opening, file))
        begun = len(running)
        while running:
            future = running.popleft()
            yield future.result()
        yield from map(opening, files[begun:])
    finally:
        pool.shutdown(cancel_futures=True)
        for future in running:
            if not future.cancelled() and future.exception() is None:
                future.result().close()


class _Keeping:
    """Decides after each pass whether reads go through the page cache.

    At first reads go past the cache, which is the faster way to read bytes once. Later they go through it if
    available memory has room for the bytes that every pass reads: a pass then takes a copy, and no read of
    the disk. If the cache did not keep the bytes, reads go past it again, because reading through it is
    slower.
    """

    def __init__(self, source: Source, nbytes: int) -> None:
        self.through_cache = False
        self._source, self._nbytes = source, nbytes
        self._left = source.nbytes  # the first pass also reads the weights that stay
        self._tries = 2
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        """Count bytes that were read; if they complete a pass, decide how the next pass reads."""
        with self._lock:
            self._left -= nbytes
            if self._left > 0 or not self._tries:
                return
            self._left = self._nbytes
        self._decide()

    def _decide(self) -> None:
        cached_bytes = self._source._cached_fraction() * self._source.nbytes
        room = available_bytes()
        if self.through_cache and cached_bytes < WARM_FRACTION * self._nbytes:
            self._tries -= 1
        fits = room is None or self._nbytes - cached_bytes <= room
        self.through_cache = fits and self._tries > 0


@dataclass(frozen=True)
class FileRange:
    """Layout bytes `start` to `stop`, which lie at `file_offset` of a file and at `address`."""

    start: int
    stop: int
    file: int
    file_offset: int
    address: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> FileRange:
        """Returns the part of the range between two layout offsets."""
        skip = max(0, start - self.start)
        return FileRange(
            self.start + skip, min(stop, self.stop), self.file, self.file_offset + skip, self.address + skip
        )


class FileRanges:
    """The bytes of a layout as ranges that one read each can fill, found by layout offset.

    Neighbours in both file and memory, at most `gap` bytes apart, are one range: what lies between
    is then read along, which saves a read for each of many small storages.
    """

    def __init__(self, pieces: Iterable[FileRange], *, gap: int = 0) -> None:
        self._pieces: list[FileRange] = []
        for piece in sorted(pieces, key=lambda p: (p.start, p.stop)):
            last = self._pieces[-1] if self._pieces else None
            if last and _continues(last, piece, gap):
                self._pieces[-1] = replace(last, stop=max(last.stop, piece.stop))
            elif last and piece.start < last.stop:
                raise PlanError(f"two storages lie at layout offset {piece.start}: plan it again")
            else:
                self._pieces.append(piece)
        self._starts = [p.start for p in self._pieces]

    @classmethod
    def of(
        cls,
        storages: Sequence[Storage],
        layout: Sequence[int],
        places: Sequence[int],
        *,
        base: int = 0,
        gap: int = 0,
    ) -> FileRanges:
        """Returns the bytes in files of the storages that have a place.

        Storage s begins at layout offset `layout[s]`, and at address `base + places[s]`, if that place is not
        negative.
        """
        pieces = (
            FileRange(
                start + extent.storage_offset,
                start + extent.storage_offset + extent.nbytes,
                extent.file,
                extent.file_offset,
                base + place + extent.storage_offset,
            )
            for storage, start, place in zip(storages, layout, places, strict=True)
            if place >= 0
            for extent in storage.extents
        )
        return cls(pieces, gap=gap)

    def within(self, start: int, stop: int) -> Iterator[FileRange]:
        """Yields the ranges between two layout offsets, cut to them."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for piece in self._pieces[first:]:
            if piece.start >= stop:
                return
            if piece.stop > start:
                yield piece.cut(start, stop)

    def read(self, source: Source, start: int, stop: int) -> int:
        """Read the bytes between two layout offsets to their addresses, and return how many were read."""
        brought = 0
        for piece in self.within(start, stop):
            source.read_into(piece.file, piece.file_offset, piece.address, piece.nbytes)
            brought += piece.nbytes
        return brought

    def write(self, source: Source, start: int, stop: int) -> int:
        """Write the bytes between two layout offsets from their addresses; returns how many were written."""
        written = 0
        for piece in self.within(start, stop):
            source.write_from(piece.file, piece.file_offset, piece.address, piece.nbytes)
            written += piece.nbytes
        return written


def _continues(last: FileRange, piece: FileRange, gap: int) -> bool:
    step = piece.start - last.start
    return (
        piece.file == last.file
        and piece.file_offset - last.file_offset == step
        and piece.address - last.address == step
        and piece.start - last.stop <= gap
    )


_PIECE = 16 << 20

_MAPPED_ALONE = 33 << 20
"""Bytes from which glibc's malloc always maps memory by itself, so that advice to the kernel ends with it."""


class HeldStorages:
    """Storages held whole in ordinary memory (at their phases), which are read in the background.

    `buffers[s]` is the memory of storage s; its bytes are there once `wait` has returned. The source must
    stay open until `close`.
    """

    def __init__(
        self, storages: Sequence[Storage], chosen: Sequence[int], source: Source, readers: int
    ) -> None:
        self.buffers = {s: bytes_at(storages[s].phase, storages[s].nbytes) for s in chosen}
        self._source, self._owner = source, os.getpid()
        extents = ((e, self.buffers[s].data_ptr()) for s in chosen for e in storages[s].extents)
        self._left = deque(_pieces(extents))
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._readers = ReaderThreads(min(readers, len(self._left)), self._read, "load")
        self._readers.start(self.close)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages held."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the readers, which cannot wait for themselves."""
        return self._readers.includes_caller

    def wait(self) -> None:
        """Return once every byte is there. SourceError, at every call, where one could not be read."""
        # Threads are not joined, because an interrupt would make the pool forget those that still run.
        with self._changed:
            self._changed.wait_for(lambda: not self._left and not self._running)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Let go of the memory, begin no read, and wait for those that run. It may be called again."""
        if os.getpid() != self._owner:
            return  # a forked child has no readers, and may have their lock
        with self._changed:
            self._left.clear()
            self._changed.wait_for(lambda: not self._running)
        self.buffers = {}

    def _read(self) -> None:
        while True:
            with self._changed:
                if not self._left:
                    return
                piece = self._left.popleft()
                self._running += 1
            try:
                self._source.read_into(*piece)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._left.clear()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


def bytes_at(phase: int, nbytes: int) -> torch.Tensor:
    """Flat bytes of new memory whose address is `phase` modulo 64, as is that of the tensor's own storage.

    Large memory has huge pages wherever a whole one lies in it: direct reads into small pages run at half the
    speed, and a product over huge ones takes some hundredths less time.
    """
    whole = torch.empty(phase + nbytes, dtype=torch.uint8, device="cpu")  # torch aligns it to 64 bytes
    if whole.nbytes >= _MAPPED_ALONE:
        start = round_up(whole.data_ptr(), HUGE_PAGE)
        hint(start, (whole.data_ptr() + whole.nbytes) // HUGE_PAGE * HUGE_PAGE - start, MADV_HUGEPAGE)
    if not phase or not nbytes:
        return whole[phase:]
    return torch.frombuffer(whole.numpy(), dtype=torch.uint8, offset=phase)


def _pieces(work: Iterable[tuple[Extent, int]]) -> Iterable[tuple[int, int, int, int]]:
    """File, offset, address and bytes of each read, for extents and the addresses of their storages."""
    for extent, address in work:
        for at in range(0, extent.nbytes, _PIECE):
            nbytes = min(_PIECE, extent.nbytes - at)
            yield extent.file, extent.file_offset + at, address + extent.storage_offset + at, nbytes

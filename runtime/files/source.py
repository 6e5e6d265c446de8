"""Reads weight bytes from an artifact's files into raw memory, from any number of threads at once.

Reads are positioned, hold no lock while they run and release the interpreter lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from penstock.runtime.files.artifact_files import PAYLOAD, note_seen, read_seen
from penstock.runtime.files.direct_file import AGAIN, DirectFile, open_direct_file
from penstock.runtime.files.safetensors_file import read_exactly
from penstock.runtime.files.spill_file import SpillFile
from penstock.runtime.files.stamp import CHUNK_BYTES
from penstock.runtime.system.limits import available_bytes
from penstock.runtime.system.page_cache import cached_fraction
from penstock.schedule.facts.errors import PlanError, SourceError
from penstock.schedule.facts.model import Storage, WeightFile

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
        """The storages with a hash that have bytes in a file."""
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

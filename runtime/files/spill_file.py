"""The file that values leave the arena for, and come back from: without a name, and gone with its process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from penstock.runtime.files.direct_file import DirectFile, memory_view, usable_directly
from penstock.runtime.system.memory import PAGE
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Storage
from penstock.schedule.plan import Plan

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


def open_spill_file(
    folder: str | os.PathLike[str] | None, storages: Sequence[Storage], plan: Plan
) -> SpillFile:
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

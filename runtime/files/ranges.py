"""Tells which bytes of which file belong where, as ranges of a layout that one read each can fill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.runtime.files.source import Source
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Storage


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
            self.start + skip,
            min(stop, self.stop),
            self.file,
            self.file_offset + skip,
            self.address + skip,
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

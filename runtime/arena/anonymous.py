"""Two arenas of private memory that reads fill: a paged one and a contiguous one."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.runtime.arena.base import BaseArena, PagedArena, Pages
from penstock.runtime.system.memory import HUGE_PAGE, PAGE, FreshMemory, Reservation
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Extent, Storage
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.files.source import Source

POISON = 0xFF
"""A number whose bytes all have this value is NaN in every floating-point format."""


@dataclass(frozen=True)
class FileRange:
    """Layout bytes `start` to `stop`, which lie at `file_offset` of a file and at `address`."""

    start: int
    stop: int
    file: int
    file_offset: int
    address: int

    @classmethod
    def of(cls, extent: Extent, start: int, address: int) -> FileRange:
        """An extent of a storage that begins at layout offset `start`, and at `address`."""
        start, address = start + extent.storage_offset, address + extent.storage_offset
        return cls(start, start + extent.nbytes, extent.file, extent.file_offset, address)

    def cut(self, start: int, stop: int) -> FileRange:
        """The part of the range between two layout offsets."""
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

    def __init__(self, pieces: Sequence[FileRange], *, gap: int) -> None:
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

    def within(self, start: int, stop: int) -> Iterator[FileRange]:
        """The ranges between two layout offsets, cut to them."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for piece in self._pieces[first:]:
            if piece.start >= stop:
                return
            if piece.stop > start:
                yield piece.cut(start, stop)


class AnonymousArena(PagedArena):
    """Address space of the layout's size, in which only filled granules take memory."""

    def __init__(
        self, plan: Plan, storages: Sequence[Storage], source: Source, *, debug: bool = False
    ) -> None:
        super().__init__(plan, storages, debug=debug, protection=mmap.PROT_READ | mmap.PROT_WRITE)
        self._source = source
        try:
            self._pieces = FileRanges(file_ranges(plan, storages, self._places, self._memory), gap=PAGE)
            # Segment by segment, so that no huge page reaches beyond one.
            for segment in range(len(self._segments)):
                self._memory.map_anonymous(*self._segment_pages(segment))
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _bring_pages(self, pages: Pages) -> int:
        return read_ranges(self._source, self._pieces.within(pages.start, pages.stop))


class ContiguousArena(BaseArena):
    """One buffer of the plan's size; `plan.addresses` says where in it each storage lies.

    Its memory is taken once, when it opens: direct reads into memory that nobody had touched ran at 1.1 GB/s
    where they ran at 2.7 otherwise (1 GiB, medians of 5 rounds).

    With `poison`, dropping overwrites what was held; a drop must then come before another storage
    is filled into the same bytes.
    """

    def __init__(
        self, plan: Plan, storages: Sequence[Storage], source: Source, *, poison: bool = False
    ) -> None:
        super().__init__(storages, plan.addresses, plan.arena_bytes)
        self._source = source
        self._poison = poison
        try:
            # Between two neighbours of the layout a third may lie: nothing is read along.
            self._pieces = FileRanges(file_ranges(plan, storages, self._places, self._memory), gap=0)
            self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        """Take the memory now, so that no fill waits for zeroed pages and none fails for want of them."""
        address, nbytes = self._memory.address, self._memory.nbytes
        self._memory.map_anonymous(0, nbytes)
        fresh = FreshMemory()
        for start in range(0, nbytes, HUGE_PAGE):
            fresh.take(address + start, min(HUGE_PAGE, nbytes - start))
        if self._poison:
            ctypes.memset(address, POISON, nbytes)

    def _bring(self, start: int, stop: int) -> int:
        return read_ranges(self._source, self._pieces.within(start, stop))

    def _discard(self, start: int, stop: int) -> None:
        if self._poison:
            # What is not held may lie where another storage is now.
            for held in self._held.within(start, stop):
                for piece in self._pieces.within(*held):
                    ctypes.memset(piece.address, POISON, piece.stop - piece.start)


def file_ranges(
    plan: Plan, storages: Sequence[Storage], places: Sequence[int], memory: Reservation
) -> list[FileRange]:
    """One range for each extent of the storages that have a place in the arena."""
    return [
        FileRange.of(extent, start, memory.address + place)
        for storage, place, start in zip(storages, places, plan.arena.layout, strict=True)
        if place >= 0
        for extent in storage.extents
    ]


def _continues(last: FileRange, piece: FileRange, gap: int) -> bool:
    step = piece.start - last.start
    return (
        piece.file == last.file
        and piece.file_offset - last.file_offset == step
        and piece.address - last.address == step
        and piece.start - last.stop <= gap
    )


def read_ranges(source: Source, pieces: Iterator[FileRange]) -> int:
    """Read each range to its address, and return the bytes read."""
    brought = 0
    for piece in pieces:
        source.read_into(piece.file, piece.file_offset, piece.address, piece.stop - piece.start)
        brought += piece.stop - piece.start
    return brought

"""Arenas of private memory that reads fill, and what all arenas have: accounting, views, closing."""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.runtime.files.source import FileRanges, Source
from penstock.runtime.system.memory import (
    HUGE_PAGE,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    PAGE,
    PROT_NONE,
    FreshMemory,
    Reservation,
    drop_pages,
    hint,
    huge_pieces,
    protect,
    round_down,
    round_up,
)
from penstock.schedule.facts.errors import PlanError, StreamError
from penstock.schedule.facts.model import ALIGNMENT, Part, Storage, part_nbytes
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    import torch


POISON = 0xFF
"""A number whose bytes all have this value is NaN in every floating-point format."""


class HeldRanges:
    """The union of ranges, its size now and at most. Several threads may use it at once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak_nbytes = 0
        # Starts (even positions) and stops (odd ones) of disjoint ranges, ascending: a position
        # is inside a range exactly when an odd number of edges lies before it.
        self._edges: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        self._set(start, stop, present=True)

    def remove(self, start: int, stop: int) -> None:
        self._set(start, stop, present=False)

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the parts of the bytes `start` to `stop` that are held, as disjoint ranges."""
        with self._lock:
            return self._within(start, stop)

    def _set(self, start: int, stop: int, *, present: bool) -> None:
        if start >= stop:
            return
        with self._lock:
            self.nbytes -= sum(b - a for a, b in self._within(start, stop))
            low, high = bisect_left(self._edges, start), bisect_right(self._edges, stop)
            self._edges[low:high] = [start] * (low % 2 != present) + [stop] * (high % 2 != present)
            self.nbytes += (stop - start) * present
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        low, high = bisect_right(self._edges, start), bisect_left(self._edges, stop)
        edges = [start] * (low % 2) + self._edges[low:high] + [stop] * (high % 2)
        return list(zip(edges[::2], edges[1::2], strict=True))


def dtype_of(part: Part) -> torch.dtype:
    """Returns the dtype of a part. Raises PlanError for one that this version of torch does not have."""
    import torch

    dtype = getattr(torch, part.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{part.dtype!r} is not a dtype of this version of torch: export the program with it")
    return dtype


def tensor_at(address: int, part: Part, nbytes: int | None = None) -> torch.Tensor:
    """Returns the strided tensor of a part whose storage is `nbytes` bytes at `address`.

    The memory, as much as the part reaches unless `nbytes` is given, must outlive it.
    """
    import torch

    dtype = dtype_of(part)
    # The tensor's storage begins where the weight's does, from where `as_strided` counts, but for a remainder
    # that no offset in elements can say. A ctypes array counts as writable, also over read-only pages: torch
    # warns about others. One of no bytes is refused, so a tensor without elements gets one that it cannot
    # reach.
    nbytes = part.offset + part_nbytes(part) if nbytes is None else nbytes
    offset, remainder = divmod(part.offset, dtype.itemsize)
    memory = c_char * max((nbytes - remainder) // dtype.itemsize * dtype.itemsize, dtype.itemsize)
    flat = torch.frombuffer(memory.from_address(address + remainder), dtype=dtype)
    return flat.as_strided(part.shape, part.stride, offset)


class WeightArena(ABC):
    """Memory for one layout: a reservation of address space in which every storage has a fixed place.

    Ranges are half-open, in bytes of the layout. In a paged arena a range begins and ends at a page, or at an
    end of its segment. A subclass calls this constructor, which maps the memory, when its own fields are set.
    """

    def __init__(self, plan: Plan, storages: Sequence[Storage], source: Source, nbytes: int) -> None:
        self._layout = plan.arena.layout
        self._storages = storages
        self._source = source
        # Where each storage begins, in bytes from the start of the reservation, or -1.
        self._places = _places(plan)
        for index, (storage, place) in enumerate(zip(storages, self._places, strict=True)):
            if place >= 0 and (place % ALIGNMENT != storage.phase or place + storage.nbytes > nbytes):
                # At another address modulo ALIGNMENT kernels give other last bits.
                raise PlanError(
                    f"storage {index} lies at byte {place} of an arena of {nbytes} bytes: expected "
                    f"{storage.phase} modulo {ALIGNMENT}, with room for {storage.nbytes} bytes; plan it again"
                )
        self._held = HeldRanges()
        self._memory = Reservation(nbytes)
        self._closed = False
        try:
            self._map()
        except BaseException:
            self.close()
            raise

    @property
    def held_bytes(self) -> int:
        """Bytes of the layout that are filled or being filled, and not dropped."""
        return self._held.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most that `held_bytes` has been."""
        return self._held.peak_nbytes

    def check(self) -> None:
        """Raise SourceError when bytes that are held can no longer be read, or may not be the file's.

        Called every few milliseconds, and when a pass ends.
        """
        # Nobody else can change private memory, so there is nothing to check.
        self._require_open()

    def fill(self, start: int, stop: int) -> int:
        """Make a range hold its bytes, and return how many were brought.

        Blocks without the GIL; disjoint ranges may be filled from several threads at once. Raises
        SourceError when the bytes cannot be had: the range is then dropped.
        """
        return self._fill(start, stop, self._bring)

    def _fill(self, start: int, stop: int, bring: Callable[[int, int], int]) -> int:
        self._require_open()
        # The range counts before its bytes arrive, since memory is taken from the first byte on.
        self._held.add(start, stop)
        try:
            return bring(start, stop)
        except BaseException:
            self.drop(start, stop)
            raise

    def take(self, start: int, stop: int) -> None:
        """Give a range memory, which a program is about to write; what is held of it keeps its bytes."""
        self._fill(start, stop, self._back)

    def write_out(self, start: int, stop: int) -> int:
        """Write a range, which stays, to the files without the GIL; return how many bytes were written."""
        self._require_open()
        return self._pieces.write(self._source, start, stop)

    def _back(self, start: int, stop: int) -> int:
        """Put memory behind a range that is not filled."""
        return 0

    def drop(self, start: int, stop: int) -> None:
        """Drop a range, of which nothing may be read until it is filled again."""
        self._require_open()
        self._discard(start, stop)
        self._held.remove(start, stop)

    def view(self, part: Part) -> torch.Tensor:
        """Returns the strided tensor at the one address of a part. It must not be used after `close`."""
        self._require_open()
        dtype_of(part)  # without one it has no size
        place = self._places[part.storage]
        reach = part.offset + part_nbytes(part)
        if place < 0 or reach > self._storages[part.storage].nbytes:
            raise PlanError(
                f"a view of {reach} bytes was asked of storage {part.storage}, which has "
                f"{self._storages[part.storage].nbytes} at byte {place} of the arena; plan it again"
            )
        return tensor_at(self._memory.address + place, part, self._storages[part.storage].nbytes)

    def mapped_bytes(self) -> int:
        """Bytes that page tables hold for the arena. Raises StreamError where the system does not tell."""
        return 0 if self._closed else self._memory.resident_bytes()

    def close(self) -> None:
        """Unmap everything. No thread may be filling it; a second call does nothing."""
        self._closed = True
        self._memory.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StreamError("the weights' memory has been closed; load the program again")

    def _file_ranges(self, *, gap: int) -> FileRanges:
        base = self._memory.address
        return FileRanges.of(self._storages, self._layout, self._places, base=base, gap=gap)

    _pieces: FileRanges

    @abstractmethod
    def _map(self) -> None:
        """Put memory or files behind the reservation; an error closes the arena again."""

    @abstractmethod
    def _bring(self, start: int, stop: int) -> int:
        """Bring the bytes of a range, and return how many."""

    @abstractmethod
    def _discard(self, start: int, stop: int) -> None:
        """Give back the memory that a range takes."""


class Pages(NamedTuple):
    """Bytes `start` to `stop` of a segment, and the address and size of the whole pages that hold them."""

    segment: int
    start: int
    stop: int
    address: int
    nbytes: int


class PagedArena(WeightArena):
    """An arena in which every storage lies at its layout offset, and pages come and go.

    With `debug`, pages that are not held cannot be read, and pages that are held have the protection of their
    class.
    """

    _protection: ClassVar[int]

    def __init__(
        self, plan: Plan, storages: Sequence[Storage], source: Source, *, debug: bool = False
    ) -> None:
        self._segments = sorted(plan.arena.segments)
        self._starts = [s.start for s in self._segments]
        self._debug = debug
        self._whole_huge_pages = plan.arena.granule % HUGE_PAGE == 0
        super().__init__(plan, storages, source, max((s.stop for s in self._segments), default=0))

    def _segment_pages(self, index: int) -> tuple[int, int]:
        """Returns the first byte of a segment's pages, from the arena's start, and their size in bytes."""
        start = round_down(self._segments[index].start, PAGE)
        return start, round_up(self._segments[index].stop, PAGE) - start

    def _prepare(self) -> None:
        """Choose the size of pages and, to debug, forbid all reads. Memory must be mapped by now."""
        # A huge page can only be dropped as a whole, so a smaller granule would take its neighbours along.
        advice = MADV_HUGEPAGE if self._whole_huge_pages else MADV_NOHUGEPAGE
        hint(self._memory.address, self._memory.nbytes, advice)
        if self._debug:
            protect(self._memory.address, self._memory.nbytes, PROT_NONE)

    def _pages(self, start: int, stop: int) -> Iterator[Pages]:
        first = max(0, bisect_right(self._starts, start) - 1)
        for index in range(first, bisect_left(self._starts, stop)):
            segment = self._segments[index]
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low >= high:
                continue
            if (low % PAGE and low > segment.start) or (high % PAGE and high < segment.stop):
                raise PlanError(
                    f"the range {start} to {stop} begins or ends inside a page of {PAGE} bytes: make the "
                    "plan's granule a multiple of the page size"
                )
            address = self._memory.address + round_down(low, PAGE)
            yield Pages(index, low, high, address, self._memory.address + round_up(high, PAGE) - address)

    def _bring(self, start: int, stop: int) -> int:
        brought = 0
        for pages in self._pages(start, stop):
            if self._debug:
                protect(pages.address, pages.nbytes, self._protection)
            brought += self._bring_pages(pages)
        return brought

    def _discard(self, start: int, stop: int) -> None:
        for pages in self._pages(start, stop):
            drop_pages(pages.address, pages.nbytes)
            if self._debug:
                protect(pages.address, pages.nbytes, PROT_NONE)

    @abstractmethod
    def _bring_pages(self, pages: Pages) -> int:
        """Bring the bytes of `pages`, and return how many."""


def _places(plan: Plan) -> Sequence[int]:
    if plan.arena.kind == "contiguous":
        return plan.addresses
    return [-1 if s in plan.outside else start for s, start in enumerate(plan.arena.layout)]


class AnonymousArena(PagedArena):
    """Address space of the layout's size, in which only filled granules take memory."""

    _protection = mmap.PROT_READ | mmap.PROT_WRITE

    def _map(self) -> None:
        self._pieces = self._file_ranges(gap=PAGE)
        # Mapped segment by segment, so that no huge page crosses the end of a segment.
        for segment in range(len(self._segments)):
            self._memory.map_anonymous(*self._segment_pages(segment))
        self._prepare()

    def _back(self, start: int, stop: int) -> int:
        for pages in self._pages(start, stop) if self._debug else ():
            protect(pages.address, pages.nbytes, self._protection)
        return 0

    def _bring_pages(self, pages: Pages) -> int:
        return self._pieces.read(self._source, pages.start, pages.stop)


class ContiguousArena(WeightArena):
    """One buffer of the plan's size; `plan.addresses` says where in it each storage lies.

    Its memory is taken once, when it opens: direct reads into memory that nobody had touched ran at 1.1 GB/s
    where they ran at 2.7 otherwise (1 GiB, medians of 5 rounds).

    With `poison`, dropping overwrites what was held; a drop must then come before another storage
    is filled into the same bytes.
    """

    def __init__(self, plan: Plan, storages: Sequence[Storage], source: Source, *, poison: bool) -> None:
        self._poison = poison
        super().__init__(plan, storages, source, plan.arena_bytes)

    def _map(self) -> None:
        """Take the memory now, so that no fill waits for zeroed pages and none fails for want of them."""
        # A third storage may lie between two neighbours of the layout, so nothing between them is read along.
        self._pieces = self._file_ranges(gap=0)
        address, nbytes = self._memory.address, self._memory.nbytes
        self._memory.map_anonymous(0, nbytes)
        fresh = FreshMemory()
        for piece in huge_pieces(address, nbytes):
            fresh.take(*piece)
        if self._poison:
            ctypes.memset(address, POISON, nbytes)

    def _bring(self, start: int, stop: int) -> int:
        return self._pieces.read(self._source, start, stop)

    def _discard(self, start: int, stop: int) -> None:
        if self._poison:
            # A range that is not held may lie where another storage is now.
            for run in self._held.within(start, stop):
                for piece in self._pieces.within(*run):
                    ctypes.memset(piece.address, POISON, piece.stop - piece.start)

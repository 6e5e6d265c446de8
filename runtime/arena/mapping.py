"""Arenas that map the weight files, alone or beside private memory for what the page cache does not keep."""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise

from penstock.native.library import library
from penstock.runtime.arena.reading import FreeGranules, PagedArena, Pages
from penstock.runtime.files.direct_file import AGAIN
from penstock.runtime.files.source import Source
from penstock.runtime.system.limits import available_bytes
from penstock.runtime.system.memory import (
    HUGE_PAGE,
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    PAGE,
    PROT_NONE,
    Reservation,
    advise,
    cached_pages,
    drop_pages,
    hint,
    may_ask_mincore,
    protect,
    round_down,
    round_up,
)
from penstock.schedule.facts.errors import PlanError, SourceError, StreamError
from penstock.schedule.facts.model import Storage
from penstock.schedule.plan import Plan


class MappedArena(PagedArena):
    """The weight files, one after another, of which only what has been filled is in the page tables.

    The layout must place each file as a whole: a byte of file f at its file offset plus one base,
    a multiple of the page size. PlanError says where it does not.

    Populating alone reads the disk; no readahead is asked for beside it. For granules of 2 MiB
    MADV_HUGEPAGE (see `PagedArena`) makes it read folios of 2 MiB, each then mapped by one entry.
    Medians of 4 interleaved rounds over 1 GiB (2 cores, ext4 on a virtual disk, Linux 6.18), two
    readers, pieces of 8 MiB, GB/s cold and warm: 2.4 and 470; without it 2.2 and 39, with
    POSIX_FADV_SEQUENTIAL 2.9 and 184, but 2.0 and 28 from four readers, where MADV_HUGEPAGE keeps
    2.8 and 248. MADV_WILLNEED and readahead() fill the page cache with small folios (warm 11 to
    20), and MADV_RANDOM reads page by page (cold 0.1).
    """

    _protection = mmap.PROT_READ

    _guard = -1

    def _map(self) -> None:
        self._files = self._find_files()
        for segment in self._files:
            self._map_segment(segment)
        self._prepare()
        if (native := library()) is not None:
            self._guard = native.ps_guard(self._memory.address, self._memory.nbytes)
            if self._guard < 0:
                raise StreamError(
                    "more programs are loaded than can be protected from files that shrink: close some"
                )

    def check(self) -> None:
        # Truncating a file takes its pages from every mapping: a read of them is a SIGBUS, which ends the
        # process unless the native library, if it was built, puts zeros there (`native/guard.h`). What is
        # written into a file appears in every mapping.
        self._source.check_all_unchanged()
        if self._guard >= 0 and (native := library()) is not None and native.ps_guard_hit(self._guard):
            raise SourceError(
                f"a weight file has been truncated while in use, and was read meanwhile: {AGAIN}"
            )

    def close(self) -> None:
        if self._guard >= 0 and (native := library()) is not None:
            native.ps_unguard(self._guard)
            self._guard = -1
        super().close()

    def _find_files(self) -> dict[int, tuple[int, int]]:
        """Returns the file behind each segment, and the layout offset at which that file begins."""
        files: dict[int, tuple[int, int]] = {}
        for index, storage in enumerate(self._storages):
            place = self._places[index]
            for extent in storage.extents if place >= 0 else ():
                start = place + extent.storage_offset
                base = start - extent.file_offset
                segment = bisect_right(self._starts, start) - 1
                mapped = files.setdefault(segment, (extent.file, base))
                inside = segment >= 0 and start + extent.nbytes <= self._segments[segment].stop
                if mapped != (extent.file, base) or base % PAGE or not inside:
                    raise PlanError(
                        f"storage {index} cannot be mapped at layout offset {start}: expected its file "
                        f"{extent.file} in one piece, at a multiple of {PAGE} bytes, got base {base}; "
                        "plan it again"
                    )
        return files

    def _map_file(self, memory: Reservation, segment: int, start: int, nbytes: int) -> None:
        """Map layout bytes of a segment, whole pages, at the same offset of `memory`."""
        file, base = self._files[segment]
        memory.map_file(start, nbytes, self._source.fd(file), start - base)

    def _map_segment(self, segment: int) -> None:
        file, base = self._files[segment]
        start, nbytes = self._segment_pages(segment)
        if start < base:
            raise PlanError(
                f"segment {segment} cannot be mapped: it begins at layout offset {start}, before its file "
                f"{file}, whose first byte is at {base}; plan it again"
            )
        self._map_file(self._memory, segment, start, nbytes)

    def _bring_pages(self, pages: Pages) -> int:
        if pages.segment not in self._files:
            return 0
        file, base = self._files[pages.segment]
        try:
            advise(pages.address, pages.nbytes, MADV_POPULATE_READ)
        except OSError as error:
            # The file may have shrunk since, which explains more than the errno of populating.
            self._source.check_unchanged(file)
            raise SourceError(
                f"bytes {pages.start - base} to {pages.stop - base} of {self._source.path(file)} could not "
                f"be read into a mapping: {error.strerror}; check the disk, then try again"
            ) from error
        return pages.stop - pages.start


PATIENCE = 32
"""How often a granule that the cache has lost is read past it before it is cached again; then doubled."""

_SMALL = 150e9
"""Bytes a second: what the cache holds in large folios is mapped faster, and single pages more slowly."""

_UNPROVEN = 8
"""At most so many granules are read again before one of them is seen to be mapped faster."""

_TRIES = 8
"""How often a granule is taken out of the page cache, where dirty pages and such that others map stay."""


class AdaptiveArena(MappedArena):
    """Maps the granules that the page cache holds, and reads the others directly into private memory.

    A granule that is not in the cache is brought into it the first time, if the cache has room for all
    files: it then costs next to nothing in later passes. One that was lost from the cache is read
    past it, `PATIENCE` times before it gets another chance: a cache that cannot keep the weights
    only slows reading down (1.5 against 3.2 GB/s where each page of it had to be taken from the host
    of a virtual machine).

    A granule that the cache holds page by page, as writing a file leaves it there, is brought into it again
    in one piece (see `SmallFolios`).

    Mapped granules, private ones and spare private ones together never exceed the plan's arena.
    Granules cut by an end of their segment are always mapped.
    """

    def __init__(
        self, plan: Plan, storages: Sequence[Storage], source: Source, *, debug: bool = False
    ) -> None:
        self._granule = plan.arena.granule
        self._most = plan.arena_bytes
        self._lock = threading.Lock()
        self._private: set[int] = set()  # layout offsets of filled granules in private memory
        self._moved: set[int] = set()  # granules whose place is not mapped to the file at the moment
        self._turns: dict[int, tuple[int, int]] = {}  # reads past the cache: left, and next time
        self._spares = _Spares(self._granule, plan.arena_bytes // self._granule)
        self._cache: Reservation | None = None
        room = available_bytes()
        self._cache_holds_all = room is None or sum(f.nbytes for f in source.files) <= room
        self._small = SmallFolios()
        super().__init__(plan, storages, source, debug=debug)

    def _map(self) -> None:
        super()._map()
        self._pieces = self._file_ranges(gap=PAGE)
        if all(may_ask_mincore(file.fd) for file in self._source.files):
            # This mapping is only asked about: mincore(2) tells nothing about places of private memory.
            self._cache = Reservation(self._memory.nbytes)
            for segment in self._files:
                self._map_file(self._cache, segment, *self._segment_pages(segment))

    def fill_ready(self, start: int, stop: int) -> int | None:
        granules = range(round_down(start, self._granule), stop, self._granule)
        ends = dict.fromkeys((granules[0], granules[-1]))  # asking takes a third of the time of mapping
        if not self._private.isdisjoint(granules) or not all(self._is_cached(granule) for granule in ends):
            return None
        return None if self._worth_reading(granules) else self._fill(start, stop, self._bring_cached)

    def mapped_bytes(self) -> int:
        return 0 if self._closed else super().mapped_bytes() + self._spares.resident_bytes()

    def close(self) -> None:
        super().close()
        self._spares.close()
        if self._cache is not None:
            self._cache.close()

    def _bring(self, start: int, stop: int) -> int:
        return sum(
            self._read(low, high) if past else self._bring_mapped(low, high)
            for low, high, past in self._runs(start, stop)
        )

    def _discard(self, start: int, stop: int) -> None:
        private: list[int] = []
        with self._lock:
            for granule in range(round_down(start, self._granule), stop, self._granule):
                if granule in self._private:
                    self._private.remove(granule)
                    self._spares.give(self._memory.address + granule)
                    if self._debug:
                        protect(self._memory.address + granule, self._granule, PROT_NONE)
                    private.append(granule)
        # The memory of private granules is kept for the next fill.
        for low, high in _without(start, stop, private, self._granule):
            super()._discard(low, high)

    def _bring_cached(self, start: int, stop: int) -> int:
        """Map what the cache holds, on the thread of the call, and note how long that takes."""
        granules = self._place_mapped(start, stop)
        began = time.thread_time()
        brought = super()._bring(start, stop)
        whole = [granule for granule in granules if self._is_whole(granule, granule + self._granule)]
        self._small.mapped(granules, whole, brought, time.thread_time() - began)
        return brought

    def _bring_mapped(self, start: int, stop: int) -> int:
        small = self._worth_reading(self._place_mapped(start, stop))
        began = time.perf_counter()
        left = [granule for granule in small if self._leaves_cache(granule)]
        brought = super()._bring(start, stop)
        if small:
            self._small.read(small, left, time.perf_counter() - began)
        return brought

    def _worth_reading(self, granules: Sequence[int]) -> list[int]:
        return self._small.worth_reading(granules) if self._cache_holds_all else []

    def _place_mapped(self, start: int, stop: int) -> range:
        """Have the granules of a range mapped to their file, and return them."""
        granules = range(round_down(start, self._granule), stop, self._granule)
        with self._lock:
            # Give spare memory back until spare, held and filling granules together are within the budget.
            self._spares.keep(max(0, self._most - self._held.nbytes) // self._granule)
            for granule in [g for g in granules if g in self._moved]:
                self._spares.vacate(self._memory.address + granule)
                segment = bisect_right(self._starts, granule) - 1
                self._map_file(self._memory, segment, granule, self._granule)
                hint(self._memory.address + granule, self._granule, MADV_HUGEPAGE)
                self._moved.remove(granule)
        return granules

    def _leaves_cache(self, granule: int) -> bool:
        """Take a granule out of the page cache; false where all of it stays."""
        file, base = self._files[bisect_right(self._starts, granule) - 1]
        with suppress(OSError):  # advice that the system does not take leaves the granule where it is
            os.posix_fadvise(self._source.fd(file), granule - base, self._granule, os.POSIX_FADV_DONTNEED)
        assert self._cache is not None  # or nothing would have been found cached
        return not all(cached_pages(self._cache.address + granule, self._granule))

    def _read(self, start: int, stop: int) -> int:
        address = self._memory.address
        with self._lock:
            for granule in range(start, stop, self._granule):
                if granule not in self._private:
                    if self._spares.take(address + granule) is None:
                        self._memory.map_anonymous(granule, self._granule)
                        hint(address + granule, self._granule, MADV_HUGEPAGE)
                    self._private.add(granule)
                    self._moved.add(granule)
        if self._debug:
            protect(address + start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE)
        return self._pieces.read(self._source, start, stop)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yields a range as runs of granules, and whether each is read past the cache."""
        first = round_down(start, self._granule) + self._granule
        cuts = [start, *range(first, stop, self._granule), stop] if start < stop else []
        for past, run in groupby(pairwise(cuts), key=lambda cut: self._goes_past_cache(*cut)):
            parts = list(run)
            yield parts[0][0], parts[-1][1], past

    def _goes_past_cache(self, start: int, stop: int) -> bool:
        if start in self._private:
            return True
        if not self._is_whole(start, stop) or self._is_cached(start):
            return False
        if self._cache is None:
            return not self._cache_holds_all
        left, following = self._turns.get(start, (0, PATIENCE))
        if left or not self._cache_holds_all:
            self._turns[start] = max(0, left - 1), following
            return True
        self._turns[start] = following, 2 * following
        return False

    def _is_whole(self, start: int, stop: int) -> bool:
        """Tells whether a range within one granule is all of it, and no end of a segment cuts it."""
        segment = self._segments[max(0, bisect_right(self._starts, start) - 1)]
        return stop - start == self._granule and segment.start <= start and stop <= segment.stop

    def _is_cached(self, granule: int) -> bool:
        """Tells whether the page cache holds a granule, by its first page; False if nobody knows."""
        start = max(granule, self._starts[0])  # the first granule may begin before all weights
        return self._cache is not None and any(
            cached_pages(self._cache.address + round_down(start, PAGE), PAGE)
        )


def _without(start: int, stop: int, granules: Sequence[int], granule: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of a range outside some of its granules, which are given in ascending order."""
    for past in granules:
        if start < past:
            yield start, past
        start = past + granule
    if start < stop:
        yield start, stop


class SmallFolios:
    """Decides which granules the page cache should hold anew, each in one piece.

    Mapping a granule of 2 MiB takes 2 us if the cache holds it as one folio, and 45 to 110 us if it holds
    single pages, as of a file that was written; dropping it takes half as much. Reading it again mends
    that for every later pass of every process. As with renting and buying, no more time goes into reading
    than slow mapping has taken so far: together they never take twice what the better of the two would.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slow: set[int] = set()
        self._again: set[int] = set()
        self._tries: dict[int, int] = {}
        self._seconds = 0.0  # that slow mapping took, without those that reading again took
        self._unproven = 0

    def worth_reading(self, granules: Sequence[int]) -> list[int]:
        """Returns those granules that should be read again now."""
        with self._lock:
            if self._seconds <= 0 or self._unproven >= _UNPROVEN:
                return []
            return [granule for granule in granules if granule in self._slow]

    def mapped(self, granules: Sequence[int], whole: Sequence[int], nbytes: int, seconds: float) -> None:
        """Note that cached granules were mapped at once, whole ones and such as an end of a segment cuts."""
        with self._lock:
            if nbytes < _SMALL * seconds:
                self._seconds += seconds
                self._slow.update(granule for granule in whole if not self._is_done(granule))
            elif not self._again.isdisjoint(granules):
                self._unproven = 0

    def read(self, small: Sequence[int], left: Sequence[int], seconds: float) -> None:
        """Note that it was tried to read granules again, of which some had left the cache."""
        with self._lock:
            self._seconds -= seconds
            self._again.update(left)
            self._unproven += len(left)
            for granule in small:
                self._tries[granule] = self._tries.get(granule, 0) + 1
            self._slow.difference_update([granule for granule in small if self._is_done(granule)])

    def _is_done(self, granule: int) -> bool:
        return granule in self._again or self._tries.get(granule, 0) >= _TRIES


class _Spares(FreeGranules):
    """Granules of private memory that are not in use, where they were used last or in slots of their own."""

    def __init__(self, granule: int, slots: int) -> None:
        super().__init__(granule)
        self._memory = Reservation(round_up(granule * max(1, slots), HUGE_PAGE))
        self._slots = [self._memory.address + slot * granule for slot in range(slots)]

    def take(self, address: int) -> int | None:
        taken = super().take(address)
        self._empty(taken)
        return taken

    def vacate(self, address: int) -> None:
        """Move the spare granule at `address`, if there is one, to a slot of its own."""
        if address in self._free:
            slot = self._slots[-1]
            self._move(address, slot)
            self._slots.pop()
            del self._free[address]
            self._free = {slot: None, **self._free}

    def keep(self, most: int) -> None:
        """Give memory back until `most` spare granules are left."""
        while len(self._free) > most:
            last = next(reversed(self._free))
            drop_pages(last, self._granule)
            del self._free[last]
            self._empty(last)

    def resident_bytes(self) -> int:
        return self._memory.resident_bytes()

    def close(self) -> None:
        self._memory.close()

    def _empty(self, address: int | None) -> None:
        """Free the slot that a granule has left, where it was in one."""
        if address is not None and 0 <= address - self._memory.address < self._memory.nbytes:
            self._slots.append(address)

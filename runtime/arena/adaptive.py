"""A mapped arena that reads into private memory the granules that the page cache does not keep."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from penstock.runtime.arena.base import FreeGranules
from penstock.runtime.arena.mapped import MappedArena
from penstock.runtime.files.source import Source
from penstock.runtime.system.limits import available_bytes
from penstock.runtime.system.memory import (
    HUGE_PAGE,
    MADV_HUGEPAGE,
    PAGE,
    PROT_NONE,
    Reservation,
    cached_pages,
    drop_pages,
    hint,
    protect,
    round_down,
    round_up,
)
from penstock.runtime.system.page_cache import may_ask_mincore
from penstock.schedule.facts.model import Storage
from penstock.schedule.plan import Plan

PATIENCE = 32
"""How often a granule that the cache has lost is read past it before it is cached again; then doubled."""


class AdaptiveArena(MappedArena):
    """Maps the granules that the page cache holds, and reads the others directly into private memory.

    A granule that is not in the cache is brought into it the first time, if the cache has room for all
    files: it then costs next to nothing in later passes. One that was lost from the cache is read
    past it, `PATIENCE` times before it gets another chance: a cache that cannot keep the weights
    only slows reading down (1.5 against 3.2 GB/s where each page of it had to be taken from the host
    of a virtual machine).

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
        if self._private.isdisjoint(granules) and all(self._is_cached(granule) for granule in ends):
            return self._fill(start, stop, self._bring_mapped)
        return None

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

    def _bring_mapped(self, start: int, stop: int) -> int:
        with self._lock:
            self._make_room()
            granules = range(round_down(start, self._granule), stop, self._granule)
            for granule in [g for g in granules if g in self._moved]:
                self._spares.vacate(self._memory.address + granule)
                segment = bisect_right(self._starts, granule) - 1
                self._map_file(self._memory, segment, granule, self._granule)
                hint(self._memory.address + granule, self._granule, MADV_HUGEPAGE)
                self._moved.remove(granule)
        return super()._bring(start, stop)

    def _read(self, start: int, stop: int) -> int:
        address = self._memory.address
        with self._lock:
            self._make_room()
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

    def _make_room(self) -> None:
        """Give spare memory back until spare, held and filling granules together are within the budget."""
        self._spares.keep(max(0, self._most - self._held.nbytes) // self._granule)

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
        segment = self._segments[max(0, bisect_right(self._starts, start) - 1)]
        cut = start < segment.start or stop > segment.stop
        if stop - start < self._granule or cut or self._is_cached(start):
            return False
        if self._cache is None:
            return not self._cache_holds_all
        left, following = self._turns.get(start, (0, PATIENCE))
        if left or not self._cache_holds_all:
            self._turns[start] = max(0, left - 1), following
            return True
        self._turns[start] = following, 2 * following
        return False

    def _is_cached(self, granule: int) -> bool:
        """Tells whether the page cache holds a granule, by its first page; False if nobody knows."""
        segment = self._segments[max(0, bisect_right(self._starts, granule) - 1)]
        start = max(granule, segment.start)
        return self._cache is not None and any(
            cached_pages(self._cache.address + round_down(start, PAGE), PAGE)
        )


def _without(start: int, stop: int, granules: Sequence[int], granule: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of a range outside some of its granules, which are given in ascending order."""
    for one in granules:
        if start < one:
            yield start, one
        start = one + granule
    if start < stop:
        yield start, stop


class _Spares(FreeGranules):
    """Granules of private memory that are not in use, where they were used last or in slots of their own."""

    def __init__(self, granule: int, slots: int) -> None:
        super().__init__(granule)
        self._memory = Reservation(round_up(granule * max(1, slots), HUGE_PAGE))
        self._memory.map_anonymous(0, self._memory.nbytes)
        hint(self._memory.address, self._memory.nbytes, MADV_HUGEPAGE)
        self._slots = [self._memory.address + slot * granule for slot in range(slots)]

    def take(self, address: int) -> int | None:
        found = super().take(address)
        self._empty(found)
        return found

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

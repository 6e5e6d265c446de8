"""A paged arena of private memory that is taken once, and whose granules move to where they are filled."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

from penstock.runtime.arena.base import POISON, FreeGranules, WeightArena
from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import PAGE, PROT_NONE, FreshMemory, protect
from penstock.schedule.facts.errors import PlanError, StreamError
from penstock.schedule.facts.model import Storage
from penstock.schedule.plan import Plan


class PooledArena(WeightArena):
    """Storages lie at their layout offsets; a pool of granules provides the memory of what is filled.

    The pool has the plan's size. Filling moves free granules to the range's addresses and reads into them,
    in huge pages where these come fast. A granule's memory is taken by the reader that fills it first,
    so opening takes no time; from then on nothing is allocated, zeroed or copied.
    """

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        source: Source,
        *,
        debug: bool = False,
        poison: bool = False,
    ) -> None:
        self._granule = plan.arena.granule
        self._debug, self._poison = debug, poison
        self._filled: set[int] = set()
        self._fresh = FreshMemory()
        self._lock = threading.Lock()
        self._layout_bytes = max((s.stop for s in plan.arena.segments), default=0)
        self._pool_bytes = plan.arena_bytes
        super().__init__(plan, storages, source, self._layout_bytes + self._pool_bytes)

    def _map(self) -> None:
        placed = zip(self._places, self._storages, strict=True)
        reach = max((place + storage.nbytes for place, storage in placed if place >= 0), default=0)
        if reach > self._layout_bytes or self._pool_bytes % self._granule:
            raise PlanError(
                f"storages reach to byte {reach} of a layout of {self._layout_bytes} bytes, in an arena of "
                f"{self._pool_bytes} bytes: expected whole granules of {self._granule} bytes; plan again"
            )
        self._pieces = self._file_ranges(gap=PAGE)
        self._memory.map_anonymous(0, self._memory.nbytes)
        self._pool = self._memory.address + self._layout_bytes
        # Free granules are in the pool at first, and later wherever they were dropped.
        pool = range(self._pool, self._pool + self._pool_bytes, self._granule)
        self._free = FreeGranules(self._granule, pool)
        if self._debug:
            protect(self._memory.address, self._layout_bytes, PROT_NONE)

    def _bring(self, start: int, stop: int) -> int:
        for address in self._granules(start, stop):
            self._put(address)
        return self._pieces.read(self._source, start, stop)

    def _back(self, start: int, stop: int) -> int:
        for address in self._granules(start, stop):
            if address not in self._filled:
                self._put(address)
        return 0

    def _put(self, address: int) -> None:
        """Put a granule at `address`: the one that was dropped there, or any other."""
        with self._lock:
            granule = self._free.take(address)
            if granule is None:
                raise StreamError("the plan fills more than its arena holds: plan again")
            self._filled.add(address)
        if self._debug:
            protect(address, self._granule, mmap.PROT_READ | mmap.PROT_WRITE)
        if granule >= self._pool:  # still in the pool, so it has no memory yet: none returns there
            self._fresh.take(address, self._granule)

    def _discard(self, start: int, stop: int) -> None:
        for address in self._granules(start, stop):
            with self._lock:
                if address not in self._filled:
                    continue
                self._filled.remove(address)
                if self._poison:
                    ctypes.memset(address, POISON, self._granule)
                if self._debug:
                    protect(address, self._granule, PROT_NONE)
                self._free.give(address)

    def _granules(self, start: int, stop: int) -> range:
        if start % self._granule or stop % self._granule:
            raise PlanError(
                f"the range {start} to {stop} is not whole granules of {self._granule} bytes: plan again"
            )
        return range(self._memory.address + start, self._memory.address + stop, self._granule)

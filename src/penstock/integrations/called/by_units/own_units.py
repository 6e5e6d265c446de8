"""Units in memory of their own: in passes without a plan, and for reads that a plan does not have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.integrations.called.by_units.reads import operator_of
from penstock.integrations.called.own_memory import OwnMemory
from penstock.passes.sparse.calls import SparseCall
from penstock.runtime.arena.reading import tensor_at
from penstock.runtime.sparse.units import PooledUnits
from penstock.runtime.system.memory import PAGE, Reservation, drop_pages, round_down, round_up
from penstock.schedule.facts.model import SparseRead


class OwnUnits:
    """Units in memory of their own, while one operator runs: where no plan has any."""

    def __init__(
        self, own_memory: OwnMemory, room: Callable[[], int], measure: Callable[[int], None]
    ) -> None:
        self._own, self._room, self._measure = own_memory, room, measure
        self._memory: dict[int, Reservation] = {}
        self._held = 0
        self.read_ns = 0

    def address(self, storage: int) -> int:
        """Return where a storage begins in address space that takes memory only for units."""
        memory, facts = self._memory.get(storage), self._own.facts.storages[storage]
        if memory is None:
            memory = self._memory[storage] = Reservation(facts.phase + facts.nbytes)
            memory.map_anonymous(0, memory.nbytes)
        return memory.address + facts.phase

    @contextmanager
    def holding(
        self, storage: int, spans: Sequence[tuple[int, int]], *, counts: bool = True
    ) -> Iterator[None]:
        """Have spans of a storage in memory. What no plan will have does not count as units."""
        begun, base = time.perf_counter_ns(), self.address(storage)
        nbytes = sum(stop - start for start, stop in spans) if counts else 0
        try:
            with _disable_current_modes():
                for start, stop in _joined(spans):
                    self._own.read_span(storage, start, stop, base)
            self._held += nbytes
            self.read_ns += time.perf_counter_ns() - begun
            yield
        finally:
            self._measure(self._held)
            self._held = max(0, self._held - nbytes)
            for start, stop in spans:
                first = round_down(base + start, PAGE)
                drop_pages(first, round_up(base + stop, PAGE) - first)

    def call(self, read: SparseRead) -> SparseCall:
        """Return what runs the operator of a read on units in memory of their own."""
        return SparseCall(operator_of(read), read, _OwnRead(self, read, self._room), 0, 0)

    def close(self) -> None:
        """Give back the address space."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


class _OwnRead:
    """The units of one read, in memory of their own."""

    pool: Any = None
    certify = PooledUnits.certify

    def __init__(self, own_units: OwnUnits, read: SparseRead, room: Callable[[], int]) -> None:
        self._own, self._read, self._room = own_units, read, room

    def tensor(self, read: SparseRead) -> torch.Tensor:
        with torch.inference_mode(False):
            return tensor_at(self._own.address(read.storage), read.view)

    def ask(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        most = max(1, self._room() // max(1, self._read.unit_nbytes))
        return [list(units[k : k + most]) for k in range(0, len(units), most)]

    def hold(self, graph: int, step: int, units: Sequence[int], *, alone: bool) -> Any:
        return self._own.holding(self._read.storage, [self._read.unit(number) for number in units])


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined

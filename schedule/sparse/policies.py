"""Policies that users know: the unit leaves that was asked for least recently, or least often.

They run on the same facts as penstock's own (`residency.py`), but bring nothing ahead of need, and drop one
unit at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.schedule.facts.model import Pool, Trace
from penstock.schedule.sparse.residency import Residency


class LeastRecent(Residency):
    """The units that were asked for least recently leave first (LRU)."""

    def __init__(self, pool: Pool, traces: Sequence[Trace]) -> None:
        super().__init__(pool, traces)
        self._clock = 0
        self._last = np.zeros(len(self._table), np.int64)  # the read of any table that asked for a unit last

    def ask(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        super().ask(graph, step, numbers)
        self._clock += 1
        self._last[self._asked(graph, step, numbers)] = self._clock

    def keys(self, some: np.ndarray, until: np.ndarray) -> np.ndarray:
        order: np.ndarray = -self._last[some]
        return order

    def _leaving(self, index: int) -> list[int]:
        return [index]


class LeastFrequent(LeastRecent):
    """The units that were asked for least often so far leave first (LFU); of equal ones the least recent."""

    def __init__(self, pool: Pool, traces: Sequence[Trace]) -> None:
        super().__init__(pool, traces)
        self._often = np.zeros(len(self._table), np.int64)

    def ask(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        super().ask(graph, step, numbers)
        self._often[self._asked(graph, step, numbers)] += 1

    def keys(self, some: np.ndarray, until: np.ndarray) -> np.ndarray:
        once = 1 << 32  # more than the reads of any recording
        order: np.ndarray = -(self._often[some] * once + self._last[some])
        return order

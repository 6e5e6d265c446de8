"""Choices of the rows to copy: runs of neighbouring rows, spread over the trace.

A row is one span over one gap (`Loads` in `schedule/clock/transfers.py`). One copy can bring a whole run, and
the runs follow one another so that bytes are copied in proportion to what the relaxation copies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy

from penstock.schedule.bound.residency import Residency
from penstock.schedule.clock.transfers import Loads

_ATTEMPTS = 5
"""The number of times that a choice which does not fit into memory is made, each time with more to copy."""

_RINGS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.8)
"""Values tried for the memory that is refilled during a pass, as multiples of what the relaxation refills."""

_PARTS = (1, 1.5, 2, 3)
"""Values tried for the number of runs that fit into the refilled memory, which sets their length."""

_AHEAD = (0.0, 0.5)
"""Values tried for the share of a run that is owed at the start of a pass, which shifts all runs."""


class Runs:
    """Chooses the rows of one trace to copy so that everything else fits into `cap` bytes.

    `kept` holds the bytes that the relaxation keeps over each gap.
    """

    def __init__(self, loads: Loads, residency: Residency, kept_bytes: Sequence[float], cap: int) -> None:
        self._loads, self._residency, self._cap = loads, residency, cap
        inside = numpy.array([gap.inside for gap in loads.gaps])
        nbytes = numpy.bincount(loads.gap, weights=loads.nbytes, minlength=len(inside))
        copied = numpy.clip(1 - numpy.array(kept_bytes) / nbytes, 0.0, 1.0)
        # A gap of less than half a pass is copied over only where the relaxation copies over it.
        self._may = ((inside > loads.steps // 2) | ((inside > 0) & (copied > 0)))[loads.gap]
        self._share = copied[loads.gap]
        sizes = nbytes.astype(numpy.int64).tolist()
        self._excess = int(residency.held_bytes(sizes).max()) - cap

    def choices(self, shared_bytes: float) -> Iterator[numpy.ndarray]:
        """Yield choices of rows in runs of several lengths, each as a mask over all rows.

        `shared_bytes` is the memory that the relaxation refills during a pass.
        """
        for ring, parts, ahead in itertools.product(_RINGS, _PARTS, _AHEAD):
            rows = self.choose(int(shared_bytes * ring), int(shared_bytes * ring / parts), ahead)
            if rows is not None:
                yield rows

    def choose(self, shared: int, run: int, ahead: float) -> numpy.ndarray | None:
        """Choose rows in runs of about `run` bytes that refill `shared` bytes of memory.

        None if no choice fits after `_ATTEMPTS`.
        """
        copied = self._excess + shared
        for _ in range(_ATTEMPTS):
            rows = self._spread(copied, run, ahead)
            short = self._short(rows)
            if short <= 0:
                return rows
            copied += short
        return None

    def neighbours(self, rows: numpy.ndarray, *, any_two: bool) -> Iterator[numpy.ndarray]:
        """Yield the choices next to `rows` that fit: one end of a run is moved, or two ends of any runs are.

        With `any_two`, choices that differ in any two rows follow.
        """
        order = numpy.nonzero(self._may)[0]
        chosen = rows[order]
        edges = numpy.nonzero(chosen != numpy.roll(chosen, 1))[0]
        ends = [end for edge in edges.tolist() for end in (order[edge], order[edge - 1])]
        pairs = _shuffled_pairs(ends) + (_shuffled_pairs(order.tolist()) if any_two else [])
        for changed in itertools.chain(((end,) for end in ends), pairs):
            other = rows.copy()
            other[list(changed)] ^= True
            if self._short(other) <= 0:
                yield other

    def _spread(self, copied: int, run: int, ahead: float) -> numpy.ndarray:
        """Choose rows of about `copied` bytes in all.

        Bytes are owed in proportion to what the relaxation copies. A run of `run` bytes begins when half of
        it is owed, and ends when half of it has been copied in advance.
        """
        weights = (self._wanted(copied) * self._loads.nbytes).tolist()
        rows = numpy.zeros(len(weights), dtype=bool)
        owed, running = ahead * run, False
        may, nbytes = self._may.tolist(), self._loads.nbytes.tolist()
        for index, weight in enumerate(weights):
            if not may[index]:
                continue
            owed += weight
            running = owed > -run / 2 if running else owed >= run / 2
            if running:
                rows[index] = True
                owed -= nbytes[index]
        return rows

    def _wanted(self, copied: int) -> numpy.ndarray:
        """The share of each row to copy, 0 to 1: the relaxation's shares, scaled to `copied` bytes in all."""
        nbytes = self._loads.nbytes * self._may
        planned = float((self._share * nbytes).sum())
        if copied <= planned:
            return self._share * (max(0, copied) / (planned or 1.0))
        left = float(nbytes.sum()) - planned
        wanted: numpy.ndarray = self._share + (1 - self._share) * min(
            1.0, (copied - planned) / left if left else 0.0
        )
        return wanted

    def _short(self, rows: numpy.ndarray) -> int:
        """Bytes by which the fullest step exceeds the cap when `rows` are copied; negative if it fits."""
        loads = self._loads
        kept_bytes = numpy.bincount(loads.gap[~rows], weights=loads.nbytes[~rows], minlength=len(loads.gaps))
        return int(self._residency.held_bytes(kept_bytes.tolist()).max()) - self._cap


def _shuffled_pairs(rows: Sequence[int]) -> list[tuple[int, ...]]:
    """All pairs of these rows, in an order that is random but the same on every call."""
    pairs: list[tuple[int, ...]] = list(itertools.combinations(rows, 2))
    random.Random(len(pairs)).shuffle(pairs)
    return pairs

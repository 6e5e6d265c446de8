"""The search for what one trace streams through a paged arena, timed on the exact event graph.

The more bytes stay, the fewer are copied, and the less room there is to copy ahead. Where the relaxation was
solved, the bytes that it keeps are rounded to whole spans, in several ways and leaving several amounts of
memory free. Otherwise, levels of memory that residency may fill are tried from the largest down, until
copying what remains would take longer than the best plan. The copies of the fastest candidates are then
joined in other ways, and their runs of rows grow and shrink.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.bound.residency import Residency, gaps_between_reads, needed_bytes
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.joining import Joiner, in_sizes
from penstock.schedule.clock.transfers import Join, Loads, Streaming
from penstock.schedule.facts.model import Schedule, Transfer
from penstock.schedule.search.runs import Runs
from penstock.schedule.search.task import Task

_COARSE, _FINE = 0.9, 0.99
"""Ratios between the bytes that two neighbouring levels leave to be copied."""

_PATIENCE = 3
"""Levels in a row that copy for too long before the search ends; whole spans make the time uneven."""

_SMALL = 300
"""Spans to copy, at most, in a problem whose levels are all tried."""

_LARGE = 8_000
"""Spans to copy, at most, in a problem for which every amount of memory to leave is tried."""

_CLOSE = 1.0001
"""Times the bound, at which a plan is good enough."""

_NEAR = 1.01
"""Times the bound, within which a plan is not searched for further."""

_RINGS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.8)
_PARTS = (1, 1.5, 2, 3)
_AHEAD = (0.0, 0.5)
"""Of a choice of runs: memory that is refilled, as a share of the relaxation's; runs that fit into it; and
the share of a run that is owed at the start of a pass."""

_JOINED = 4
"""Choices of spans, the fastest, whose copies are joined in every way."""

_EFFORT, _SMALL_EFFORT = 40_000, 600
"""Copies, counted before joining, that one search may join in every way; and the same of a small problem."""


@dataclass(frozen=True)
class _Candidate:
    period_ns: int
    copied: int
    level: int
    streaming: Streaming
    rows: numpy.ndarray


class OneTrace:
    """The candidates for one trace, and the best of those tried so far."""

    def __init__(self, task: Task) -> None:
        problem, groups, cap, breaks = task.problem, task.pieces.groups, task.cap, task.pieces.breaks
        (trace,), hardware = problem.traces, problem.hardware
        self.groups, self.trace, self.hardware, self.wrap, self.cap = (
            groups,
            trace,
            hardware,
            problem.wrap,
            cap,
        )
        self.gaps = gaps_between_reads(groups, trace, hardware)
        steps = len(trace.steps)
        self.residency = Residency(groups, self.gaps, needed_bytes(groups, steps))
        self.loads = Loads(groups, self.gaps, steps, breaks=breaks)
        self.joiner = Joiner(trace, hardware, breaks)
        self.breaks = breaks
        self.largest_span = max((s.nbytes for g in groups for s in g.spans), default=1)
        self.tried: set[bytes] = set()
        self.joined: set[bytes] = set()
        self.effort = int((_EFFORT if len(self.loads.step) > _SMALL else _SMALL_EFFORT) * task.effort)
        self.ranked: list[_Candidate] = []
        # Residency may fill all but what keeps the link busy, or half of what can be spared.
        self.spare = cap - int(max(self.residency.needed, default=0))
        self.highest = cap - min(hardware.link_in_flight_bytes, self.spare // 2)

    @property
    def period_ns(self) -> float:
        """The period of the best candidate so far."""
        return self.ranked[0].period_ns if self.ranked else math.inf

    def best(self, relaxed: Relaxation | None) -> tuple[Streaming, Sequence[bool]]:
        """The best way to stream, and for each span whether it never leaves.

        Small problems that are not near the bound, and those without a relaxation, try all levels too.
        """
        if relaxed:
            self._round(relaxed)
            if self.period_ns > relaxed.bound_ns * _NEAR:
                self._refine(relaxed)
        near = relaxed is not None and self.period_ns <= relaxed.bound_ns * _NEAR
        if not self.ranked or (len(self.loads.step) <= _SMALL and not near):
            self._try_levels()
        found = self.ranked[0]
        stays: list[bool] = self.loads.never_in(found.rows).tolist()
        return found.streaming, stays

    def _worst_ns(self) -> float:
        """The period that a candidate must beat to be remembered."""
        return self.ranked[-1].period_ns if len(self.ranked) == 2 * _JOINED else math.inf

    def _round(self, relaxed: Relaxation) -> None:
        """Rounds the relaxation, leaving several amounts of memory for rounding and for copies on their way.

        First the best amount to leave is found, then the best way to round with it.
        """
        shared = int(relaxed.shared_bytes)
        copy = shared // 2
        least = self.cap - self.highest
        margins = {least + self.largest_span * count for count in (0, 1, 2, 4, 8)}
        margins |= {least + int(shared * share) for share in (0.5, 1.0, 1.5, 2.0)}
        margins |= {least + int(self.spare * share) for share in (0.01, 0.04, 0.16)}
        best = least
        tried = sorted(margin for margin in margins if margin <= self.spare)
        for margin in tried if len(self.loads.step) <= _LARGE else tried[1::3]:
            before = self.period_ns
            self._time_rounded(relaxed.kept, margin, quantum=0, most=copy)
            best = margin if self.period_ns < before else best
            if self.period_ns <= relaxed.bound_ns * _CLOSE:
                return
        for quantum, most in ((0, 0), (copy // 2, copy), (copy, copy), (copy, 2 * copy)):
            self._time_rounded(relaxed.kept, best, quantum=quantum, most=most)
        for quantum in (copy // 4, copy // 2, copy, 2 * copy):
            for margin in sorted({least, *(max(least, quantum * share // 2) for share in (1, 2, 4))}):
                self._time_rounded(relaxed.kept, margin, quantum=quantum, most=copy)

    def _time_rounded(self, kept: Sequence[float], margin: int, *, quantum: int, most: int) -> None:
        peak = int((self.residency.held_bytes(kept) - self.residency.needed).max())
        share = max(0.0, 1.0 - margin / peak) if peak else 0.0
        scaled = [nbytes * share for nbytes in kept]
        counts = self.residency.rounded(scaled, quantum=quantum)
        counts = self.residency.trim(counts, scaled, self.cap - margin)
        if (self.residency.held(counts) <= self.highest).all():
            join = partial(in_sizes, most=most, breaks=self.breaks) if most else None
            self._time(self.cap - margin, self.loads.after_first(counts), join)

    def _refine(self, relaxed: Relaxation) -> None:
        """Streams runs of about the size of a copy, joins copies in the best way, and moves runs."""
        runs = Runs(self.loads, self.residency, relaxed.kept, self.highest)
        shared = relaxed.shared_bytes
        for ring, parts, ahead in itertools.product(_RINGS, _PARTS, _AHEAD):
            rows = runs.choose(int(shared * ring), int(shared * ring / parts), ahead)
            if rows is not None:
                self._time_joined(rows)
        for candidate in list(self.ranked[:_JOINED]):
            self._time_joined(candidate.rows)
        self._move(runs, relaxed)

    def _move(self, runs: Runs, relaxed: Relaxation) -> None:
        """Grows and shrinks the runs of the best candidate at their ends, as long as that helps."""
        while self.effort > 0:
            before = self.period_ns
            for rows in runs.neighbours(self.ranked[0].rows):
                self._time_joined(rows)
                if self.effort <= 0 or self.period_ns <= relaxed.bound_ns * _NEAR:
                    return
                if self.period_ns < before:
                    break
            else:
                return

    def _time_joined(self, rows: numpy.ndarray) -> None:
        """Times rows with their copies joined in the best way found, unless that was done before."""
        if rows.tobytes() not in self.joined and self.effort > 0:
            self.joined.add(rows.tobytes())
            self._time(self.cap, rows, self._join)

    def _join(self, pieces: Sequence[Transfer]) -> Sequence[Transfer]:
        self.effort -= len(pieces)
        return self.joiner.fastest(pieces)

    def _try_levels(self) -> None:
        """Coarse levels from the highest down, then fine ones on both sides of the best.

        A small problem has all its fine levels tried, where single spans count for much.
        """
        total = sum(group.nbytes for group in self.groups)
        fruitless = 0
        first = _FINE if len(self.loads.step) <= _SMALL else _COARSE
        for level in _levels(total, self.highest, first):
            fruitless = fruitless + 1 if self._try(level) >= self.period_ns else 0
            if fruitless == (_PATIENCE if first == _COARSE else 10 * _PATIENCE):
                break
        copied = max(1, total - self.ranked[0].level)
        upper = min(self.highest, total - int(copied * _COARSE))
        lower = total - int(copied / _COARSE)
        for level in _levels(total, upper, _FINE):
            if level < lower:
                break
            self._try(level)
        self._try(0)

    def _try(self, level: int) -> int:
        """Times the residencies of this level; returns the least that any of them takes to copy."""
        latency_bytes = self.hardware.link_latency_ns * self.hardware.link_bytes_per_s / 1e9
        copying = []
        for spread in (False, True):
            counts = self.residency.keep(level, latency_bytes=latency_bytes, spread=spread)
            rows = self.loads.after_first(counts)
            nbytes = int(self.loads.nbytes[rows].sum())
            copying.append(self.hardware.copy_ns(nbytes) - self.hardware.link_latency_ns)
            if rows.tobytes() not in self.tried and max(copying[-1], self.trace.compute_ns) < self.period_ns:
                self.tried.add(rows.tobytes())
                self._time(level, rows)
        return max(min(copying), self.trace.compute_ns)

    def _time(self, level: int, rows: numpy.ndarray, join: Join | None = None) -> None:
        """Times the copies of these rows, and ranks them."""
        stays = self.loads.never_in(rows)
        last = len(self.trace.steps) - 1
        for early in (last,) if self.wrap == "overlap" else (last, 0):
            streaming = self.loads.stream(rows, stays, cap=self.cap, early=early, join=join)
            if sum(self.hardware.copy_ns(t.stop - t.start) for t in streaming.transfers) >= self._worst_ns():
                continue
            schedule = Schedule(self.trace.graph, streaming.transfers, (), 0)
            period = steady_period_ns(self.trace, schedule, self.hardware, self.wrap)
            copied = sum(t.stop - t.start for t in streaming.transfers)
            self.ranked.append(_Candidate(period, copied, level, streaming, rows))
        self.ranked.sort(key=lambda one: (one.period_ns, one.copied))
        del self.ranked[2 * _JOINED :]


def _levels(total: int, cap: int, ratio: float) -> Iterator[int]:
    """Levels that do not depend on the cap, from the largest within it down to 0."""
    if cap >= total:
        yield total
    copied = max(1, total - cap)
    first = max(0, math.ceil(math.log(copied / max(1, total)) / math.log(ratio)))
    for power in itertools.count(first, -1):
        level = total - math.ceil(total * ratio**power) if power > 0 else 0
        if level <= cap:
            yield level
        if power <= 0:
            return

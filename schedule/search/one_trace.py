"""The search for what one trace streams through a paged arena, timed on the exact event graph.

The more bytes stay, the fewer are copied, and the less room there is to copy ahead. The bytes that the
relaxation keeps are rounded to whole spans, in several ways and leaving several amounts of memory free, and
those that it copies are chosen in runs of several lengths. The copies of the fastest candidates are then
joined in other ways, and the best one is improved: its runs grow and shrink at their ends, and where rows
are few, any two of them are changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.bound.residency import Residency, gaps_of, needed_bytes
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.joining import Joiner, in_sizes
from penstock.schedule.clock.transfers import Join, Loads, Streaming
from penstock.schedule.facts.model import Schedule, Transfer
from penstock.schedule.search.runs import Runs
from penstock.schedule.search.task import Task

_SMALL = 128
"""Spans to copy, at most, in a problem in which any two of them are changed at once."""

_LARGE = 8_000
"""Spans to copy, at most, in a problem for which every amount of memory to leave is tried."""

_CLOSE = 1.0001
"""Times the bound, at which a plan is good enough."""

_NEAR = 1.01
"""Times the bound, within which a plan is not searched for further."""

_SHARED = 0.1
"""Share of the memory to spare that is taken to be refilled where the relaxation was not solved."""

_JOINED = 4
"""Choices of spans, the fastest, whose copies are joined in every way."""

_EFFORT, _SMALL_EFFORT = 40_000, 2_000
"""Copies, counted before joining, that one search may join in every way; and the same of a small problem."""


@dataclass(frozen=True)
class _Candidate:
    period_ns: int
    copied: int
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
        self.gaps = gaps_of(groups, trace)
        steps = len(trace.steps)
        self.residency = Residency(groups, self.gaps, needed_bytes(groups, steps))
        self.loads = Loads(groups, self.gaps, steps, breaks=breaks)
        self.joiner = Joiner(trace, hardware, breaks)
        self.breaks = breaks
        self.largest_span = max((s.nbytes for g in groups for s in g.spans), default=1)
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
        """The best way to stream, and for each span whether it never leaves."""
        relaxed = relaxed or self._even_relaxation()
        self._round(relaxed)
        if self.period_ns > relaxed.bound_ns * _NEAR:
            runs = Runs(self.loads, self.residency, relaxed.kept, self.highest)
            for rows in runs.choices(relaxed.shared_bytes):
                self._time_joined(rows)
            for candidate in self.ranked[:_JOINED]:
                self._time_joined(candidate.rows)
            self._improve(runs, relaxed.bound_ns)
        found = self.ranked[0]
        stays: list[bool] = self.loads.never_in(found.rows).tolist()
        return found.streaming, stays

    def _even_relaxation(self) -> Relaxation:
        """What stands in for a relaxation that was not solved: the same share of every gap is kept."""
        sizes = [self.groups[gap.group].nbytes for gap in self.gaps]
        over = self.residency.held_bytes(sizes) - self.residency.needed
        room = self.highest - self.residency.needed
        share = float((room[over > 0] / over[over > 0]).min(initial=1.0))
        kept = tuple(nbytes * share for nbytes in sizes)
        return Relaxation(0, kept, self.gaps, self.groups, self.spare * _SHARED)

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
            self._time(self.loads.after_first(counts), join)

    def _improve(self, runs: Runs, bound_ns: int) -> None:
        """Takes the first of the neighbours of the best candidate that is better, as long as there is one."""
        few = len(self.loads.step) <= _SMALL
        while self.effort > 0:
            before = self.period_ns
            for rows in runs.neighbours(self.ranked[0].rows, any_two=few):
                self._time_joined(rows)
                if self.effort <= 0 or self.period_ns <= bound_ns * _NEAR:
                    return
                if self.period_ns < before:
                    break
            else:
                return

    def _time_joined(self, rows: numpy.ndarray) -> None:
        """Times rows with their copies joined in the best way found, unless that was done before."""
        if rows.tobytes() not in self.joined and self.effort > 0:
            self.joined.add(rows.tobytes())
            self._time(rows, self._join)

    def _join(self, pieces: Sequence[Transfer]) -> Sequence[Transfer]:
        self.effort -= len(pieces)
        return self.joiner.fastest(pieces)

    def _time(self, rows: numpy.ndarray, join: Join | None = None) -> None:
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
            self.ranked.append(_Candidate(period, copied, streaming, rows))
        self.ranked.sort(key=lambda one: (one.period_ns, one.copied))
        del self.ranked[2 * _JOINED :]

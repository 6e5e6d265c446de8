"""The search for what one trace streams through a paged arena, timed on the exact event graph.

The more bytes stay resident, the fewer are copied, and the less memory is left for copying ahead. The search
looks for the best balance in three stages. First it rounds the bytes that the relaxation keeps to whole
spans, in several ways that leave several amounts of memory free. Then it chooses the spans to copy in runs
of several lengths, and joins the copies of the fastest candidates in other ways. Last it improves the best
candidate: runs grow and shrink at their ends and, in a small problem, any two rows are changed.

A row is a copy that the trace could need: one span over one gap (`Loads` in `schedule/clock/transfers.py`).
A candidate is a choice of the rows that are copied.
"""

from __future__ import annotations

import itertools
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
"""The most rows of a small problem, in which any two rows are changed at once."""

_LARGE = 8_000
"""The most rows of a problem for which every amount of free memory is tried."""

_CLOSE = 1.0001
"""Rounding ends when the period is at most this multiple of the lower bound."""

_NEAR = 1.01
"""Rounding is the only stage, and improving ends, at a period of at most this multiple of the lower bound."""

_SHARED = 0.1
"""The share of the spare memory that is assumed to be refilled where the relaxation was not solved."""

_COARSE = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Sizes of copies that are tried once a plan takes as long as its bound, as shares of the spare memory.

Every copy costs the thread that computes some time that the model hides: to map what the page cache holds,
to drop it, and to walk page tables anew. 1 GiB of a Llama within a half, warm, took 1.25 times as long as in
memory with 235 copies, and 1.13 times with 12.
"""

_JOINED = 4
"""The number of candidates, the fastest ones, whose copies are joined in every way."""

_PUT_OFF = (0, 1 / 16, 1 / 4, 1 / 2, 1)
"""Values tried for the bytes that may wait to be copied out, as shares of the spare memory.

Where they have more time to leave, copies for later steps have less memory.
"""

_EFFORT, _SMALL_EFFORT = 40_000, 2_000
"""The most copies that one search may join in every way: of a large problem, and of a small one.

Copies are counted before they are joined, and each time that they are joined anew.
"""


@dataclass(frozen=True)
class _Candidate:
    """A choice of rows, the transfers that copy them, the period, and how long they keep the link."""

    period_ns: int
    busy_ns: int
    streaming: Streaming
    rows: numpy.ndarray


class OneTrace:
    """The search for one trace: its inputs, and the best of the candidates that were tried.

    `ranked` holds the best candidates, the fastest first. `effort` is the number of copies that may still be
    joined in every way. `spare` is the memory in bytes beyond what the fullest step itself needs.
    """

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
        self.loads = Loads(groups, self.gaps, steps, breaks=breaks, call_ends=partial(problem.call_ends, 0))
        self.joiner = Joiner(trace, hardware, breaks)
        self.breaks = breaks
        self.largest_span = max(span.nbytes for group in groups for span in group.spans)
        self.joined: set[bytes] = set()
        self.effort = int((_EFFORT if len(self.loads.step) > _SMALL else _SMALL_EFFORT) * task.effort)
        self.ranked: list[_Candidate] = []
        self.spare = cap - int(self.residency.needed.max())
        self.in_flight = min(hardware.link_in_flight_bytes, self.spare // 2)

    @property
    def period_ns(self) -> float:
        """The steady period of the best candidate so far, infinite before the first."""
        return self.ranked[0].period_ns if self.ranked else math.inf

    def best(self, relaxed: Relaxation | None) -> tuple[Streaming, Sequence[bool]]:
        """The fastest way to stream that was found, and, for each span, whether it never leaves the arena."""
        relaxed = relaxed or self._even_relaxation()
        self._round(relaxed)
        runs = Runs(self.loads, self.residency, relaxed.kept, self.cap)
        if self.period_ns > relaxed.bound_ns * _NEAR:
            for rows in runs.choices(relaxed.shared_bytes + self.in_flight):
                self._time_joined(rows)
            for candidate in self.ranked[:_JOINED]:
                self._time_joined(candidate.rows)
            self._improve(runs, relaxed.bound_ns)
        if self.period_ns <= relaxed.bound_ns * _CLOSE:
            self._coarsen(runs)
        best = self.ranked[0]
        stays: list[bool] = self.loads.never_in(best.rows).tolist()
        return best.streaming, stays

    def _even_relaxation(self) -> Relaxation:
        """A substitute for a relaxation that was not solved: it keeps the same share of every gap's bytes."""
        sizes = [self.groups[gap.group].nbytes for gap in self.gaps]
        over = self.residency.held_bytes(sizes) - self.residency.needed
        room = self.cap - self.residency.needed
        share = float((room[over > 0] / over[over > 0]).min(initial=1.0))
        kept_bytes = tuple(nbytes * share for nbytes in sizes)
        return Relaxation(0, kept_bytes, self.gaps, self.groups, self.spare * _SHARED)

    def _worst_ns(self) -> float:
        """The period that a candidate must beat to be remembered."""
        return self.ranked[-1].period_ns if len(self.ranked) == 2 * _JOINED else math.inf

    def _round(self, relaxed: Relaxation) -> None:
        """Round the relaxation to whole spans, with several amounts of memory left free.

        The free memory takes what rounding adds, and copies on their way. The best amount is found first, and
        then the best way to round with that amount.
        """
        shared = int(relaxed.shared_bytes)
        copy = shared // 2
        margins = {self.largest_span * count for count in (0, 1, 2, 4, 8)}
        margins |= {int(shared * share) for share in (0.5, 1.0, 1.5, 2.0)}
        margins |= {int(self.spare * share) for share in (0.01, 0.04, 0.16)}
        margins |= {int(self.in_flight * share) for share in (0.5, 1.0, 2.0)}
        best = 0
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
            for margin in sorted({best, *(quantum * share // 2 for share in (0, 1, 2, 4))}):
                self._time_rounded(relaxed.kept, margin, quantum=quantum, most=copy)

    def _coarsen(self, runs: Runs) -> None:
        """Try fewer and larger copies, which may keep the link for less time in passes as long."""
        for share in _COARSE:
            copy = int(self.spare * share)
            rows = runs.choose(2 * copy, copy, 0.0)
            if rows is not None:
                self._time(rows, partial(in_sizes, most=copy, breaks=self.breaks))

    def _time_rounded(self, kept_bytes: Sequence[float], margin: int, *, quantum: int, most: int) -> None:
        """Time the rounding of `kept` bytes of each gap that leaves `margin` bytes of memory free.

        Bytes are rounded in units of `quantum` (0: whole spans), and copies are joined up to `most` bytes (0:
        they are not joined).
        """
        peak = int((self.residency.held_bytes(kept_bytes) - self.residency.needed).max())
        share = max(0.0, 1.0 - margin / peak) if peak else 0.0
        scaled = [nbytes * share for nbytes in kept_bytes]
        counts = self.residency.rounded(scaled, quantum=quantum)
        counts = self.residency.trim(counts, scaled, self.cap - margin)
        join = partial(in_sizes, most=most, breaks=self.breaks) if most else None
        self._time(self.loads.after_first(counts), join)

    def _improve(self, runs: Runs, bound_ns: int) -> None:
        """Replace the best candidate by the first of its neighbours that is faster, while there is one."""
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
        """Time a choice of rows with its copies joined in the best way found, once for each choice."""
        if rows.tobytes() not in self.joined and self.effort > 0:
            self.joined.add(rows.tobytes())
            self._time(rows, self._join)

    def _join(self, pieces: Sequence[Transfer]) -> Sequence[Transfer]:
        """Join copies in the fastest way found, and count them against the effort."""
        self.effort -= len(pieces)
        return self.joiner.fastest(pieces)

    def _put_off(self, rows: numpy.ndarray) -> Sequence[int]:
        """The bytes that may wait to be copied out, of which several amounts are tried."""
        if not self.loads.produced[rows].any():
            return (0,)
        return sorted({int(self.spare * share) for share in _PUT_OFF})

    def _time(self, rows: numpy.ndarray, join: Join | None = None) -> None:
        """Time the copies of these rows on the event graph, and rank the candidate among the best ones."""
        stays = self.loads.never_in(rows)
        last = len(self.trace.steps) - 1
        choices = (last,) if self.wrap == "overlap" else (last, 0)
        for early, put_off in itertools.product(choices, self._put_off(rows)):
            streaming = self.loads.stream(rows, stays, cap=self.cap, early=early, join=join, put_off=put_off)
            if streaming is None:
                continue
            busy = sum(map(self.hardware.moving_ns, streaming.transfers))
            if busy >= self._worst_ns():
                continue
            schedule = Schedule(self.trace.graph, streaming.transfers, (), 0)
            facts = (self.trace, schedule, self.hardware, self.wrap)
            launched = self.loads.steps_using(~stays)
            period = steady_period_ns(*facts, enough=self._worst_ns(), launched=launched)
            self.ranked.append(_Candidate(period, busy, streaming, rows))
        self.ranked.sort(key=lambda timed: (timed.period_ns, timed.busy_ns))
        del self.ranked[2 * _JOINED :]

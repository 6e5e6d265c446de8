"""The search for a plan of a paged arena, trace by trace, timed on the exact event graph."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy

from penstock.schedule.bound.gaps import Residency, gaps_of, needed_bytes
from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Join, Joiner, Loads, Streaming, in_sizes
from penstock.schedule.facts.model import Arena, Drop, Range, Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.search.contiguous import search_blocks
from penstock.schedule.search.draft import Draft, Task
from penstock.schedule.space.spans import Block, Pieces, merged

_ATTEMPTS = 5
"""The number of times that a choice which does not fit into memory is made, each time with more to copy."""

_RINGS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.8)
"""Values tried for the memory that is refilled during a pass, as multiples of what the relaxation refills."""

_PARTS = (1, 1.5, 2, 3)
"""Values tried for the number of runs that fit into the refilled memory, which sets their length."""

_TURNS = 8
"""The most groups that take turns."""

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
        """Yield masks over all rows, in runs of several lengths, that refill `shared_bytes` of memory."""
        for ring, parts, ahead in itertools.product(_RINGS, _PARTS, _AHEAD):
            rows = self.choose(int(shared_bytes * ring), int(shared_bytes * ring / parts), ahead)
            if rows is not None:
                yield rows

    def choose(self, shared: int, run: int, ahead: float) -> numpy.ndarray | None:
        """Choose rows in runs of about `run` bytes that refill `shared` bytes of memory; None if none fit."""
        copied = self._excess + shared
        for _ in range(_ATTEMPTS):
            rows = self._spread(copied, run, ahead)
            short = self._short(rows)
            if short <= 0:
                return rows
            copied += short
        return None

    def neighbours(self, rows: numpy.ndarray, *, any_two: bool) -> Iterator[numpy.ndarray]:
        """Yield choices with one or two ends of runs moved; `any_two` adds those that differ in two rows."""
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

    def turns(self) -> Iterator[numpy.ndarray]:
        """Yield choices in which parts of a few groups, spread over the pass, take turns in the memory."""
        gaps, groups = self._loads.gaps, self._residency.groups
        for count in range(2, min(_TURNS, len(gaps)) + 1):
            for absent in {count - 1, count - 2, count // 2} - {0}:
                part = -(-self._excess // absent)
                large = [g for g, gap in enumerate(gaps) if gap.inside and groups[gap.group].nbytes >= part]
                large.sort(key=lambda g: gaps[g].closes % self._loads.steps)
                for first in (0, 0.5) if len(large) >= count else ():
                    stays = [groups[gap.group].nbytes for gap in gaps]
                    for number in range(count):
                        stays[large[int((number + first) * len(large) / count)]] -= part
                    counts = [
                        bisect_right(groups[gap.group].bytes_of_first, nbytes) - 1
                        for gap, nbytes in zip(gaps, stays, strict=True)
                    ]
                    rows = self._loads.after_first(counts)
                    if self._short(rows) <= 0:
                        yield rows

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
            for rows in runs.turns():
                self._time(rows, partial(in_sizes, most=self.cap, breaks=self.breaks))
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
        """Round the relaxation to whole spans: find the best amount of free memory, then how to round."""
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
        """Time the rounding of `kept_bytes` bytes of each gap that leaves `margin` bytes of memory free.

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


_SHARES = 64
"""The number of resident shares, beside 0, that are tried for several methods in one arena."""


def search(task: Task) -> Draft:
    """The best draft found for a paged arena."""
    problem, pieces = task.problem, task.pieces
    alone = len(problem.traces) == 1
    if alone:
        streaming, stays = OneTrace(task).best(task.relaxed[0])
        draft = _draft(pieces, (streaming,), stays)
    else:
        draft = _draft(pieces, *_share_for_all(problem, pieces, task.cap))
    period_ns = sum(draft.periods_ns(problem))
    if period_ns <= sum(relaxation.bound_ns for relaxation in task.relaxed if relaxation) * _NEAR:
        return draft
    other = _search_runs(task)
    return other if other and sum(other.periods_ns(problem)) < period_ns else draft


def _draft(pieces: Pieces, streams: Sequence[Streaming], stays: Sequence[bool]) -> Draft:
    """The draft of a paged arena: `streams` has what each method streams, `stays` which spans never leave."""
    spans = (span for group in pieces.groups for span in group.spans)
    resident = merged(itertools.compress(spans, stays), pieces.breaks)
    peak = max(stream.holding.peak_bytes for stream in streams)
    boundaries = tuple((*resident, *stream.holding.boundary) for stream in streams)
    moved = tuple((stream.transfers, stream.holding.drops) for stream in streams)
    if len(streams) == 1:
        return Draft(peak, (), resident, boundaries[0], moved)
    return Draft(peak, (), resident, resident, moved, boundaries)


def _share_for_all(
    problem: Problem, pieces: Pieces, cap: int
) -> tuple[tuple[Streaming, ...], Sequence[bool]]:
    """The best way to stream in which one share of every group is resident for all methods.

    Each method streams the rest, and prefetches at the end of a call as if its own next call followed.
    Returns what each method streams, and, for each span, whether it never leaves.
    """
    groups = pieces.groups
    best: tuple[int, tuple[Streaming, ...], Sequence[bool]] | None = None
    plans = []
    for number, trace in enumerate(problem.traces):
        gaps = gaps_of(groups, trace, number=number)
        steps = len(trace.steps)
        residency = Residency(groups, gaps, needed_bytes(groups, steps, number=number))
        ends = partial(problem.call_ends, number)
        loads = Loads(groups, gaps, steps, breaks=pieces.breaks, number=number, call_ends=ends)
        read = {gap.group for gap in residency.gaps}
        unread = [
            g for number, g in enumerate(groups) if not g.kept and not g.produced and number not in read
        ]
        plans.append((trace, residency, loads, unread))
    for share in range(_SHARES, -1, -1):
        fixed = tuple(len(g.spans) if g.kept else len(g.spans) * share // _SHARES for g in groups)
        streams, period = [], 0
        for trace, residency, loads, unread in plans:
            counts = [
                len(groups[gap.group].spans)
                if gap.inside == 0 and gap.closes < len(trace.steps)
                else fixed[gap.group]
                for gap in residency.gaps
            ]
            unread_bytes = sum(g.bytes_of_first[len(g.spans) * share // _SHARES] for g in unread)
            if (residency.held(counts) + unread_bytes > cap).any():
                break
            stays = [
                n < count and not g.produced
                for g, count in zip(groups, fixed, strict=True)
                for n in range(len(g.spans))
            ]
            early = len(trace.steps) - 1 if problem.wrap == "overlap" else 0
            stream = loads.stream(loads.after_first(counts), numpy.array(stays), cap=cap, early=early)
            assert stream is not None  # with nothing put off, there is memory for each copy when it is needed
            streams.append(stream)
            schedule = Schedule(trace.graph, stream.transfers, (), 0)
            launched = loads.steps_using(~numpy.array(stays))
            period += steady_period_ns(trace, schedule, problem.hardware, problem.wrap, launched=launched)
        if len(streams) == len(plans) and (best is None or period < best[0]):
            best = (period, tuple(streams), stays)
    assert best is not None
    return best[1], best[2]


_Piece = TypeVar("_Piece", Range, Transfer, Drop)


def _search_runs(task: Task) -> Draft | None:
    """The draft that the search for a contiguous arena finds when each run is a block of whole granules.

    A paged arena does not use the addresses found: they only decide which runs take turns in the same memory.
    None if no placement of the runs is found.
    """
    arena = task.problem.arena
    blocks = []
    for number, run in enumerate(task.pieces.runs):
        whole = Range(run.range.start // arena.granule * arena.granule, run.range.stop)
        size = -(-whole.nbytes // arena.granule) * arena.granule
        blocks.append(Block(number, whole, 0, size, run.reads, run.kept, run.produced))
    draft = search_blocks(task, blocks)
    return _clipped(draft, arena) if draft else None


def _clipped(draft: Draft, arena: Arena) -> Draft:
    """The draft with its ranges cut to segments, which may begin inside a granule, unlike blocks."""
    begins = {s.start // arena.granule * arena.granule: s.start for s in arena.segments}

    def clip(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
        return tuple(replace(piece, start=begins.get(piece.start, piece.start)) for piece in pieces)

    streams = tuple((clip(transfers), clip(drops)) for transfers, drops in draft.streams)
    boundaries = tuple(map(clip, draft.boundaries))
    resident, boundary = clip(draft.resident), clip(draft.boundary)
    return replace(draft, resident=resident, boundary=boundary, streams=streams, boundaries=boundaries)

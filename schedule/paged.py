"""The search for a plan of a paged arena: how much stays, where, and what that costs.

The more bytes stay, the fewer are copied, and the less room there is to copy ahead. Levels of
memory that residency may fill are tried from the largest down, until what remains would copy for
longer than the best plan found takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.schedule.bound import Relaxation
from penstock.schedule.model import Arena, Hardware, Schedule, Storage, Trace, Wrap
from penstock.schedule.paged_by_age import search_runs
from penstock.schedule.residency import Residency, gaps_between_reads, needed_bytes, rounded
from penstock.schedule.spans import Group, merged, read_runs, span_groups
from penstock.schedule.timeline import steady_period_ns
from penstock.schedule.transfers import Decisions, Loads, Streaming

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
"""Times the bound, within which a small problem's levels are not searched as well."""

_SHARES = 64
"""Resident shares that are tried for several methods in one arena."""


def need(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[int, int, int, int | None]:
    """Bytes of the arena that a plan needs, as a lower and an equal upper bound, and who sets them.

    The last two are the trace and the step (None without any).
    """
    groups = _groups(storages, traces, arena, keep)
    largest: tuple[int, int, int | None] = (0, 0, None)
    for which, trace in enumerate(traces):
        for k, nbytes in enumerate(needed_bytes(groups, len(trace.steps), which=which)):
            if largest[2] is None or nbytes > largest[0]:
                largest = (nbytes, which, k)
    return largest[0], largest[0], largest[1], largest[2]


def search(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    cap: int,
    hardware: Hardware,
    keep: Collection[int],
    wrap: Wrap,
    relaxed: Sequence[Relaxation | None],
) -> Decisions:
    """The best decisions found for `cap` bytes of arena, which are at least what is needed.

    `relaxed` has the relaxation of each trace for that memory, where there is one.
    """
    groups = _groups(storages, traces, arena, keep)
    breaks = frozenset(segment.start for segment in arena.segments)
    if len(traces) == 1:
        one = _OneTrace(groups, traces[0], hardware, wrap=wrap, cap=cap, breaks=breaks)
        streaming, fixed = one.best(relaxed[0])
        streams: tuple[Streaming, ...] = (streaming,)
        if relaxed[0] is None or one.period_ns > relaxed[0].bound_ns * _NEAR:
            runs = read_runs(storages, traces, arena, keep=keep)
            other = search_runs(runs, traces, arena, cap=cap, hardware=hardware, wrap=wrap, relaxed=relaxed)
            if other and _period_ns(traces[0], other, hardware, wrap) < one.period_ns:
                return other
    else:
        streams, fixed = _share_for_all(groups, traces, hardware, cap, breaks)
    resident = merged((s for g, count in zip(groups, fixed, strict=True) for s in g.spans[:count]), breaks)
    peak = max((one.memory.peak_bytes for one in streams), default=sum(r.nbytes for r in resident))
    boundary = (*resident, *(r for one in streams for r in one.memory.boundary))
    return Decisions(
        peak, (), resident, boundary, tuple((one.transfers, one.memory.drops) for one in streams)
    )


def _period_ns(trace: Trace, found: Decisions, hardware: Hardware, wrap: Wrap) -> int:
    return steady_period_ns(trace, Schedule(trace.graph, *found.streams[0], 0), hardware, wrap)


def _groups(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[Group, ...]:
    """The groups of spans; with several traces, what a first step reads is kept.

    Any of the methods may be called next, so nothing can be on its way when a call begins.
    """
    groups = span_groups(read_runs(storages, traces, arena, keep=keep), arena.granule)
    if len(traces) == 1:
        return groups
    return tuple(replace(g, kept=g.kept or any(reads[:1] == (0,) for reads in g.reads)) for g in groups)


@dataclass(frozen=True)
class _Candidate:
    period_ns: int
    copied: int
    level: int
    streaming: Streaming
    fixed: tuple[int, ...]


class _OneTrace:
    """The candidates for one trace, and the best of those tried so far."""

    def __init__(
        self,
        groups: Sequence[Group],
        trace: Trace,
        hardware: Hardware,
        *,
        wrap: Wrap,
        cap: int,
        breaks: Collection[int],
    ) -> None:
        self.groups, self.trace, self.hardware, self.wrap, self.cap = groups, trace, hardware, wrap, cap
        self.gaps = gaps_between_reads(groups, trace, hardware)
        steps = len(trace.steps)
        self.residency = Residency(groups, self.gaps, needed_bytes(groups, steps))
        self.loads = Loads(groups, self.gaps, steps, breaks=breaks)
        self.largest_span = max((s.nbytes for g in groups for s in g.spans), default=1)
        self.tried: set[tuple[int, ...]] = set()
        self.found: _Candidate | None = None
        # Residency may fill all but what keeps the link busy, or half of what can be spared.
        self.spare = cap - int(max(self.residency.needed, default=0))
        self.highest = cap - min(hardware.link_in_flight_bytes, self.spare // 2)

    def best(self, relaxed: Relaxation | None) -> tuple[Streaming, tuple[int, ...]]:
        """The best of the relaxation's roundings; where they are few or there are none, of all levels too."""
        if relaxed:
            self._round(relaxed)
        near = relaxed is not None and self.period_ns <= relaxed.bound_ns * _NEAR
        if self.found is None or (len(self.loads.step) <= _SMALL and not near):
            self._try_levels()
        assert self.found is not None
        return self.found.streaming, self.found.fixed

    def _round(self, relaxed: Relaxation) -> None:
        """Rounds the relaxation, leaving more and more memory for rounding and for copies on their way.

        First the best amount to leave is found, then the best way to round with it.
        """
        copy = int(relaxed.copy_bytes)
        least = self.cap - self.highest
        margins = {least + self.largest_span * count for count in (0, 1, 2, 4, 8)}
        margins |= {least + int(copy * share) for share in (0.5, 1.0, 1.5, 2.0)}
        margins |= {least + int(self.spare * share) for share in (0.01, 0.04, 0.16)}
        best = least
        tried = sorted(margin for margin in margins if margin <= self.spare)
        for margin in tried if len(self.loads.step) <= _LARGE else tried[1::3]:
            before = self.period_ns
            self._time_rounded(relaxed.kept, margin, quantum=0, coalesce=copy)
            best = margin if self.period_ns < before else best
            if self.period_ns <= relaxed.bound_ns * _CLOSE:
                return
        for quantum, coalesce in ((0, 0), (copy // 2, copy), (copy, copy), (copy, 2 * copy)):
            self._time_rounded(relaxed.kept, best, quantum=quantum, coalesce=coalesce)
        for quantum in (copy // 4, copy // 2, copy, 2 * copy):
            for margin in (0, least, quantum // 2, quantum, 2 * quantum):
                self._time_rounded(relaxed.kept, margin, quantum=quantum, coalesce=copy)

    def _time_rounded(self, kept: Sequence[float], margin: int, *, quantum: int, coalesce: int) -> None:
        peak = int((self.residency.held_bytes(kept) - self.residency.needed).max())
        share = max(0.0, 1.0 - margin / peak) if peak else 0.0
        scaled = [nbytes * share for nbytes in kept]
        counts = rounded(self.groups, self.gaps, scaled, len(self.trace.steps), quantum=quantum)
        counts = self.residency.trim(counts, scaled, self.cap - margin)
        if (self.residency.held(counts) <= self.cap).all():
            self._time(self.cap - margin, counts, coalesce=coalesce)

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
        assert self.found is not None
        copied = max(1, total - self.found.level)
        upper = min(self.highest, total - int(copied * _COARSE))
        lower = total - int(copied / _COARSE)
        for level in _levels(total, upper, _FINE):
            if level < lower:
                break
            self._try(level)
        self._try(0)

    @property
    def period_ns(self) -> float:
        """That of the best so far."""
        return self.found.period_ns if self.found else math.inf

    def _try(self, level: int) -> int:
        """Times the residencies of this level; returns the least that any of them takes to copy."""
        latency_bytes = self.hardware.link_latency_ns * self.hardware.link_bytes_per_s / 1e9
        copying = []
        for spread in (False, True):
            counts = self.residency.keep(level, latency_bytes=latency_bytes, spread=spread)
            nbytes = sum(
                self.groups[gap.group].nbytes - self.groups[gap.group].bytes_of_first[count]
                for gap, count in zip(self.gaps, counts, strict=True)
            )
            copying.append(self.hardware.copy_ns(nbytes) - self.hardware.link_latency_ns)
            if tuple(counts) not in self.tried and max(copying[-1], self.trace.compute_ns) < self.period_ns:
                self.tried.add(tuple(counts))
                self._time(level, counts)
        return max(min(copying), self.trace.compute_ns)

    def _time(self, level: int, counts: Sequence[int], *, coalesce: int = 0) -> None:
        fixed = _always_kept(self.groups, [gap.group for gap in self.gaps], counts)
        last = len(self.trace.steps) - 1
        for early in (last,) if self.wrap == "overlap" else (last, 0):
            streaming = self.loads.stream(counts, fixed, cap=self.cap, early=early, coalesce=coalesce)
            schedule = Schedule(self.trace.graph, streaming.transfers, (), 0)
            period = steady_period_ns(self.trace, schedule, self.hardware, self.wrap)
            self.moved = sum(t.stop - t.start for t in streaming.transfers)
            copied = sum(t.stop - t.start for t in streaming.transfers)
            if self.found is None or (period, copied) < (self.found.period_ns, self.found.copied):
                self.found = _Candidate(period, copied, level, streaming, fixed)


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


def _always_kept(
    groups: Sequence[Group], gap_groups: Sequence[int], counts: Sequence[int]
) -> tuple[int, ...]:
    """Leading spans of each group that no gap drops."""
    fixed = [len(group.spans) for group in groups]
    for group, count in zip(gap_groups, counts, strict=True):
        fixed[group] = min(fixed[group], count)
    return tuple(fixed)


def _share_for_all(
    groups: Sequence[Group],
    traces: Sequence[Trace],
    hardware: Hardware,
    cap: int,
    breaks: Collection[int],
) -> tuple[tuple[Streaming, ...], tuple[int, ...]]:
    """One resident share of every group for all methods; each streams the rest within its own calls."""
    best: tuple[int, tuple[Streaming, ...], tuple[int, ...]] | None = None
    plans = []
    for which, trace in enumerate(traces):
        gaps = gaps_between_reads(groups, trace, hardware, which=which)
        steps = len(trace.steps)
        residency = Residency(groups, gaps, needed_bytes(groups, steps, which=which))
        plans.append((trace, residency, Loads(groups, gaps, steps, breaks=breaks)))
    for share in range(_SHARES, -1, -1):
        fixed = tuple(len(g.spans) if g.kept else len(g.spans) * share // _SHARES for g in groups)
        streams, period = [], 0
        for trace, residency, loads in plans:
            counts = [
                len(groups[gap.group].spans)
                if gap.inside == 0 and gap.closes < len(trace.steps)
                else fixed[gap.group]
                for gap in residency.gaps
            ]
            unread = sum(
                g.bytes_of_first[count]
                for index, (g, count) in enumerate(zip(groups, fixed, strict=True))
                if not g.kept and all(gap.group != index for gap in residency.gaps)
            )
            if (residency.held(counts) + unread > cap).any():
                break
            one = loads.stream(counts, fixed, cap=cap, early=-1)
            streams.append(one)
            schedule = Schedule(trace.graph, one.transfers, (), 0)
            period += steady_period_ns(trace, schedule, hardware, "overlap")
        if len(streams) == len(plans) and (best is None or period < best[0]):
            best = (period, tuple(streams), fixed)
    assert best is not None
    return best[1], best[2]

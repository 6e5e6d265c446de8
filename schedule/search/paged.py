"""Plans of a paged arena: what one trace streams, or one resident share for several methods."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.bound.residency import Residency, gaps_between_reads, needed_bytes
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Decisions, Loads, Streaming
from penstock.schedule.facts.model import Arena, Hardware, Schedule, Storage, Trace, Wrap
from penstock.schedule.search.by_age import search_runs
from penstock.schedule.search.one_trace import OneTrace
from penstock.schedule.space.spans import Group, merged, read_runs, span_groups

_NEAR = 1.01
"""Times the bound, within which no other way to plan is asked."""

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
    effort: float = 1.0,
) -> Decisions:
    """The best decisions found for `cap` bytes of arena, which are at least what is needed.

    `relaxed` has the relaxation of each trace for that memory, where there is one; `effort` is the share
    of the usual search.
    """
    groups = _groups(storages, traces, arena, keep)
    breaks = frozenset(segment.start for segment in arena.segments)
    if len(traces) == 1:
        one = OneTrace(groups, traces[0], hardware, wrap=wrap, cap=cap, breaks=breaks)
        one.effort = int(one.effort * effort)
        streaming, stays = one.best(relaxed[0])
        streams: tuple[Streaming, ...] = (streaming,)
    else:
        streams, stays = _share_for_all(groups, traces, hardware, cap=cap, breaks=breaks, wrap=wrap)
    found = _decisions(groups, streams, stays, breaks)
    period_ns = _period_ns(traces, found, hardware, wrap)
    bounds = [one.bound_ns for one in relaxed if one]
    near = len(bounds) == len(traces) and period_ns <= sum(bounds) * _NEAR
    if near or (hardware.link_in_flight_bytes and len(traces) == 1):
        return found  # the other search leaves no room for copies on their way
    runs = read_runs(storages, traces, arena, keep=keep)
    other = search_runs(
        runs, traces, arena, cap=cap, hardware=hardware, wrap=wrap, relaxed=relaxed, effort=effort
    )
    return other if other and _period_ns(traces, other, hardware, wrap) < period_ns else found


def _decisions(
    groups: Sequence[Group], streams: Sequence[Streaming], stays: Sequence[bool], breaks: Collection[int]
) -> Decisions:
    """What several methods stream, or one, beside the spans that never leave."""
    spans = (span for group in groups for span in group.spans)
    resident = merged(itertools.compress(spans, stays), breaks)
    peak = max((one.memory.peak_bytes for one in streams), default=sum(r.nbytes for r in resident))
    boundaries = tuple((*resident, *one.memory.boundary) for one in streams)
    moved = tuple((one.transfers, one.memory.drops) for one in streams)
    if len(streams) == 1:
        return Decisions(peak, (), resident, boundaries[0], moved)
    return Decisions(peak, (), resident, resident, moved, boundaries)


def _period_ns(traces: Sequence[Trace], found: Decisions, hardware: Hardware, wrap: Wrap) -> int:
    return sum(
        steady_period_ns(trace, Schedule(trace.graph, *stream, 0), hardware, wrap)
        for trace, stream in zip(traces, found.streams, strict=True)
    )


def _groups(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[Group, ...]:
    return span_groups(read_runs(storages, traces, arena, keep=keep), arena.granule)


def _share_for_all(
    groups: Sequence[Group],
    traces: Sequence[Trace],
    hardware: Hardware,
    *,
    cap: int,
    breaks: Collection[int],
    wrap: Wrap,
) -> tuple[tuple[Streaming, ...], Sequence[bool]]:
    """One resident share of every group for all methods; each streams the rest, for its own next call too."""
    best: tuple[int, tuple[Streaming, ...], Sequence[bool]] | None = None
    plans = []
    for which, trace in enumerate(traces):
        gaps = gaps_between_reads(groups, trace, hardware, which=which)
        steps = len(trace.steps)
        residency = Residency(groups, gaps, needed_bytes(groups, steps, which=which))
        plans.append((trace, residency, Loads(groups, gaps, steps, breaks=breaks)))
    import numpy

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
            stays = [n < count for g, count in zip(groups, fixed, strict=True) for n in range(len(g.spans))]
            early = len(trace.steps) - 1 if wrap == "overlap" else 0
            one = loads.stream(loads.after_first(counts), numpy.array(stays), cap=cap, early=early)
            streams.append(one)
            schedule = Schedule(trace.graph, one.transfers, (), 0)
            period += steady_period_ns(trace, schedule, hardware, wrap)
        if len(streams) == len(plans) and (best is None or period < best[0]):
            best = (period, tuple(streams), stays)
    assert best is not None
    return best[1], best[2]

"""Methods whose calls come in turn: joined into one trace to be planned and timed, and divided again.

The forward and the backward of a program that is trained are two methods. The trace of each says that it
`follows` the other. Planned as one trace, what is read at the end of the forward can stay for the beginning
of the backward, and copies for either may start while the other runs. The plan of that one trace is then
divided where control is the caller's.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.schedule.clock.event_graph import PassTimes, launched_steps, settle, steady_period_ns
from penstock.schedule.facts.model import Arena, Decisions, Drop, Pool, Range, Schedule, Trace, Transfer
from penstock.schedule.space.spans import merged, subtract

_P = TypeVar("_P", bound=Decisions)


def turns_of(traces: Sequence[Trace]) -> list[list[int]]:
    """The positions of traces whose calls come in turn, in the order of calls; every trace is in one list."""
    following = {trace.follows: k for k, trace in enumerate(traces) if trace.follows is not None}
    turns: list[list[int]] = []
    seen: set[int] = set()
    for first in range(len(traces)):
        turn, now = [], first
        while now not in seen:
            seen.add(now)
            turn.append(now)
            now = following.get(traces[now].graph, now)
        if turn:
            turns.append(turn)
    return turns


def joined_traces(traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """The traces, of which those whose calls come in turn are one: the steps of all in the order of calls."""
    return tuple(_joined_trace([traces[k] for k in turn]) for turn in turns_of(traces))


def splits_of(traces: Sequence[Trace]) -> tuple[tuple[int, ...], ...]:
    """For each of `joined_traces`, the steps at which calls but the first begin."""
    turns = ([len(traces[k].steps) for k in turn] for turn in turns_of(traces))
    return tuple(tuple(itertools.accumulate(turn[:-1])) for turn in turns)


def joined(plan: _P) -> _P:
    """The plan as it is timed and drawn: methods whose calls come in turn are one method."""
    turns = turns_of(plan.traces)
    if len(turns) == len(plan.traces):
        return plan
    schedules = {schedule.graph: schedule for schedule in plan.schedules}
    parts = [[(plan.traces[k], schedules[plan.traces[k].graph]) for k in turn] for turn in turns]
    return replace(
        plan,
        traces=joined_traces(plan.traces),
        schedules=tuple(_joined_schedule(plan, part) for part in parts),
        pool=None if plan.pool is None else _joined_pool(plan.pool, turns),
    )


def _joined_pool(pool: Pool, turns: Sequence[Sequence[int]]) -> Pool:
    """The pool with the sum of the times of methods whose calls come in turn."""
    expected, worst = (
        tuple(sum(times[k] for k in turn) for turn in turns) if times else ()
        for times in (pool.expected_ns, pool.worst_ns)
    )
    return replace(pool, expected_ns=expected, worst_ns=worst)


def divided(plan: _P, traces: Sequence[Trace]) -> _P:
    """The plan for `traces`, from one for their `joined_traces`."""
    turns = turns_of(traces)
    if len(turns) == len(traces):
        return plan
    of_trace: dict[int, Schedule] = {}
    for turn, trace, schedule in zip(turns, plan.traces, plan.schedules, strict=True):
        parts = _parts(plan, trace, schedule, [traces[k] for k in turn]) if len(turn) > 1 else [schedule]
        of_trace |= zip(turn, parts, strict=True)
    schedules = tuple(of_trace[k] for k in range(len(traces)))
    return replace(plan, traces=tuple(traces), schedules=schedules, boundary=plan.resident)


def _joined_trace(turn: Sequence[Trace]) -> Trace:
    """One trace of the steps of all, in which the time between two calls is compute before the next step."""
    if len(turn) == 1:
        return turn[0]
    steps, idle = list(turn[0].steps), turn[0].tail_ns + turn[0].gap_ns
    for trace in turn[1:]:
        first, *later_steps = trace.steps
        steps += [replace(first, lead_ns=first.lead_ns + idle), *later_steps]
        idle = trace.tail_ns + trace.gap_ns
    name = " + ".join(trace.method for trace in turn)
    return replace(
        turn[0],
        method=name,
        steps=tuple(steps),
        tail_ns=idle - turn[-1].gap_ns,
        gap_ns=turn[-1].gap_ns,
        follows=None,
    )


def _joined_schedule(plan: Decisions, parts: Sequence[tuple[Trace, Schedule]]) -> Schedule:
    """One schedule of methods whose calls come in turn, with the sum of their times."""
    if len(parts) == 1:
        return parts[0][1]
    transfers: list[Transfer] = []
    drops: list[Drop] = []
    begin = 0
    for trace, part in parts:
        transfers += (replace(t, step=t.step + begin, after=t.after + begin) for t in part.transfers)
        drops += (replace(d, step=d.step + begin) for d in part.drops)
        begin += len(trace.steps)
    bounds = [schedule.lower_bound_ns for _, schedule in parts if schedule.lower_bound_ns is not None]
    first = parts[0][1]
    return replace(
        first,
        transfers=tuple(transfers),
        drops=tuple(drops),
        predicted_ns=sum(schedule.predicted_ns for _, schedule in parts),
        lower_bound_ns=sum(bounds) if len(bounds) == len(parts) else None,
        staged=tuple(nbytes for _, schedule in parts for nbytes in schedule.staged),
        boundary=plan.boundary_of(first),
    )


def _parts(plan: Decisions, trace: Trace, schedule: Schedule, turn: Sequence[Trace]) -> list[Schedule]:
    """The schedules of methods whose calls come in turn, from that of the trace that joins them.

    A copy that may start before the call before its own begins is put off until the first step of that call.
    """
    starts = [0, *itertools.accumulate(len(trace.steps) for trace in turn)]
    boundary = subtract(plan.boundary_of(schedule), merged(_in_flight(schedule)))
    schedule = _within_reach(schedule, starts)
    boundary += _in_flight(schedule)
    launched = launched_steps(replace(plan, traces=(trace,), schedules=(schedule,)), 0)
    period = steady_period_ns(trace, schedule, plan.hardware, plan.wrap, launched=launched)
    steady = settle(trace, schedule, plan.hardware, plan.wrap, launched=launched).steady
    times, bound = _times(steady, turn), schedule.lower_bound_ns
    periods = _shares(period, times)
    bounds = [None if bound is None else bound * ns // (period or 1) for ns in periods]
    boundaries = _boundaries(plan, replace(schedule, boundary=tuple(boundary)), starts, turn)
    parts = []
    for k, called in enumerate(turn):
        begin, end = starts[k], starts[k + 1]
        mine = [i for i, t in enumerate(schedule.transfers) if begin <= t.step < end]
        moved = (schedule.transfers[i] for i in mine)
        part = Schedule(
            graph=called.graph,
            transfers=tuple(replace(t, step=t.step - begin, after=t.after - begin) for t in moved),
            drops=tuple(replace(d, step=d.step - begin) for d in schedule.drops if begin <= d.step < end),
            predicted_ns=periods[k],
            lower_bound_ns=bounds[k],
            staged=tuple(schedule.staged[i] for i in mine) if schedule.staged else (),
            staging_bytes=schedule.staging_bytes,
            boundary=boundaries[k],
        )
        parts.append(part)
    return parts


def _in_flight(schedule: Schedule) -> list[Range]:
    return [Range(t.start, t.stop) for t in schedule.transfers if t.after < 0 and t.direction == "in"]


def _times(steady: PassTimes, turn: Sequence[Trace]) -> list[int]:
    """Nanoseconds from the beginning of each call to the beginning of the next, in a steady round."""
    begins, ended = [steady.call_start], 0
    for trace in turn:
        ended += len(trace.steps)
        begins.append(steady.reads[ended - 1][1] + trace.tail_ns + trace.gap_ns)
    return [after - before for before, after in itertools.pairwise(begins)]


def _shares(total: int, times: Sequence[int]) -> list[int]:
    """A total in proportion to times, as whole numbers with that sum."""
    whole = sum(times) or 1
    shares = [total * time // whole for time in times]
    return [*shares[:-1], total - sum(shares[:-1])]


def _within_reach(schedule: Schedule, starts: Sequence[int]) -> Schedule:
    """The schedule in which no copy may start before the call before its own begins.

    Transfers start in issue order, so a transfer that waits for this holds up those behind it.
    """
    gate = max((t.after for t in schedule.transfers), default=0) - starts[-1]
    order = sorted(
        range(len(schedule.transfers)), key=lambda i: bisect_right(starts, schedule.transfers[i].step)
    )
    transfers = []
    for t in (schedule.transfers[i] for i in order):
        begin = max(start for start in starts if start <= t.step)
        before = starts[starts.index(begin) - 1] if begin else starts[-2] - starts[-1]
        gate = max(gate, t.after, before)
        transfers.append(replace(t, after=gate))
    staged = tuple(schedule.staged[i] for i in order) if schedule.staged else ()
    return replace(schedule, transfers=tuple(transfers), staged=staged)


def _boundaries(
    plan: Decisions, schedule: Schedule, starts: Sequence[int], turn: Sequence[Trace]
) -> list[tuple[Range, ...]]:
    """What is on the device, or on its way, when each part begins, in the order of its first reads."""
    edges, produced = _edges(plan, schedule), _produced_segments(plan, turn)
    edges = sorted(
        {*edges, *(edge for segment in produced.values() for edge in (segment.start, segment.stop))}
    )
    present = set(_cells(edges, plan.boundary_of(schedule)))
    brought: dict[int, list[Transfer]] = defaultdict(list)
    for t in (t for t in schedule.transfers if t.direction == "in"):
        brought[t.after % starts[-1]].append(t)
    dropped: dict[int, list[Drop]] = defaultdict(list)
    for drop in schedule.drops:
        dropped[drop.step].append(drop)
    boundaries = []
    for k in range(len(turn)):
        boundaries.append(_in_order(plan, edges, present, turn[k]))
        for step, step_facts in enumerate(turn[k].steps, starts[k]):
            present.update(_cells(edges, (produced[s] for s in step_facts.writes if s in produced)))
            present.difference_update(_cells(edges, dropped[step]))
            present.update(_cells(edges, brought[step]))
    return boundaries


def _produced_segments(plan: Decisions, turn: Sequence[Trace]) -> dict[int, Range]:
    """By storage that a step writes in the arena, the segment of the layout that it has for itself."""
    written = {s for trace in turn for step in trace.steps for s in step.writes} - set(plan.outside)
    return {
        s: segment
        for segment in plan.arena.segments
        for s in written
        if segment.start <= plan.arena.layout[s] < segment.stop
    }


def _edges(plan: Decisions, schedule: Schedule) -> list[int]:
    """The offsets of the layout at which anything that the schedule moves begins or ends."""
    items: list[Range | Transfer | Drop] = [*plan.boundary_of(schedule), *plan.resident]
    items += [*schedule.transfers, *schedule.drops]
    return sorted({edge for move in items for edge in (move.start, move.stop)})


def _cells(edges: Sequence[int], items: Iterable[Range | Transfer | Drop]) -> Iterator[int]:
    """The numbers of the cells between edges that the items cover."""
    for move in items:
        yield from range(bisect_left(edges, move.start), bisect_left(edges, move.stop))


def _in_order(plan: Decisions, edges: Sequence[int], present: set[int], trace: Trace) -> tuple[Range, ...]:
    """The held cells as ranges: the resident ones, then the others by the first step that reads them."""
    first = _first_reads(plan, edges, trace)
    resident = set(_cells(edges, plan.resident))
    breaks = {segment.start for segment in plan.arena.segments} | set(plan.arena.layout)
    ordered: list[tuple[int, Range]] = []
    for cell in sorted(present - resident):
        step, piece = first.get(cell, len(trace.steps)), Range(edges[cell], edges[cell + 1])
        if (
            ordered
            and ordered[-1] == (step, Range(ordered[-1][1].start, piece.start))
            and piece.start not in breaks
        ):
            ordered[-1] = (step, Range(ordered[-1][1].start, piece.stop))
        else:
            ordered.append((step, piece))
    return (*plan.resident, *(piece for _, piece in sorted(ordered)))


def _first_reads(plan: Decisions, edges: Sequence[int], trace: Trace) -> dict[int, int]:
    first: dict[int, int] = {}
    for k, step in enumerate(trace.steps):
        for s in step.reads:
            start = plan.arena.layout[s]
            if start >= 0 and s not in plan.outside:
                low, high = _touched(plan.arena, start, start + plan.sizes[s])
                for cell in range(max(0, bisect_left(edges, low + 1) - 1), bisect_left(edges, high)):
                    first.setdefault(cell, k)
    return first


def _touched(arena: Arena, start: int, stop: int) -> tuple[int, int]:
    """The granules that a range touches, in a paged arena; the range itself in a contiguous one."""
    if arena.kind == "contiguous":
        return start, stop
    return start // arena.granule * arena.granule, -(-stop // arena.granule) * arena.granule

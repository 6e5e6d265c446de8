"""What pictures of a plan are drawn from: copies, stays and times, worked out from the plan alone.

A *copy* here is a run of neighbouring transfers for one step that follow each other without a pause; a
*stay* is a range of one storage on the device, from its copy to the step at whose end it leaves.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schedule.clock.event_graph import PassTimes, simulate
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Range, Schedule
from penstock.schedule.space.spans import merged

_MOST_PASSES = 64
_MOST_EVENTS = 400_000
"""Events, at most, that are simulated to see the steady state; it is seldom more than three passes away."""


@dataclass(frozen=True)
class Copy:
    """Transfers `first` to `last` (exclusive) as one range of the layout; the rest as in Transfer."""

    range: Range
    step: int
    after: int
    link: int
    first: int
    last: int


@dataclass(frozen=True)
class Stay:
    """A range of storage `storage` that copy number `copy` brings; it leaves when step `until` ends.

    `until` counts from the start of the copy's pass, so that a step of the next pass is n or more.
    """

    storage: int
    range: Range
    copy: int
    until: int


@dataclass(frozen=True)
class View:
    """Consecutive passes, of which number `focus` is looked at, and when the one after them begins."""

    passes: tuple[PassTimes, ...]
    focus: int
    end: int

    @property
    def begins(self) -> tuple[int, ...]:
        """The starts of the passes, and the start of the one after."""
        return (*(one.call_start for one in self.passes), self.end)

    @property
    def period_ns(self) -> int:
        """Nanoseconds from the start of the pass looked at to that of the next."""
        return self.begins[self.focus + 1] - self.begins[self.focus]


@dataclass(frozen=True)
class Views:
    """The first pass after a cold start, and a steady one, each with its neighbours."""

    first: View
    steady: View

    @property
    def passes(self) -> tuple[PassTimes, ...]:
        return self.first.passes + self.steady.passes


def views_of(plan: Decisions, which: int) -> Views:
    """Simulates schedule number `which` until a pass takes what is predicted, or long enough."""
    trace, schedule = plan.traces[which], plan.schedules[which]
    events = len(trace.steps) + len(schedule.transfers) + 1
    count = 4
    while True:
        passes = simulate(trace, schedule, plan.hardware, plan.wrap, count + 1)
        taken = passes[-2].call_start - passes[-3].call_start
        settled = abs(taken - schedule.predicted_ns) <= 1
        if settled or 2 * count > _MOST_PASSES or 2 * count * events > _MOST_EVENTS:
            break
        count *= 2
    first = View(passes[:2], 0, passes[2].call_start)
    return Views(first, View(passes[-4:-1], 1, passes[-1].call_start))


def copies_of(plan: Decisions, schedule: Schedule, passes: Sequence[PassTimes]) -> tuple[Copy, ...]:
    """The transfers in issue order, those joined that are one copy in all of `passes`."""
    breaks = set(plan.arena.layout) if plan.arena.kind == "contiguous" else set()
    breaks |= {segment.start for segment in plan.arena.segments}
    found: list[Copy] = []
    for i, t in enumerate(schedule.transfers):
        before = found[-1] if found else None
        if (
            before is not None
            and (before.range.stop, before.step, before.link) == (t.start, t.step, t.link)
            and t.start not in breaks
            and all(one.transfers[i - 1][1] == one.transfers[i][0] for one in passes)
        ):
            joined = Range(before.range.start, t.stop)
            found[-1] = Copy(joined, t.step, before.after, t.link, before.first, i + 1)
        else:
            found.append(Copy(Range(t.start, t.stop), t.step, t.after, t.link, i, i + 1))
    return tuple(found)


def stays_of(plan: Decisions, which: int, copies: Sequence[Copy]) -> tuple[Stay, ...]:
    """Where every byte of every copy ends: cut where a storage begins or the drops differ."""
    steps, drops = len(plan.traces[which].steps), plan.schedules[which].drops
    starts = _starts(plan)
    changes: dict[int, list[tuple[int, int, int]]] = {offset: [] for offset, _ in starts}
    for c, copy in enumerate(copies):
        changes.setdefault(copy.range.start, []).append((0, 1, c))
        changes.setdefault(copy.range.stop, []).append((0, -1, c))
    for drop in drops:
        changes.setdefault(drop.start, []).append((1, 1, drop.step))
        changes.setdefault(drop.stop, []).append((1, -1, drop.step))
    open_copies: dict[int, int] = {}
    open_drops: dict[int, int] = {}
    edges = sorted(changes)
    found: list[Stay] = []
    for start, stop in itertools.pairwise(edges):
        for kind, change, value in changes[start]:
            counts = open_drops if kind else open_copies
            counts[value] = counts.get(value, 0) + change
            if not counts[value]:
                del counts[value]
        if open_copies:
            storage = _storage_at(starts, start)
            found += (
                Stay(storage, Range(start, stop), c, _leaves(copies[c].step, open_drops, steps))
                for c in open_copies
            )
    return tuple(_joined(found))


def names_of(plan: Decisions, names: Sequence[str] | None = None) -> Sequence[str]:
    """A name for every storage: `names`, those of the plan, or numbers. PlanError for another count."""
    count = len(plan.arena.layout)
    chosen = names if names is not None else plan.names or [f"storage {s}" for s in range(count)]
    if len(chosen) != count:
        raise PlanError(f"expected a name for each of {count} storages, got {len(chosen)}")
    return chosen


def copied_by(plan: Decisions, which: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What every transfer of method number `which` brings, for which step, and the step that it waits for."""
    places = sorted((place, names[s]) for s, place in enumerate(storage_ranges(plan)) if place)
    stops = [place.stop for place, _ in places]
    steps = plan.traces[which].steps
    for t in plan.schedules[which].transfers:
        touched = itertools.takewhile(
            lambda one, stop=t.stop: one[0].start < stop,  # type: ignore[misc]
            itertools.islice(places, bisect_right(stops, t.start), None),
        )
        yield {
            "weights": [name for _, name in touched],
            "bytes": t.stop - t.start,
            "layout": [t.start, t.stop],
            "for": steps[t.step].name,
            "after": steps[t.after].name,
        }


def resident_of(plan: Decisions) -> tuple[tuple[int, Range], ...]:
    """What never leaves, as (storage, range), cut where storages begin."""
    starts = _starts(plan)
    offsets = [offset for offset, _ in starts]
    found = []
    for one in merged(plan.resident):
        cuts = offsets[bisect_right(offsets, one.start) : bisect_right(offsets, one.stop - 1)]
        edges = [one.start, *cuts, one.stop]
        pieces = (Range(a, b) for a, b in itertools.pairwise(edges))
        found += [(_storage_at(starts, piece.start), piece) for piece in pieces]
    return tuple(found)


def storage_ranges(plan: Decisions) -> tuple[Range | None, ...]:
    """The layout range of every storage; None for one that is never in the arena.

    A plan without `sizes` leaves room for doubt: a storage then ends where the next begins, or where
    nothing is copied or kept any more.
    """
    layout = plan.arena.layout
    if plan.sizes:
        ends = [offset + size for offset, size in zip(layout, plan.sizes, strict=True)]
    else:
        ends = _guessed_ends(plan)
    return tuple(
        Range(start, stop) if 0 <= start < stop else None for start, stop in zip(layout, ends, strict=True)
    )


def _guessed_ends(plan: Decisions) -> list[int]:
    edges = sorted({offset for offset in plan.arena.layout if offset >= 0} | {_end(plan)})
    touched = list(plan.resident) + [Range(t.start, t.stop) for s in plan.schedules for t in s.transfers]
    used = merged(touched)
    starts = [one.start for one in used]
    ends = []
    for offset in plan.arena.layout:
        end = edges[bisect_right(edges, offset)] if 0 <= offset < edges[-1] else offset
        at = bisect_right(starts, max(offset, end - 1)) - 1
        if at >= 0 and offset < used[at].stop < end:
            end = used[at].stop
        ends.append(end)
    return ends


def _end(plan: Decisions) -> int:
    return max((segment.stop for segment in plan.arena.segments), default=0)


def _starts(plan: Decisions) -> list[tuple[int, int]]:
    """(layout offset, storage) of everything in the layout, ascending."""
    return sorted((offset, s) for s, offset in enumerate(plan.arena.layout) if offset >= 0)


def _storage_at(starts: Sequence[tuple[int, int]], offset: int) -> int:
    """The storage whose bytes, or the padding behind them, lie at `offset`; the first before the first."""
    return starts[max(0, bisect_left(starts, (offset + 1, -1)) - 1)][1]


def _leaves(step: int, drops: dict[int, int], steps: int) -> int:
    """The first of the drops at or after `step`, of this pass or the next."""
    return min((drop if drop >= step else drop + steps for drop in drops), default=step + steps)


def _joined(stays: Sequence[Stay]) -> list[Stay]:
    """Neighbours with the same storage, copy and end become one."""
    found: list[Stay] = []
    for stay in sorted(stays, key=lambda one: (one.copy, one.range.start)):
        before = found[-1] if found else None
        if (
            before is not None
            and (before.storage, before.copy, before.until) == (stay.storage, stay.copy, stay.until)
            and before.range.stop == stay.range.start
        ):
            found[-1] = Stay(stay.storage, Range(before.range.start, stay.range.stop), stay.copy, stay.until)
        else:
            found.append(stay)
    return found

"""The copies, stays and times that pictures of a plan are drawn from, worked out from the plan alone.

A *copy* here is a run of neighbouring transfers for one step that follow each other without a pause. A
*stay* is a range of one storage on the device, from its copy, or from the step that writes it, to the step at
whose end it leaves.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.schedule.clock.event_graph import PassTimes, simulate
from penstock.schedule.clock.launches import launched_steps
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Range, Schedule
from penstock.schedule.space.spans import merged

_MOST_PASSES = 64
_MOST_EVENTS = 400_000
"""The most passes and events that are simulated until passes are steady, usually after three passes."""


@dataclass(frozen=True)
class Copy:
    """Transfers `first` to `last` (the latter excluded) as one range; other fields are as in Transfer.

    `out` is its direction: from the arena, and not into it.
    """

    range: Range
    step: int
    after: int
    link: int
    first: int
    last: int
    out: bool = False


@dataclass(frozen=True)
class Stay:
    """A range of storage `storage` that copy number `copy` brings, and that leaves when step `until` ends.

    If no copy brings it, `copy` is None, and step `step` writes it. `until` counts from the start of the pass
    that the copy is for; a step of the next pass is n or more, where a pass has n steps.
    """

    storage: int
    range: Range
    copy: int | None
    step: int
    until: int


@dataclass(frozen=True)
class View:
    """Consecutive passes, of which number `focus` is in focus. The pass after them begins at `end` (ns)."""

    passes: tuple[PassTimes, ...]
    focus: int
    end: int

    @property
    def now(self) -> PassTimes:
        """The times of the pass in focus."""
        return self.passes[self.focus]

    @property
    def begins(self) -> tuple[int, ...]:
        """The starts of the passes, and the start of the pass after them."""
        return (*(one.call_start for one in self.passes), self.end)

    @property
    def period_ns(self) -> int:
        """Nanoseconds from the start of the pass in focus to the start of the next one."""
        return self.begins[self.focus + 1] - self.begins[self.focus]


@dataclass(frozen=True)
class Views:
    """The first pass after a cold start, and a steady pass, each with its neighbours."""

    first: View
    steady: View

    @property
    def passes(self) -> tuple[PassTimes, ...]:
        """The passes of both views."""
        return self.first.passes + self.steady.passes


def views_of(plan: Decisions, which: int) -> Views:
    """Simulates schedule number `which` until a pass takes the predicted time, or up to a limit of passes."""
    trace, schedule = plan.traces[which], plan.schedules[which]
    launched = launched_steps(plan, which)
    events = len(trace.steps) + len(schedule.transfers) + 1
    count = 4
    while True:
        passes = simulate(trace, schedule, plan.hardware, plan.wrap, count + 1, launched=launched)
        taken = passes[-2].call_start - passes[-3].call_start
        settled = abs(taken - schedule.predicted_ns) <= 1
        if settled or 2 * count > _MOST_PASSES or 2 * count * events > _MOST_EVENTS:
            break
        count *= 2
    first = View(passes[:2], 0, passes[2].call_start)
    return Views(first, View(passes[-4:-1], 1, passes[-1].call_start))


def copies_of(plan: Decisions, schedule: Schedule, passes: Sequence[PassTimes] = ()) -> tuple[Copy, ...]:
    """Returns the transfers in issue order; neighbours without a pause between them in `passes` are one copy.

    Without `passes`, every transfer is a copy.
    """
    breaks = set(plan.arena.layout) if plan.arena.kind == "contiguous" else set()
    breaks |= {segment.start for segment in plan.arena.segments}
    found: list[Copy] = []
    for i, t in enumerate(schedule.transfers):
        before = found[-1] if found else None
        if (
            before is not None
            and passes
            and (before.range.stop, before.step, before.link) == (t.start, t.step, t.link)
            and before.out == (t.direction == "out")
            and t.start not in breaks
            and all(one.transfers[i - 1][1] == one.transfers[i][0] for one in passes)
        ):
            joined = Range(before.range.start, t.stop)
            found[-1] = replace(before, range=joined, last=i + 1)
        else:
            way = t.direction == "out"
            found.append(Copy(Range(t.start, t.stop), t.step, t.after, t.link, i, i + 1, way))
    return tuple(found)


def stays_of(plan: Decisions, which: int, copies: Sequence[Copy]) -> tuple[Stay, ...]:
    """Returns the stays of what is copied in or written, cut where storages begin and where drops differ."""
    places = storage_ranges(plan)
    arriving: list[tuple[Range, int | None, int]]
    arriving = [(copy.range, c, copy.step) for c, copy in enumerate(copies) if not copy.out]
    for k, writes in enumerate(step.writes for step in plan.traces[which].steps):
        inside = [(places[s], None, k) for s in writes if s not in plan.outside]
        arriving += [(place, c, step) for place, c, step in inside if place is not None]
    steps, drops = len(plan.traces[which].steps), plan.schedules[which].drops
    edges = sorted({edge for drop in drops for edge in (drop.start, drop.stop)})
    dropped: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for drop in drops:
        for i in range(bisect_left(edges, drop.start), bisect_left(edges, drop.stop)):
            dropped[i + 1].append(drop.step)
    found: list[Stay] = []
    for number, storage, piece in cut_of(plan, [one for one, _, _ in arriving]):
        _, c, step = arriving[number]
        low, high = bisect_right(edges, piece.start), bisect_left(edges, piece.stop)
        cuts = (piece.start, *edges[low:high], piece.stop)
        for i, (start, stop) in enumerate(itertools.pairwise(cuts), low):
            # The first drop at or after the step counts, in this pass or the next one.
            until = min((one + steps * (one < step) for one in dropped[i]), default=step + steps)
            before = found[-1] if found else None
            if before and replace(before, range=piece) == Stay(storage, piece, c, step, until):
                found[-1] = replace(before, range=Range(before.range.start, stop))
            else:
                found.append(Stay(storage, Range(start, stop), c, step, until))
    return tuple(found)


def names_of(plan: Decisions, names: Sequence[str] | None = None) -> Sequence[str]:
    """Returns `names`, or else the names in the plan, or else numbers.

    Raises PlanError unless there is a name for every storage.
    """
    count = len(plan.arena.layout)
    chosen = names if names is not None else plan.names or [f"storage {s}" for s in range(count)]
    if len(chosen) != count:
        raise PlanError(f"expected a name for each of {count} storages, got {len(chosen)}")
    return chosen


def title_of(weights: Sequence[str]) -> str:
    """The names of the first two weights, and the number of the others."""
    more = f" and {len(weights) - 2} more" if len(weights) > 2 else ""
    return (", ".join(weights[:2]) or "padding") + more


def weights_of(plan: Decisions, copies: Sequence[Copy]) -> list[list[int]]:
    """The storages of which each copy moves bytes, and not only the padding behind them."""
    places = storage_ranges(plan)
    found: list[list[int]] = [[] for _ in copies]
    for c, storage, piece in cut_of(plan, [copy.range for copy in copies]):
        if overlap(places[storage], piece):
            found[c].append(storage)
    return found


def copied_by(plan: Decisions, which: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the weights, bytes and direction of every transfer, its step and the step that it waits for."""
    steps, copies = plan.traces[which].steps, copies_of(plan, plan.schedules[which])
    for copy, weights in zip(copies, weights_of(plan, copies), strict=True):
        yield {
            "weights": [names[s] for s in weights],
            "bytes": copy.range.nbytes,
            "direction": "out" if copy.out else "in",
            "layout": [copy.range.start, copy.range.stop],
            "for": steps[copy.step].name,
            "after": steps[copy.after].name,
        }


def resident_of(plan: Decisions) -> tuple[tuple[int, Range], ...]:
    """The ranges that never leave the arena, cut where storages begin, each with its storage."""
    return tuple((storage, piece) for _, storage, piece in cut_of(plan, merged(plan.resident)))


def resident_bytes(plan: Decisions) -> list[int]:
    """Bytes of each storage that never leave the arena."""
    places = storage_ranges(plan)
    held = [0] * len(places)
    for s, piece in resident_of(plan):
        held[s] += overlap(places[s], piece)
    return held


def storage_ranges(plan: Decisions) -> tuple[Range | None, ...]:
    """The layout range of every storage, or None for a storage that is never in the arena.

    In a plan without `sizes`, a storage is taken to reach up to the next storage or the end of its segment.
    """
    layout = plan.arena.layout
    edges = sorted({*layout, *(segment.stop for segment in plan.arena.segments)})
    sizes = plan.sizes or [edges[bisect_right(edges, start) % len(edges)] - start for start in layout]
    places = zip(layout, sizes, strict=True)
    return tuple(Range(start, start + size) if start >= 0 and size > 0 else None for start, size in places)


def overlap(place: Range | None, piece: Range) -> int:
    """Bytes that two ranges share."""
    return max(0, min(place.stop, piece.stop) - max(place.start, piece.start)) if place else 0


def cut_of(plan: Decisions, ranges: Iterable[Range]) -> Iterator[tuple[int, int, Range]]:
    """Cuts ranges where storages begin, and yields each range's number, a storage and its piece.

    Padding belongs to the storage before it.
    """
    starts = sorted((offset, s) for s, offset in enumerate(plan.arena.layout) if offset >= 0)
    offsets = [offset for offset, _ in starts]
    for number, one in enumerate(ranges):
        first = max(0, bisect_right(offsets, one.start) - 1)
        edges = [one.start, *offsets[first + 1 : bisect_left(offsets, one.stop)], one.stop]
        for at, (start, stop) in enumerate(itertools.pairwise(edges), first):
            yield number, starts[at][1], Range(start, stop)

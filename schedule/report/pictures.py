"""What the report shows of a plan: its passes, its memory and its reads, as pictures."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.schedule.clock.event_graph import PassTimes, launched_steps, simulate
from penstock.schedule.facts.model import Decisions, Range, Schedule, Trace
from penstock.schedule.space.spans import merged

_MOST_PASSES = 64
_MOST_EVENTS = 400_000
"""The most passes and events that are simulated until passes are steady, usually after three passes."""


@dataclass(frozen=True)
class Copy:
    """Transfers `first` to `last` (excluded) as one range, `out` of the arena or into it; see Transfer."""

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
        return (*(simulated.call_start for simulated in self.passes), self.end)

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


def views_of(plan: Decisions, number: int) -> Views:
    """Simulates schedule `number` until a pass takes the predicted time, or up to a limit of passes."""
    trace, schedule = plan.traces[number], plan.schedules[number]
    launched = launched_steps(plan, number)
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
    """The transfers in issue order; with `passes`, neighbours without a pause between them are one copy."""
    breaks = set(plan.arena.layout) if plan.arena.kind == "contiguous" else set()
    breaks |= {segment.start for segment in plan.arena.segments}
    copies: list[Copy] = []
    for i, t in enumerate(schedule.transfers):
        before = copies[-1] if copies else None
        if (
            before is not None
            and passes
            and (before.range.stop, before.step, before.link) == (t.start, t.step, t.link)
            and before.out == (t.direction == "out")
            and t.start not in breaks
            and all(simulated.transfers[i - 1][1] == simulated.transfers[i][0] for simulated in passes)
        ):
            joined = Range(before.range.start, t.stop)
            copies[-1] = replace(before, range=joined, last=i + 1)
        else:
            way = t.direction == "out"
            copies.append(Copy(Range(t.start, t.stop), t.step, t.after, t.link, i, i + 1, way))
    return tuple(copies)


def stays_of(plan: Decisions, index: int, copies: Sequence[Copy]) -> tuple[Stay, ...]:
    """Returns the stays of what is copied in or written, cut where storages begin and where drops differ."""
    places = storage_ranges(plan)
    arriving: list[tuple[Range, int | None, int]]
    arriving = [(copy.range, c, copy.step) for c, copy in enumerate(copies) if not copy.out]
    for k, writes in enumerate(step.writes for step in plan.traces[index].steps):
        inside = [(places[s], None, k) for s in writes if s not in plan.outside]
        arriving += [(place, c, step) for place, c, step in inside if place is not None]
    steps, drops = len(plan.traces[index].steps), plan.schedules[index].drops
    edges = sorted({edge for drop in drops for edge in (drop.start, drop.stop)})
    dropped: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for drop in drops:
        for i in range(bisect_left(edges, drop.start), bisect_left(edges, drop.stop)):
            dropped[i + 1].append(drop.step)
    stays: list[Stay] = []
    for number, storage, piece in cut_of(plan, [arrived for arrived, _, _ in arriving]):
        _, c, step = arriving[number]
        low, high = bisect_right(edges, piece.start), bisect_left(edges, piece.stop)
        cuts = (piece.start, *edges[low:high], piece.stop)
        for i, (start, stop) in enumerate(itertools.pairwise(cuts), low):
            # The first drop at or after the step counts, in this pass or the next one.
            until = min(
                (drop_step + steps * (drop_step < step) for drop_step in dropped[i]), default=step + steps
            )
            before = stays[-1] if stays else None
            if before and replace(before, range=piece) == Stay(storage, piece, c, step, until):
                stays[-1] = replace(before, range=Range(before.range.start, stop))
            else:
                stays.append(Stay(storage, Range(start, stop), c, step, until))
    return tuple(stays)


def names_of(plan: Decisions) -> Sequence[str]:
    """The names of storages in the plan, or numbers."""
    return plan.names or [f"storage {s}" for s in range(len(plan.arena.layout))]


def title_of(weights: Sequence[str]) -> str:
    """The names of the first two weights, and the number of the others."""
    more = f" and {len(weights) - 2} more" if len(weights) > 2 else ""
    return (", ".join(weights[:2]) or "padding") + more


def weights_of(plan: Decisions, copies: Sequence[Copy]) -> list[list[int]]:
    """The storages of which each copy moves bytes, and not only the padding behind them."""
    places = storage_ranges(plan)
    storages: list[list[int]] = [[] for _ in copies]
    for c, storage, piece in cut_of(plan, [copy.range for copy in copies]):
        if overlap(places[storage], piece):
            storages[c].append(storage)
    return storages


def copied_by(plan: Decisions, number: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the weights, bytes and direction of every transfer, its step and the step that it waits for."""
    steps, copies = plan.traces[number].steps, copies_of(plan, plan.schedules[number])
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
    bytes_of = [0] * len(places)
    for s, piece in resident_of(plan):
        bytes_of[s] += overlap(places[s], piece)
    return bytes_of


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
    """Cut ranges where storages begin; yield each range's number, storage (with its padding) and piece."""
    starts = sorted((offset, s) for s, offset in enumerate(plan.arena.layout) if offset >= 0)
    offsets = [offset for offset, _ in starts]
    for number, piece in enumerate(ranges):
        first = max(0, bisect_right(offsets, piece.start) - 1)
        edges = [piece.start, *offsets[first + 1 : bisect_left(offsets, piece.stop)], piece.stop]
        for at, (start, stop) in enumerate(itertools.pairwise(edges), first):
            yield number, starts[at][1], Range(start, stop)


@dataclass(frozen=True)
class Interval:
    """What compute or a link does from `start` to `end` (ns), in pass number `at` of a view.

    For compute, `kind` is the `lead` or the `read` of step number `of`, a `stall` before that read, or `hold`
    behind it: the wait for copies out. Behind the last step, where `of` is None, it is the `tail`, a `stall`
    for copies under way, or the `gap` to the next call. For a link, `kind` is `copy`, `out` for a copy out of
    the arena, or `disk` where the disk reads for a copy, and `of` is the copy's number.
    """

    kind: str
    start: int
    end: int
    of: int | None
    at: int

    @property
    def nanoseconds(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Box:
    """A range of a storage that arrives in the arena from `start` to `ready` and leaves at `end` (ns).

    What a step writes takes memory from the beginning of that step on, where `ready` is `start`.
    `until` is the step at whose end the range leaves, counted as in Stay, or None if it never leaves.
    """

    storage: int
    range: Range
    until: int | None
    start: int
    ready: int
    end: int


@dataclass(frozen=True)
class Picture:
    """Method number `which` of a plan, with the times, copies and stays that its pictures are drawn from."""

    plan: Decisions
    which: int
    views: Views
    copies: tuple[Copy, ...]
    stays: tuple[Stay, ...]

    @property
    def trace(self) -> Trace:
        return self.plan.traces[self.which]

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedules[self.which]


def picture_of(plan: Decisions, number: int) -> Picture:
    """The picture of method number `number` of a plan."""
    views = views_of(plan, number)
    copies = copies_of(plan, plan.schedules[number], views.passes)
    return Picture(plan, number, views, copies, stays_of(plan, number, copies))


def lanes_of(picture: Picture, view: View) -> dict[str, list[Interval]]:
    """The intervals of compute and of every link in all passes of a view, by lane, in order of time."""
    copies, lasts = picture.copies, [copy.last for copy in picture.copies]
    staged = [bisect_right(lasts, i) for i, nbytes in enumerate(picture.schedule.staged) if nbytes]
    links = sorted({copy.link for copy in copies} | ({1} if staged else set()))
    apart = picture.plan.hardware.duplex and any(copy.out for copy in copies)
    lanes: dict[str, list[Interval]] = {"compute": [], **{_lane(link): [] for link in links}}
    if apart:
        lanes[_OUT] = []
    for at, (times, following) in enumerate(zip(view.passes, view.begins[1:], strict=True)):
        lanes["compute"] += _compute(picture.trace, times, following, at)
        for c, copy in enumerate(copies):
            start, end = times.transfers[copy.first][0], times.transfers[copy.last - 1][1]
            lane = _OUT if apart and copy.out else _lane(copy.link)
            kind = "out" if copy.out else "disk" if copy.link % 2 else "copy"
            lanes[lane].append(Interval(kind, start, end, c, at))
        for c, (start, end) in zip(staged, times.stages, strict=True):
            lanes[_lane(1)].append(Interval("disk", start, end, c, at))
    return lanes


_OUT = "link out"
"""The lane of copies out of the arena, where the link carries both directions at once."""


def _lane(link: int) -> str:
    return {0: "link", 1: "disk"}.get(link, f"link {link}")


def _compute(trace: Trace, times: PassTimes, following: int, at: int) -> Iterator[Interval]:
    """The intervals of compute in one pass, without a hole, until the next call at `following`."""
    begin = times.call_start
    intervals: list[tuple[str, int, int, int | None]] = []
    for k, (step, (start, end)) in enumerate(zip(trace.steps, times.reads, strict=True)):
        ready = begin + step.lead_ns
        done = start + step.read_ns
        intervals += [("lead", begin, ready, k), ("stall", ready, start, k), ("read", start, done, k)]
        intervals.append(("hold", done, end, k))
        begin = end
    done, leaves = begin + trace.tail_ns, following - trace.gap_ns
    intervals += [("tail", begin, done, None), ("stall", done, leaves, None)]
    intervals.append(("gap", leaves, following, None))
    for kind, start, end, of in intervals:
        if start < end or kind == "read":
            yield Interval(kind, start, end, of, at)


def boxes_of(picture: Picture, view: View) -> list[Box]:
    """The boxes of a view: first the ranges that never leave, then those that copies bring or steps write.

    A box that is still in the arena when the view ends is cut off there.
    """
    n, begin = len(picture.trace.steps), view.begins[0]

    def leaves(at: int, until: int) -> int:
        """The time at which a range leaves that arrived for pass `at`."""
        at += until // n
        return view.passes[at].reads[until % n][1] if at < len(view.passes) else view.end

    boxes = [Box(s, piece, None, begin, begin, view.end) for s, piece in resident_of(picture.plan)]
    for stay in picture.stays:
        place = (stay.storage, stay.range, stay.until)
        if stay.until >= n:  # the pass before the view brought this range, which is there from the start
            boxes.append(Box(*place, begin, begin, leaves(0, stay.until - n)))
        for at, times in enumerate(view.passes):
            start = ready = times.reads[stay.step - 1][1] if stay.step else times.call_start
            if stay.copy is not None:
                start, ready = _moving(picture.copies[stay.copy], stay.range, times)
            boxes.append(Box(*place, start, ready, leaves(at, stay.until)))
    return boxes


def leaving_of(picture: Picture, view: View) -> list[tuple[int, Box]]:
    """What is copied out of the arena in a view, while it is: the number of the copy, and a box."""
    places, leaving = storage_ranges(picture.plan), []
    numbers = [c for c, copy in enumerate(picture.copies) if copy.out]
    for number, s, piece in cut_of(picture.plan, [picture.copies[c].range for c in numbers]):
        copy = picture.copies[numbers[number]]
        for times in view.passes if overlap(places[s], piece) else ():
            start, end = _moving(copy, piece, times)
            leaving.append((numbers[number], Box(s, piece, copy.step, start, start, end)))
    return leaving


def _moving(copy: Copy, piece: Range, times: PassTimes) -> tuple[int, int]:
    """When the first and the last byte of a piece of a copy move (ns)."""
    first, last = times.transfers[copy.first][0], times.transfers[copy.last - 1][1]
    start, end = (
        first + (last - first) * (offset - copy.range.start) // copy.range.nbytes
        for offset in (piece.start, piece.stop)
    )
    return start, end


def held_of(view: View, boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Bytes in the arena during a view: the corners (ns, bytes) of a line that rises while copies arrive."""
    changes = {limit: (0, 0.0) for limit in (view.begins[0], view.end)}

    def change(time: int, nbytes: int, rate: float) -> None:
        jump, slope = changes.get(time, (0, 0.0))
        changes[time] = (jump + nbytes, slope + rate)

    for box in boxes:
        nbytes, taken = box.range.nbytes, box.ready - box.start
        change(box.start, 0 if taken else nbytes, nbytes / taken if taken else 0.0)
        change(box.ready, 0, -nbytes / taken if taken else 0.0)
        change(box.end, -nbytes if box.end < view.end else 0, 0.0)
    at, rate, level = min(changes), 0.0, 0.0
    corners = []
    for time, (jump, slope) in sorted(changes.items()):
        level, at = level + rate * (time - at), time
        if view.begins[0] <= time <= view.end:
            corners += [(time, round(level)), (time, round(level + jump))]
        level, rate = level + jump, rate + slope
    return corners

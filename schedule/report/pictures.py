"""The pictures of one method of a plan: what compute and links do over time, and what lies in the arena.

An *interval* is a time in which compute or a link does one thing. A *box* is a range of a storage, together
with the time in which it is in the arena.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.clock.event_graph import PassTimes
from penstock.schedule.facts.model import Decisions, Range, Schedule, Trace
from penstock.schedule.report.views import (
    Copy,
    Stay,
    View,
    Views,
    copies_of,
    cut_of,
    overlap,
    resident_of,
    stays_of,
    storage_ranges,
    views_of,
)


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


def picture_of(plan: Decisions, which: int) -> Picture:
    """The picture of method number `which` of a plan."""
    views = views_of(plan, which)
    copies = copies_of(plan, plan.schedules[which], views.passes)
    return Picture(plan, which, views, copies, stays_of(plan, which, copies))


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
    found: list[tuple[str, int, int, int | None]] = []
    for k, (step, (start, end)) in enumerate(zip(trace.steps, times.reads, strict=True)):
        ready = begin + step.lead_ns
        done = start + step.read_ns
        found += [("lead", begin, ready, k), ("stall", ready, start, k), ("read", start, done, k)]
        found.append(("hold", done, end, k))
        begin = end
    done, leaves = begin + trace.tail_ns, following - trace.gap_ns
    found += [("tail", begin, done, None), ("stall", done, leaves, None), ("gap", leaves, following, None)]
    return (Interval(*one, at) for one in found if one[1] < one[2] or one[0] == "read")


def boxes_of(picture: Picture, view: View) -> list[Box]:
    """The boxes of a view: first the ranges that never leave, then those that copies bring or steps write.

    A box that is still in the arena when the view ends is cut off there.
    """
    n, begin = len(picture.trace.steps), view.begins[0]

    def leaves(at: int, until: int) -> int:
        """The time at which a range leaves that arrived for pass `at`."""
        at += until // n
        return view.passes[at].reads[until % n][1] if at < len(view.passes) else view.end

    found = [Box(s, piece, None, begin, begin, view.end) for s, piece in resident_of(picture.plan)]
    for stay in picture.stays:
        what = (stay.storage, stay.range, stay.until)
        if stay.until >= n:  # the pass before the view brought this range, which is there from the start
            found.append(Box(*what, begin, begin, leaves(0, stay.until - n)))
        for at, times in enumerate(view.passes):
            start = ready = times.reads[stay.step - 1][1] if stay.step else times.call_start
            if stay.copy is not None:
                start, ready = _moving(picture.copies[stay.copy], stay.range, times)
            found.append(Box(*what, start, ready, leaves(at, stay.until)))
    return found


def leaving_of(picture: Picture, view: View) -> list[tuple[int, Box]]:
    """What is copied out of the arena in a view, while it is: the number of the copy, and a box."""
    places, found = storage_ranges(picture.plan), []
    numbers = [c for c, copy in enumerate(picture.copies) if copy.out]
    for number, s, piece in cut_of(picture.plan, [picture.copies[c].range for c in numbers]):
        copy = picture.copies[numbers[number]]
        for times in view.passes if overlap(places[s], piece) else ():
            start, end = _moving(copy, piece, times)
            found.append((numbers[number], Box(s, piece, copy.step, start, start, end)))
    return found


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
    at, rate, held = min(changes), 0.0, 0.0
    corners = []
    for time, (jump, slope) in sorted(changes.items()):
        held, at = held + rate * (time - at), time
        if view.begins[0] <= time <= view.end:
            corners += [(time, round(held)), (time, round(held + jump))]
        held, rate = held + jump, rate + slope
    return corners

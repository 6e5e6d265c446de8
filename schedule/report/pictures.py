"""What happens when, in one method of a plan: what compute and links do, and what lies in the arena.

An *interval* is what compute or a link does for a while; a *box* is a stay in one pass, with its times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.clock.event_graph import PassTimes
from penstock.schedule.facts.model import Decisions, Schedule, Trace
from penstock.schedule.report.views import Copy, Stay, View, Views, copies_of, stays_of, views_of


@dataclass(frozen=True)
class Interval:
    """What compute or a link does from `start` to `end` (ns).

    Compute: the `lead` or the `read` of step number `of`, a `stall` before that read, or behind the last
    step (`of` is None) the `tail`, a `stall` for copies under way, and the `gap` to the next call. A link:
    `copy` number `of`, or what the `disk` reads for it.
    """

    kind: str
    start: int
    end: int
    of: int | None


@dataclass(frozen=True)
class Box:
    """Stay number `stay` in one pass: its bytes arrive from `start` to `ready` and leave at `end` (ns)."""

    stay: int
    start: int
    ready: int
    end: int


@dataclass(frozen=True)
class Picture:
    """Method number `which` of a plan as it is drawn."""

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
    views = views_of(plan, which)
    copies = copies_of(plan, plan.schedules[which], views.passes)
    return Picture(plan, which, views, copies, stays_of(plan, which, copies))


def intervals_of(trace: Trace, times: PassTimes, following: int) -> list[Interval]:
    """Compute in one pass, without a hole, until the next call at `following`."""
    at = times.call_start
    found: list[tuple[str, int, int, int | None]] = []
    for k, (step, (start, end)) in enumerate(zip(trace.steps, times.reads, strict=True)):
        ready = at + step.lead_ns
        found += [("lead", at, ready, k), ("stall", ready, start, k), ("read", start, end, k)]
        at = end
    done, leaves = at + trace.tail_ns, following - trace.gap_ns
    found += [("tail", at, done, None), ("stall", done, leaves, None), ("gap", leaves, following, None)]
    return [Interval(*one) for one in found if one[1] < one[2] or one[0] == "read"]


def lanes_of(picture: Picture, view: View) -> dict[str, list[Interval]]:
    """What compute and every link do in all passes of a view, in the order of time."""
    copies, lasts = picture.copies, [copy.last for copy in picture.copies]
    staged = [bisect_right(lasts, i) for i, nbytes in enumerate(picture.schedule.staged) if nbytes]
    lanes: dict[str, list[Interval]] = {"compute": []}
    links = sorted({copy.link for copy in copies} | ({1} if staged else set()))
    lanes |= {lane_name(link): [] for link in links}
    for times, following in zip(view.passes, view.begins[1:], strict=True):
        lanes["compute"] += intervals_of(picture.trace, times, following)
        for c, copy in enumerate(copies):
            start, end = times.transfers[copy.first][0], times.transfers[copy.last - 1][1]
            lanes[lane_name(copy.link)].append(Interval("disk" if copy.link % 2 else "copy", start, end, c))
        for c, (start, end) in zip(staged, times.stages, strict=True):
            lanes[lane_name(1)].append(Interval("disk", start, end, c))
    return lanes


def lane_name(link: int) -> str:
    """What a link is called in pictures."""
    return {0: "link", 1: "disk"}.get(link, f"link {link}")


def waits_of(trace: Trace, view: View) -> int:
    """Nanoseconds that compute waits for copies in the pass that is looked at."""
    intervals = intervals_of(trace, view.passes[view.focus], view.begins[view.focus + 1])
    return sum(one.end - one.start for one in intervals if one.kind == "stall")


def boxes_of(picture: Picture, view: View) -> list[Box]:
    """The stays of all passes of a view; one that ends behind the view ends with it."""
    n = len(picture.trace.steps)

    def leaves(at: int, until: int) -> int:
        at += until // n
        return view.passes[at].reads[until % n][1] if at < len(view.passes) else view.end

    found = []
    for s, stay in enumerate(picture.stays):
        copy = picture.copies[stay.copy]
        # What the pass before the first one brought is there from the start.
        if stay.until >= n:
            found.append(Box(s, view.begins[0], view.begins[0], leaves(0, stay.until - n)))
        for at, times in enumerate(view.passes):
            begin, end = times.transfers[copy.first][0], times.transfers[copy.last - 1][1]
            start, ready = (
                begin + (end - begin) * (offset - copy.range.start) // copy.range.nbytes
                for offset in (stay.range.start, stay.range.stop)
            )
            found.append(Box(s, start, ready, leaves(at, stay.until)))
    return found


def held_of(picture: Picture, view: View, boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Bytes in the arena during a view, as the corners (ns, bytes) of a line; copies count as they arrive."""
    limits = view.begins[0], view.end
    changes = {limit: (0, 0.0) for limit in limits}

    def change(time: int, nbytes: int, rate: float) -> None:
        jump, slope = changes.get(time, (0, 0.0))
        changes[time] = (jump + nbytes, slope + rate)

    for box in boxes:
        nbytes, taken = picture.stays[box.stay].range.nbytes, box.ready - box.start
        change(box.start, 0 if taken else nbytes, nbytes / taken if taken else 0.0)
        change(box.ready, 0, -nbytes / taken if taken else 0.0)
        change(box.end, -nbytes if box.end < view.end else 0, 0.0)
    at, rate, held = min(changes), 0.0, float(sum(one.nbytes for one in picture.plan.resident))
    corners = []
    for time, (jump, slope) in sorted(changes.items()):
        held, at = held + rate * (time - at), time
        if limits[0] <= time <= limits[1]:
            corners += [(time, round(held)), (time, round(held + jump))]
        held, rate = held + jump, rate + slope
    return corners

"""What a plan does with every weight, and why, in words."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from penstock.schedule.facts.model import Decisions, Range
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.report.pictures import Picture, intervals_of
from penstock.schedule.report.views import resident_of, storage_ranges

Lives = Literal["resident", "in part", "streamed", "outside", "not read"]


@dataclass(frozen=True)
class Use:
    """Where a weight lives, the first step that reads it (-1 for none), its bytes copied a pass, and why.

    `where` says the same as `lives`, and how much of it stays.
    """

    lives: Lives
    where: str
    first: int
    streamed: int
    why: str


@dataclass(frozen=True)
class _Stream:
    """How the part of a weight that does not stay comes in the steady state."""

    share: float
    """The share of the weight that stays."""
    nbytes: int
    steps: frozenset[int]
    """Steps that something is copied for."""
    ahead: int | None
    """Steps between the start of the earliest copy and the step that reads it; None where none comes."""


def uses_of(picture: Picture) -> list[Use]:
    """What a method does with each storage."""
    plan, trace, view = picture.plan, picture.trace, picture.views.steady
    intervals = intervals_of(trace, view.passes[view.focus], view.begins[view.focus + 1])
    waits = {one.of: one.end - one.start for one in intervals if one.kind == "stall"}
    reads: list[list[int]] = [[] for _ in plan.arena.layout]
    for k, step in enumerate(trace.steps):
        for s in dict.fromkeys(step.reads):
            reads[s].append(k)
    found = []
    for s, (stream, place) in enumerate(zip(_streams(picture), storage_ranges(plan), strict=True)):
        times = len(reads[s])
        lives: Lives = "resident" if not stream.nbytes else "in part" if stream.share else "streamed"
        if s in plan.outside or not times:
            lives = "outside" if s in plan.outside else "not read"
        if s in plan.outside and place is None:
            why = "the program writes or returns it, so it never streams"
        elif not times:
            why = f"{trace.method} does not read it"
        elif s in plan.outside:
            why = f"{_times_read(times)}; all weights fit, so that nothing streams"
        else:
            wait = sum(waits.get(k, 0) for k in stream.steps.intersection(reads[s]))
            why = f"{_times_read(times)}; {_reason(stream, times, wait)}"
        where = f"{format_share(stream.share)} stays" if lives == "in part" else lives
        found.append(Use(lives, where, reads[s][0] if times else -1, stream.nbytes, why))
    return found


def resident_bytes(plan: Decisions) -> list[int]:
    """Bytes of each storage that never leave the arena."""
    places = storage_ranges(plan)
    held = [0] * len(places)
    for s, piece in resident_of(plan):
        held[s] += _overlap(places[s], piece)
    return held


def _streams(picture: Picture) -> list[_Stream]:
    places, view = storage_ranges(picture.plan), picture.views.steady
    focus = view.passes[view.focus]
    brought: list[dict[int, int]] = [{} for _ in places]
    for stay in picture.stays:
        if nbytes := _overlap(places[stay.storage], stay.range):
            before = brought[stay.storage].get(stay.copy, 0)
            brought[stay.storage][stay.copy] = before + nbytes
    ends = [end for one in (view.passes[0], focus) for _, end in one.reads]
    n, found = len(focus.reads), []
    for place, held, by_copy in zip(places, resident_bytes(picture.plan), brought, strict=True):
        mine = [picture.copies[c] for c in by_copy]
        ahead = [max(0, n + c.step - bisect_right(ends, focus.transfers[c.first][0])) for c in mine]
        steps = frozenset(c.step for c in mine)
        share = held / place.nbytes if place else 0.0
        found.append(_Stream(share, sum(by_copy.values()), steps, max(ahead, default=None)))
    return found


def _times_read(times: int) -> str:
    return "read once a pass" if times == 1 else f"read {times} times a pass"


def _reason(stream: _Stream, times: int, wait_ns: int) -> str:
    if stream.ahead is None:
        return "stays, so it is never copied"
    what = "copied whole" if stream.share == 0 else f"{format_share(stream.share)} stays, the rest is copied"
    again = "" if len(stream.steps) >= times else f" for {len(stream.steps)} of {times} reads,"
    when = {0: "when its step is reached", 1: "while the step before runs"}.get(
        stream.ahead, f"from {stream.ahead} steps ahead"
    )
    waits = f"its step waits {format_time(wait_ns)}" if wait_ns > 0 else "in time"
    return f"{what}{again} {when}; {waits}"


def format_share(share: float) -> str:
    """A share for people: `36 %`, and never none or all where it is not."""
    if 0 < share < 0.01:
        return "under 1 %"
    return "over 99 %" if 0.99 < share < 1 else f"{share * 100:.0f} %"


def _overlap(place: Range | None, piece: Range) -> int:
    return max(0, min(place.stop, piece.stop) - max(place.start, piece.start)) if place else 0

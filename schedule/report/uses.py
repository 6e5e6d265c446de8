"""The use that a plan makes of every weight, and the reason in words."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.schedule.clock.event_graph import stalls_of
from penstock.schedule.facts.model import SparseRead
from penstock.schedule.facts.sizes import format_size, format_time
from penstock.schedule.report.pictures import Picture
from penstock.schedule.report.views import overlap, resident_bytes, storage_ranges

Lives = Literal["resident", "in part", "streamed", "outside", "not read", "kept", "spilled", "by units"]


@dataclass(frozen=True)
class Use:
    """Where a weight is kept, the first step that reads it (-1 for none), its bytes copied a pass, and why.

    `where` says in words what `lives` says, and which share of the weight stays if only a part does. What a
    step writes is `kept` if it stays until it is read, and `spilled` if bytes of it are copied out and come
    back; its first step is the one that writes it. What is read `by units` alone has none of its own bytes in
    the arena, and what the pool brings of it depends on the calls.
    """

    lives: Lives
    where: str
    first: int
    streamed: int
    why: str


@dataclass(frozen=True)
class _Stream:
    """The copies of the part of a weight that does not stay, in the steady state.

    `nbytes` is the bytes that they bring in a pass.
    """

    share: float
    """The share of the weight that stays."""
    nbytes: int
    steps: frozenset[int]
    """The steps for which bytes of the weight are copied."""
    ahead: int | None
    """Steps between the start of the earliest copy and the step that reads it; None if there is no copy."""


def uses_of(picture: Picture) -> list[Use]:
    """The use that a method makes of each storage, by index."""
    plan, trace = picture.plan, picture.trace
    waits = stalls_of(trace, picture.views.steady.now)
    reads: list[list[int]] = [[] for _ in plan.arena.layout]
    written: dict[int, int] = {}
    for k, step in enumerate(trace.steps):
        written |= dict.fromkeys(step.writes, k)
        for s in dict.fromkeys(step.reads):
            reads[s].append(k)
    found = []
    for s, (stream, ks) in enumerate(zip(_streams(picture), reads, strict=True)):
        if s in written:
            found.append(_of_value(picture, s, written[s], stream, waits))
            continue
        lives: Lives = "resident" if not stream.nbytes else "in part" if stream.share else "streamed"
        if s in plan.outside or not ks:
            lives = "outside" if s in plan.outside else "not read"
        times = "read once a pass" if len(ks) == 1 else f"read {len(ks)} times a pass"
        if s in plan.outside and plan.arena.layout[s] < 0:
            why = "the program writes or returns it, so it never streams"
        elif not ks:
            why = f"{trace.method} does not read it"
        elif s in plan.outside:
            why = f"{times}; all weights fit, so that nothing streams"
        else:
            wait = sum(waits[k] for k in stream.steps.intersection(ks))
            why = f"{times}; {_reason(stream, len(ks), wait)}"
        where = f"{format_share(stream.share)} stays" if lives == "in part" else lives
        found.append(Use(lives, where, ks[0] if ks else -1, stream.nbytes, why))
    return [_with_units(picture, s, use) for s, use in enumerate(found)]


def _with_units(picture: Picture, s: int, use: Use) -> Use:
    """The use of a storage, with what steps read of it by units."""
    pool, steps = picture.plan.pool, enumerate(picture.trace.steps)
    read = [
        (k, one) for k, step in steps for one in step.sparse if one.storage == s and pool and pool.has(one)
    ]
    if not read:
        return use
    first, one = read[0]
    asked = f"a call asks for {max(one.asked for _, one in read)} of {one.count} units at most"
    by_units = f"by units in {picture.trace.steps[first].name}, from the pool: {asked}, {_of_each(one)}"
    if use.lives == "not read":
        return Use("by units", "by units", first, 0, f"read {by_units}")
    return replace(use, first=min(first, use.first), why=f"{use.why}; and {by_units}")


def _of_each(read: SparseRead) -> str:
    return f"{format_size(read.unit_nbytes)} each"


def _of_value(picture: Picture, s: int, written: int, stream: _Stream, waits: Sequence[int]) -> Use:
    """The use of a storage that a step writes."""
    plan, steps = picture.plan, picture.trace.steps
    last = max((k for k, step in enumerate(steps) if s in step.reads), default=written)
    why = f"written by {steps[written].name}, last read by {steps[last].name}; "
    if s in plan.outside:
        return Use("outside", "outside", written, 0, f"{why}it has memory for itself")
    place = storage_ranges(plan)[s]
    outs = [copy for copy in picture.copies if copy.out and overlap(place, copy.range)]
    if not outs:
        return Use("kept", "kept", written, 0, f"{why}it stays in between")
    nbytes = sum(overlap(place, copy.range) for copy in outs)
    left = f"{format_size(nbytes)} leave by the end of {steps[max(copy.step for copy in outs)].name}"
    wait = sum(waits[k] for k in stream.steps | {copy.step for copy in outs})
    late = f"steps wait {format_time(wait)}" if wait else "in time"
    moved = nbytes + stream.nbytes
    return Use("spilled", "spilled", written, moved, f"{why}{left}, and come back; {late}")


def _streams(picture: Picture) -> Iterator[_Stream]:
    """Yield the copies of each storage, by index."""
    places, view = storage_ranges(picture.plan), picture.views.steady
    brought: list[Counter[int]] = [Counter() for _ in places]
    for stay in picture.stays:
        nbytes = overlap(places[stay.storage], stay.range)
        if nbytes and stay.copy is not None:
            brought[stay.storage][stay.copy] += nbytes
    ends = [end for one in (view.passes[0], view.now) for _, end in one.reads]
    n = len(view.now.reads)
    for place, held, by_copy in zip(places, resident_bytes(picture.plan), brought, strict=True):
        copies = [picture.copies[c] for c in by_copy]
        ahead = [max(0, n + c.step - bisect_right(ends, view.now.transfers[c.first][0])) for c in copies]
        share = held / place.nbytes if place else 0.0
        steps = frozenset(c.step for c in copies)
        yield _Stream(share, by_copy.total(), steps, max(ahead, default=None))


def _reason(stream: _Stream, times: int, wait_ns: int) -> str:
    """How a weight that is read `times` times a pass is copied, and for how long its steps wait."""
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
    """A share for people: `36 %`. Only a share of exactly 0 or 1 is `0 %` or `100 %`."""
    if 0 < share < 0.01:
        return "under 1 %"
    return "over 99 %" if 0.99 < share < 1 else f"{share * 100:.0f} %"

"""The words on a plan's page: facts of the plan, notes on passes, and descriptions of copies and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.report.pictures import Box, Interval, Picture
from penstock.schedule.report.uses import Lives, format_share
from penstock.schedule.report.verdict import copying_ns, has_costly_pool, limit_of, near_best, units_of
from penstock.schedule.report.views import View, resident_bytes, storage_ranges, title_of, weights_of

Lines = list[tuple[str, str]]
"""Pairs of a name and a value; a value may have several lines."""

Said = dict[str, Any]
"""A description: its title, a name to show if there is room, the weights that it is about, and its lines."""

_MOST_LISTED = 4

LINES = {
    "plans by penstock": "a plan made for each budget",
    "this plan": "the one that this page is about",
    "best possible": "the least time that any plan can take within the plan's budget",
    "link and compute at best": "what copying what does not fit takes, or compute if that takes longer",
    "everything resident": "nothing streams",
    "on demand": "a step's weights are copied when it is reached, and dropped when it ends",
    "one block ahead": "while some steps run, the weights of the next ones are copied; none stay",
    "some of every group": "of every few steps some stream, two at a time, and the others stay",
    "least recently used": "what was read longest ago makes room for what a step needs",
    "rest on the host": "nothing streams: the host's processor computes the steps that do not fit",
}
"""What a line of the curve stands for, by its name."""

LIVES: dict[Lives, str] = {
    "resident": "stays in the arena, so it is never copied",
    "in part": "a part stays in the arena, the rest is copied in a pass",
    "streamed": "copied in a pass, and gone when its step has ended",
    "outside": "in ordinary memory beside the arena; never copied",
    "not read": "no step of this method reads it",
    "kept": "written by a step, and in memory until it is read",
    "spilled": "written by a step, copied out and brought back for the step that reads it",
    "by units": "single rows or experts come to the pool when a call asks for them",
}
"""What the column Where says of a weight."""


def cards_of(plan: Decisions) -> Iterator[tuple[str, str, str]]:
    """Yield the four facts at the top of the page, each as a title, a value, and a line of detail."""
    transfers = [t for schedule in plan.schedules for t in schedule.transfers]
    busy = copying_ns(plan) / max(1, plan.predicted_ns)
    limit, reason = {
        "compute": ("Compute", "copies hide behind it"),
        "link": ("The link", f"busy {format_share(busy)} of the time"),
        "disk": ("The disk", "the host does not hold all that streams"),
        "memory": ("Memory", "too little room to copy ahead"),
        "host": ("The calling thread", "it launches the steps that stream"),
        "units": ("Units", "calls wait for rows or experts"),
    }[limit_of(plan)]
    total = sum(plan.sizes)
    bound = "not found" if plan.lower_bound_ns is None else format_time(plan.lower_bound_ns)
    share = f"{format_share(plan.budget / total)} of {format_size(total)}" if total else "unknown sizes"
    title = "A pass of each method" if len(plan.traces) > 1 else "A pass"
    yield title, format_time(plan.predicted_ns), f"compute alone takes {format_time(plan.compute_ns)}"
    yield "Best possible", bound, f"this plan {near_best(plan, 'it')}"
    yield "What limits it", limit, reason if transfers or plan.pool else "nothing streams"
    values = " and kept values" if plan.produced else ""
    yield "Budget", format_budget(plan.budget), f"{share} of weights{values}"


def terms_of(plan: Decisions) -> Iterator[tuple[str, str]]:
    """Yield the terms that the page uses, each with its meaning and its value in this plan."""
    arena, hardware = plan.arena, plan.hardware
    methods = " or ".join(trace.method for trace in plan.traces) or "the program"
    moved, room = "nothing streams", "nothing needs it"
    if plan.streamed_bytes:
        moved = f"{format_size(plan.streamed_bytes)} stream in {_transfers(plan, 'in'):,} copies"
    if plan.arena_bytes:
        stays = format_size(sum(one.nbytes for one in plan.resident))
        room = f"{format_size(plan.arena_bytes)}, of which {stays} never leave"
    others = {*plan.outside} - plan.produced
    outside = _count(len(others), "weight")
    if plan.sizes and others:
        outside += f" ({format_size(sum(plan.sizes[s] for s in others))})"
    rate = f"{hardware.link_bytes_per_s / 1e9:.3g} GB/s on {hardware.name}"
    yield "Budget", "the memory that weights may take" + (" with kept values" if plan.produced else "")
    yield (
        "Best possible",
        "a lower bound of the time: what the link and compute take at least within the budget",
    )
    yield "Pass", f"one call of {methods}, which always reads its weights in the same order; {moved}"
    yield "Arena", f"the memory in which weights take turns: {room}; {outside} outside it"
    yield "Granule", f"the unit in which the arena is filled and emptied: {format_size(arena.granule)}"
    yield "Step", "a part of a pass that reads weights; before it, a pass may stall, that is wait for a copy"
    yield "Link", f"what brings weights to the arena: {rate}"
    yield "Rates", plan.confidence.text
    if plan.pool is not None:
        holds, waits = units_of(plan)
        cost = (
            f"a pass waits for what is not there: {waits}" if has_costly_pool(plan) else "its waits are short"
        )
        yield "Pool", f"{holds}, beside the arena; {cost}"
    if plan.produced:
        yield "Kept", _values(plan)


def _values(plan: Decisions) -> str:
    """What the forward keeps, what of it leaves in a pass, and at which rate."""
    rate = (plan.hardware.write_bytes_per_s or plan.hardware.link_bytes_per_s) / 1e9
    what = (
        _count(len(plan.produced), "value")
        + " that a forward keeps for its backward, in memory as weights are"
    )
    if plan.sizes:
        what += f": {format_size(sum(plan.sizes[s] for s in plan.produced))}"
    if not plan.written_bytes:
        return f"{what}; none leaves"
    beside = (
        "beside what comes in" if plan.hardware.duplex else "on the same link, in turn with what comes in"
    )
    moved = f"{format_size(plan.written_bytes)} leave in {_count(_transfers(plan, 'out'), 'transfer')}"
    return f"{what}; {moved} a pass, at {rate:.3g} GB/s, {beside}, and come back"


def _transfers(plan: Decisions, direction: str) -> int:
    return sum(t.direction == direction for schedule in plan.schedules for t in schedule.transfers)


def explained(meanings: Mapping[Any, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that have a meaning, in the order of `meanings`, each with it."""
    present = {*names}
    yield from ((name, meaning) for name, meaning in meanings.items() if name in present)


def note_of_curve(*, swept: bool, logarithmic: bool) -> str:
    """The note under the curve of time against budget: `swept` if a sweep was made for it."""
    note = "This plan, and other policies with the same memory, link and times."
    if swept:
        note += " Each dot of the line is a plan for that budget."
    return note + (" Times are on a logarithmic scale." if logarithmic else "")


def note_of_first(picture: Picture) -> str:
    """The note on the first pass after a cold start."""
    held = sum(one.nbytes for one in picture.plan.resident)
    held += sum(stay.range.nbytes for stay in picture.stays if stay.until >= len(picture.trace.steps))
    there = f" The {format_size(held)} that stay between passes are in memory when it begins." if held else ""
    return f"The first pass of {_called(picture)} takes {_time(picture, picture.views.first)}.{there}"


def note_of_steady(picture: Picture) -> str:
    """The note on a steady pass, which says what it copies for the next pass and keeps for it."""
    trace = picture.trace
    if not picture.copies:
        wrap = "Nothing is copied."
    elif any(copy.after < 0 for copy in picture.copies):
        wrap = "Its end copies for the beginning of the next, which stands back at the right."
        if picture.plan.wrap == "barrier":
            wrap = "What is on its way for the next pass joins at the end of a call."
    elif any(stay.until >= len(trace.steps) for stay in picture.stays):
        wrap = "The next begins with what it holds at its end."
    else:
        wrap = "Nothing is on its way when a call begins or ends."
    time = _time(picture, picture.views.steady)
    return f"One pass of many of {_called(picture)}, {trace.times} times: {time}. {wrap}"


def _called(picture: Picture) -> str:
    trace = picture.trace
    return f"{trace.method} at {trace.shape}" if trace.shape else trace.method


def _time(picture: Picture, view: View) -> str:
    waits = view.period_ns - picture.trace.compute_ns
    stall = f"compute waits {format_time(waits)} of it" if waits else "compute never waits"
    units = "; what a call waits for units is not drawn" if picture.plan.pool is not None else ""
    return f"{format_time(view.period_ns)}; {stall}{units}"


class Sayings:
    """Describes the intervals and boxes of one method; `names` has a name for every storage."""

    def __init__(self, picture: Picture, names: Sequence[str]) -> None:
        self._picture, self._steps, self._names = picture, picture.trace.steps, names
        self._sizes, self._resident = picture.plan.sizes, resident_bytes(picture.plan)
        self._places = storage_ranges(picture.plan)
        self._brought = weights_of(picture.plan, picture.copies)
        self._late: dict[int, set[int]] = {}
        for copy, weights in zip(picture.copies, self._brought, strict=True):
            if not copy.out:
                self._late.setdefault(copy.step, set()).update(weights)

    def of_interval(self, one: Interval) -> Said:
        """The description of an interval; reads and copies have a name that is shown in the picture."""
        if one.of is None:
            titles = {"tail": "Compute after the last step", "gap": "Between two calls", "stall": "Stall"}
            return _said(titles[one.kind], (), [("for", "copies under way")] if one.kind == "stall" else [])
        if one.kind in {"copy", "out", "disk"}:
            return self.of_copy(one.of)
        step = self._steps[one.of]
        if one.kind == "lead":
            return _said(f"Compute before {step.name}", (), [])
        if one.kind == "hold":
            leaving = zip(self._picture.copies, self._brought, strict=True)
            weights = [s for copy, some in leaving if copy.out and copy.step == one.of for s in some]
            lines = [("for", f"copies out of\n{self._listed(weights)}")]
            return _said(f"Stall at the end of {step.name}", weights, lines)
        if one.kind == "stall":
            weights = [s for s in step.reads if s in self._late.get(one.of, ())] or list(step.reads)
            return _said(f"Stall before {step.name}", weights, [("for", self._listed(weights))])
        lines = [("step", f"{one.of} (0 to {len(self._steps) - 1})")]
        for verb, some in (("reads", step.reads), ("writes", step.writes)):
            lines += [(verb, self._listed(some))] if some else []
        return _said(step.name, (*step.reads, *step.writes), lines, named=True)

    def of_copy(self, number: int) -> Said:
        """The description of a copy, named by what it moves."""
        weights = self._brought[number]
        title = title_of([self._names[s] for s in weights]) + " out" * self._picture.copies[number].out
        return _said(title, weights, self._copy(number), named=True)

    def of_box(self, box: Box) -> Said:
        """The description of a box."""
        place, n = self._places[box.storage], len(self._steps)
        whole = f" of {format_size(place.nbytes)}" if place else ""
        here = ("here", "always: it never leaves")
        if box.until is not None:
            after = "" if box.until < n else " in the pass after"
            here = ("leaves", f"when {self._steps[box.until % n].name} ends{after}")
        lines = [("bytes", format_size(box.range.nbytes) + whole), here]
        return _said(self._names[box.storage], [box.storage], lines)

    def _copy(self, number: int) -> Lines:
        """The lines on a copy: its bytes, its step, when it may start, and the weights that it brings."""
        copy, weights = self._picture.copies[number], self._brought[number]
        before = " of the pass before" if copy.after < 0 else ""
        moved = f"{format_size(copy.range.nbytes)} in {_count(copy.last - copy.first, 'transfer')}"
        lines = [
            ("copies out" if copy.out else "copies", moved),
            ("by the end of" if copy.out else "for step", f"{self._steps[copy.step].name} ({copy.step})"),
            ("may start", f"after {self._steps[copy.after].name} ({copy.after % len(self._steps)}){before}"),
        ]
        verb = "takes" if copy.out else "brings"
        return lines + ([(verb, self._listed(weights))] if len(weights) > 1 else [])

    def _listed(self, weights: Sequence[int]) -> str:
        """A line for each of the first weights, and a line that counts the others."""
        lines = []
        for s in weights[:_MOST_LISTED]:
            share = self._resident[s] / max(1, self._sizes[s]) if self._sizes else 0
            stays = "" if not share else ", stays" if share == 1 else f", {format_share(share)} stays"
            lines.append(self._names[s] + (f" ({format_size(self._sizes[s])}{stays})" if self._sizes else ""))
        more = len(weights) - _MOST_LISTED
        return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])])


def _said(title: str, weights: Sequence[int], lines: Lines, *, named: bool = False) -> Said:
    return {"title": title, "name": title * named, "weights": weights, "lines": lines}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

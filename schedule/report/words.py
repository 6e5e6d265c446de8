"""What is said of a plan beside its pictures: facts, notes to its passes, and what copies and steps are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_size, format_time
from penstock.schedule.report.pictures import Box, Interval, Picture
from penstock.schedule.report.uses import format_share
from penstock.schedule.report.views import View, resident_bytes, storage_ranges, title_of, weights_of
from penstock.schedule.report.whatif import limit_of, verdict

Lines = list[tuple[str, str]]
"""A name and a value each; a value may have several lines."""

Said = dict[str, Any]
"""A title, a name to show where there is room (or nothing), the weights that it is about, and lines."""

_MOST_LISTED = 4


def headline_of(plan: Decisions) -> str:
    """The plan in one line: what runs, how long it takes, and within which budget."""
    methods = " and ".join(trace.method for trace in plan.traces) or "Nothing to run"
    each = "for a pass of each" if len(plan.traces) > 1 else "a pass"
    return f"{methods}: {format_time(plan.predicted_ns)} {each} within {format_size(plan.budget)}"


def verdict_of(plan: Decisions, policies: Mapping[str, int]) -> str:
    """How far the plan is from the bound, and what `verdict` says of it."""
    predicted, bound = plan.predicted_ns, plan.lower_bound_ns
    if bound is None:
        sentence = "No bound was found in time, so it is not known how much faster a plan could be."
    elif predicted < bound * 1.00005:
        sentence = "No plan for this budget can be faster."
    else:
        sentence = (
            f"No plan for this budget can be more than {predicted * 100 / max(1, bound) - 100:.2g} % faster."
        )
    return " ".join([sentence, *verdict(plan, policies)])


def facts_of(plan: Decisions) -> Iterator[tuple[str, str, str]]:
    """What is known at a glance: title, value, and a line of detail."""
    hardware, predicted, bound = plan.hardware, plan.predicted_ns, plan.lower_bound_ns
    transfers = [t for schedule in plan.schedules for t in schedule.transfers]
    busy = sum(hardware.copy_ns(t.stop - t.start) for t in transfers) / max(1, predicted)
    limit, reason = {
        "compute": ("Compute", "copies hide behind it"),
        "link": ("The link", f"busy {format_share(busy)} of the time"),
        "disk": ("The disk", "the host does not hold all that streams"),
        "memory": ("Memory", "too little room to copy ahead"),
    }[limit_of(plan)]
    total = sum(plan.sizes)
    share = (
        f"{format_share(plan.budget / total)} of {format_size(total)} of weights"
        if total
        else "of unknown sizes"
    )
    outside = (
        format_size(sum(plan.sizes[s] for s in plan.outside)) if total else f"{len(plan.outside)} storages"
    )
    arena = f"{plan.arena.kind}, {plan.arena.backing}, granule {format_size(plan.arena.granule)}"
    rate = f"{hardware.link_bytes_per_s / 1e9:.3g} GB/s to the arena"
    yield "Predicted", format_time(predicted), f"a pass; compute alone takes {format_time(plan.compute_ns)}"
    if bound is None:
        yield "Lower bound", "not found", "the solver gave none in time"
    else:
        yield "Lower bound", format_time(bound), f"predicted is {predicted / max(1, bound):.4f} times that"
    yield "What limits it", limit, reason if transfers else "nothing streams"
    yield "Budget", format_size(plan.budget), share if plan.arena.layout else "there are no weights"
    yield "Arena", format_size(plan.arena_bytes), arena if plan.arena_bytes else "none is needed"
    resident = format_size(sum(one.nbytes for one in plan.resident))
    yield "Stays in memory", resident, f"in the arena; {outside} outside it"
    yield "Streamed a pass", format_size(plan.streamed_bytes), f"in {_count(len(transfers), 'transfer')}"
    yield "Hardware", hardware.name, f"{rate}; {hardware.note}" if hardware.note else rate


def note_of_curve(*, swept: bool, logarithmic: bool) -> str:
    """What there is to say of the curve of budgets, with a sweep and without one."""
    note = "This plan, and what no plan for its budget can beat."
    if swept:
        note = "Each dot is a plan for that budget. Other policies get the same memory, link and step times."
    return note + (" Times are on a logarithmic scale." if logarithmic else "")


def note_of_first(picture: Picture) -> str:
    """What there is to say of the first pass after a cold start."""
    held = sum(one.nbytes for one in picture.plan.resident)
    held += sum(stay.range.nbytes for stay in picture.stays if stay.until >= len(picture.trace.steps))
    there = f" The {format_size(held)} that stay between passes are in memory when it begins." if held else ""
    return f"The first pass of {_called(picture)} takes {_time(picture, picture.views.first)}.{there}"


def note_of_steady(picture: Picture) -> str:
    """What there is to say of a steady pass, and of the part that its neighbours have in it."""
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
    return f"{format_time(view.period_ns)}; {stall}"


class Sayings:
    """What is said of what compute and links do in one method; `names` has one for every storage."""

    def __init__(self, picture: Picture, names: Sequence[str]) -> None:
        self._picture, self._steps, self._names = picture, picture.trace.steps, names
        self._sizes, self._resident = picture.plan.sizes, resident_bytes(picture.plan)
        self._places = storage_ranges(picture.plan)
        self._brought = weights_of(picture.plan, picture.copies)
        self._late: dict[int, set[int]] = {}
        for copy, weights in zip(picture.copies, self._brought, strict=True):
            self._late.setdefault(copy.step, set()).update(weights)

    def of_interval(self, one: Interval) -> Said:
        """What is said of an interval; compute that reads and copies are shown with their names."""
        if one.of is None:
            titles = {"tail": "Compute after the last step", "gap": "Between two calls", "stall": "Stall"}
            return _said(titles[one.kind], (), [("for", "copies under way")] if one.kind == "stall" else [])
        if one.kind in {"copy", "disk"}:
            weights = self._brought[one.of]
            return _said(title_of([self._names[s] for s in weights]), weights, self._copy(one.of), named=True)
        step = self._steps[one.of]
        if one.kind == "lead":
            return _said(f"Compute before {step.name}", (), [])
        if one.kind == "stall":
            weights = [s for s in step.reads if s in self._late.get(one.of, ())] or list(step.reads)
            return _said(f"Stall before {step.name}", weights, [("for", self._listed(weights))])
        lines = [("step", f"{one.of} (0 to {len(self._steps) - 1})"), ("reads", self._listed(step.reads))]
        return _said(step.name, step.reads, lines, named=True)

    def of_box(self, box: Box) -> Said:
        """The same of a range of a storage that is in the arena."""
        place, n = self._places[box.storage], len(self._steps)
        whole = f" of {format_size(place.nbytes)}" if place else ""
        here = ("here", "always: it never leaves")
        if box.until is not None:
            after = "" if box.until < n else " in the pass after"
            here = ("leaves", f"when {self._steps[box.until % n].name} ends{after}")
        lines = [("bytes", format_size(box.range.nbytes) + whole), here]
        return _said(self._names[box.storage], [box.storage], lines)

    def _copy(self, number: int) -> Lines:
        copy, weights = self._picture.copies[number], self._brought[number]
        before = " of the pass before" if copy.after < 0 else ""
        lines = [
            ("copies", f"{format_size(copy.range.nbytes)} in {_count(copy.last - copy.first, 'transfer')}"),
            ("for step", f"{self._steps[copy.step].name} ({copy.step})"),
            ("may start", f"after {self._steps[copy.after].name} ({copy.after % len(self._steps)}){before}"),
        ]
        return lines + ([("brings", self._listed(weights))] if len(weights) > 1 else [])

    def _listed(self, weights: Sequence[int]) -> str:
        """A line for each of the first weights, and how many there are more."""
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

"""Draws a plan: the words and the marks of its timeline, for pages and terminals."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from penstock.schedule.atomic_file import refuse_existing, replace_file, reporting
from penstock.schedule.clock.event_graph import launched_steps, simulate
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import PlanError, SourceError
from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.report.comparison import curve_of, other_policies
from penstock.schedule.report.pictures import (
    Box,
    Interval,
    Picture,
    View,
    Views,
    boxes_of,
    copied_by,
    copies_of,
    held_of,
    lanes_of,
    leaving_of,
    names_of,
    picture_of,
    resident_bytes,
    storage_ranges,
    title_of,
    weights_of,
)
from penstock.schedule.report.verdict import (
    Lives,
    Origin,
    copying_ns,
    format_share,
    has_costly_pool,
    limit_of,
    near_best,
    units_of,
    uses_of,
    verdict,
)

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
        stays = format_size(sum(piece.nbytes for piece in plan.resident))
        room = f"{format_size(plan.arena_bytes)}, of which {stays} never leave"
    outside_weights = {*plan.outside} - plan.produced
    outside = _count(len(outside_weights), "weight")
    if plan.sizes and outside_weights:
        outside += f" ({format_size(sum(plan.sizes[s] for s in outside_weights))})"
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
    values = (
        _count(len(plan.produced), "value")
        + " that a forward keeps for its backward, in memory as weights are"
    )
    if plan.sizes:
        values += f": {format_size(sum(plan.sizes[s] for s in plan.produced))}"
    if not plan.written_bytes:
        return f"{values}; none leaves"
    beside = (
        "beside what comes in" if plan.hardware.duplex else "on the same link, in turn with what comes in"
    )
    moved = f"{format_size(plan.written_bytes)} leave in {_count(_transfers(plan, 'out'), 'transfer')}"
    return f"{values}; {moved} a pass, at {rate:.3g} GB/s, {beside}, and come back"


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
    resident_bytes = sum(piece.nbytes for piece in picture.plan.resident)
    resident_bytes += sum(
        stay.range.nbytes for stay in picture.stays if stay.until >= len(picture.trace.steps)
    )
    there = (
        f" The {format_size(resident_bytes)} that stay between passes are in memory when it begins."
        if resident_bytes
        else ""
    )
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

    def of_interval(self, interval: Interval) -> Said:
        """The description of an interval; reads and copies have a name that is shown in the picture."""
        if interval.of is None:
            titles = {"tail": "Compute after the last step", "gap": "Between two calls", "stall": "Stall"}
            return _said(
                titles[interval.kind], (), [("for", "copies under way")] if interval.kind == "stall" else []
            )
        if interval.kind in {"copy", "out", "disk"}:
            return self.of_copy(interval.of)
        step = self._steps[interval.of]
        if interval.kind == "lead":
            return _said(f"Compute before {step.name}", (), [])
        if interval.kind == "hold":
            leaving = zip(self._picture.copies, self._brought, strict=True)
            weights = [s for copy, some in leaving if copy.out and copy.step == interval.of for s in some]
            lines = [("for", f"copies out of\n{self._listed(weights)}")]
            return _said(f"Stall at the end of {step.name}", weights, lines)
        if interval.kind == "stall":
            weights = [s for s in step.reads if s in self._late.get(interval.of, ())] or list(step.reads)
            return _said(f"Stall before {step.name}", weights, [("for", self._listed(weights))])
        lines = [("step", f"{interval.of} (0 to {len(self._steps) - 1})")]
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Facts = dict[str, Any]

_PAINTS = {"read": "compute", "tail": "lead", "gap": "line", "hold": "stall"}
"""The names of colours for kinds of intervals whose colour has another name than the kind."""
_SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "figure.js", "draw.js", "input.js", "curve.js", "table.js")


def render_page(
    plan: Decisions, names: Sequence[str], origin: Origin, sweep: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as HTML. `names` has a name for every storage, `sweep` the points of the budget curve."""
    policies = other_policies(plan)
    curve = curve_of(plan, policies, sweep)
    data = page_data(plan, names) | {"curve": curve}
    lives = [use["lives"] for method in data["methods"] for use in method["uses"]]
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), mtime=0)
    headline, *reasons = verdict(plan, origin.tokens, policies)
    budget = format_budget(plan.budget, sum(plan.sizes))
    line = [origin.artifact, plan.hardware.name, date.today().isoformat()]
    return Template(_read("page.html")).substitute(
        title=html.escape(f"{origin.artifact or 'plan'} within {budget} - penstock"),
        made=html.escape(" \u00b7 ".join(filter(None, line))),
        headline=html.escape(headline),
        verdict=html.escape(" ".join(reasons)),
        cards=_listed(cards_of(plan)),
        terms=_listed(terms_of(plan)),
        command=html.escape(origin.command),
        curve=note_of_curve(swept=bool(sweep), logarithmic=curve["logarithmic"]),
        policies=_listed(explained(LINES, curve["lines"])),
        lives=_listed(explained(LIVES, lives)),
        style=_read("vendor/uPlot.min.css") + _read("page.css"),
        # Compressed, since there may be thousands of transfers; in base64, no name can end the element.
        data=base64.b64encode(packed).decode(),
        listed="Weights and kept values" if plan.produced else "Weights",
        licence=_read("vendor/LICENSE.txt"),
        script="\n".join(map(_read, _SCRIPTS)),
    )


def page_data(plan: Decisions, names: Sequence[str]) -> Facts:
    """The data that the page draws, for JSON: totals, weights, and the bars and boxes of each method."""
    ends = [segment.stop for segment in plan.arena.segments] if plan.arena_bytes else [0]
    places = plan.addresses or plan.arena.layout
    fields = ("name", "nbytes", "address", "resident", "value")
    sizes = plan.sizes or [place and place.nbytes for place in storage_ranges(plan)]
    values = (s in plan.produced for s in range(len(sizes)))
    weights = zip(names, sizes, places, resident_bytes(plan), values, strict=True)
    return {
        "budget": plan.budget,
        "arena": plan.arena.kind,
        "arena_bytes": plan.arena_bytes,
        "addresses": plan.arena_bytes if plan.addresses else max(ends),
        "resident_bytes": sum(piece.nbytes for piece in plan.resident),
        "weights": [dict(zip(fields, weight, strict=True)) for weight in weights],
        "methods": [_method(picture_of(plan, number), names) for number in range(len(plan.traces))],
    }


def _method(picture: Picture, names: Sequence[str]) -> Facts:
    trace, views, sayings = picture.trace, picture.views, Sayings(picture, names)
    about: dict[str, int] = {}  # each description, as JSON, and its place in the list of descriptions
    return {
        "name": f"{trace.method}, {trace.shape}" if trace.shape else trace.method,
        "steps": [step.name for step in trace.steps],
        "uses": [vars(use) for use in uses_of(picture)],
        "steady": _view(picture, views.steady, sayings, about) | {"note": note_of_steady(picture)},
        "first": _view(picture, views.first, sayings, about) | {"note": note_of_first(picture)},
        "about": [json.loads(facts) for facts in about],
    }


def _view(picture: Picture, view: View, sayings: Sayings, about: dict[str, int]) -> Facts:
    """The passes of a view as data: bars in lanes, boxes in the arena, and the bytes that the arena holds.

    A bar or a box is a list: its colour, the place of its description, the times at which it starts, is
    complete and ends, and the two lane numbers or addresses between which it is drawn.
    """
    plan, lanes, zero = picture.plan, lanes_of(picture, view), view.now.call_start
    boxes = boxes_of(picture, view)

    def piece(paint: str, facts: Facts, times: Sequence[int], low: int, high: int) -> Sequence[Any]:
        at = about.setdefault(json.dumps(facts), len(about))
        return (_PAINTS.get(paint, paint), at, *(time - zero for time in times), low, high)

    def bar(interval: Interval, lane: int) -> Sequence[Any]:
        return piece(
            interval.kind,
            sayings.of_interval(interval),
            (interval.start, interval.start, interval.end),
            lane,
            lane + 1,
        )

    def box(drawn_box: Box, paint: str, facts: Facts) -> Sequence[Any]:
        moved = (
            plan.addresses[drawn_box.storage] - plan.arena.layout[drawn_box.storage] if plan.addresses else 0
        )
        times = (drawn_box.start, drawn_box.ready, drawn_box.end)
        return piece(paint, facts, times, drawn_box.range.start + moved, drawn_box.range.stop + moved)

    drawn = [
        box(box_of_view, "resident" if box_of_view.until is None else "held", sayings.of_box(box_of_view))
        for box_of_view in boxes
    ]
    drawn += [
        box(box_of_view, "out", sayings.of_copy(number)) for number, box_of_view in leaving_of(picture, view)
    ]

    return {
        "limits": (view.begins[0] - zero, view.end - zero),
        "period": view.period_ns,
        "lanes": list(lanes),
        "bars": [bar(interval, at) for at, lane in enumerate(lanes.values()) for interval in lane],
        "boxes": drawn,
        "held": list(zip(*((time - zero, nbytes) for time, nbytes in held_of(view, boxes)), strict=True)),
    }


def _listed(items: Iterable[Sequence[str]]) -> str:
    """The items of an HTML description list; each has a term, and one or two lines that describe it."""
    rows = ([html.escape(cell) for cell in row] for row in items)
    return "".join(f"<div><dt>{term}</dt><dd>{'</dd><dd>'.join(lines)}</dd></div>" for term, *lines in rows)


def _read(name: str) -> str:
    return resources.files("penstock.schedule.report.page").joinpath(name).read_text(encoding="utf-8")


Event = dict[str, Any]

_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Characters that fill no, one, ... eight eighths of a cell."""

_LEAST_WIDTH = 40


def save_report(
    plan: Decisions,
    path: str | PathLike[str],
    *,
    sweep: Sequence[Mapping[str, Any]] = (),
    origin: Origin | None = None,
    force: bool = False,
) -> None:
    """Write the plan as one page of HTML that needs no network and no other file.

    Methods whose calls come in turn are drawn as one, here and in the other pictures.
    `sweep` has the points of the budget curve: `budget`, `predicted_ns`, `lower_bound_ns` (or None) and
    `policies` (name to ns).
    `origin` says where the plan comes from. `force` replaces a file that exists.

    Raises:
        PlanError: `path` exists or cannot be written.
    """
    target = _new_file(path, force=force)
    _write(target, [render_page(joined(plan), names_of(plan), origin or Origin(), sweep)], force=force)


def save_timeline(
    plan: Decisions,
    path: str | PathLike[str],
    *,
    passes: int = 3,
    force: bool = False,
) -> None:
    """Write the first passes, from a cold start on, as a trace that ui.perfetto.dev opens.

    Every method is a process, compute and the links are its threads. Stalls are events of their own.
    (Trace Event Format, Google, 2016: times are microseconds.) `force` replaces a file that exists.

    Raises:
        PlanError: `path` exists or cannot be written, or `passes` is not positive.
    """
    if passes < 1:
        raise PlanError(f"a timeline of {passes} passes shows nothing; ask for at least 1")
    plan, called = joined(plan), names_of(plan)
    target = _new_file(path, force=force)
    events = (event for number in range(len(plan.traces)) for event in _events(plan, number, called, passes))
    lines = (f"{',' if number else ''}\n{json.dumps(event)}" for number, event in enumerate(events))
    _write(target, ['{"displayTimeUnit": "ms", "traceEvents": [', *lines, "\n]}\n"], force=force)


def terminal_timeline(plan: Decisions, width: int = 100) -> str:
    """One steady pass of each method in lines of at most `width` characters (40 at least).

    A column stands for a stretch of time; the fuller its character, the more of that time compute or link is
    busy.
    """
    parts, plan = [], joined(plan)
    for number, trace in enumerate(plan.traces):
        if not trace.steps:
            continue
        lines = _terminal_lines(plan, number, max(_LEAST_WIDTH, width))
        parts += [f"{trace.method}:", *lines] if len(plan.traces) > 1 else lines
    return "\n".join(parts)


def _terminal_lines(plan: Decisions, number: int, width: int) -> list[str]:
    picture = picture_of(plan, number)
    view = picture.views.steady
    lanes = lanes_of(picture, view)
    label = max(map(len, lanes)) + 1
    columns = width - label - 5
    lines = [f"{name:<{label}}{_cells(intervals, view, columns)}" for name, intervals in lanes.items()]
    middle, end = format_time(view.period_ns / 2), format_time(view.period_ns)
    left = (columns - len(middle)) // 2 - 1
    right = columns - 1 - left - len(middle) - len(end)
    waits = view.period_ns - picture.trace.compute_ns
    lines.append(f"{'':<{label}}0{'':<{left}}{middle}{'':<{right}}{end}")
    return lines + ([f"{'':<{label}}compute waits {format_time(waits)} of it"] if waits else [])


def _cells(intervals: Iterable[Interval], view: View, columns: int) -> str:
    """How busy a lane is: a character for each column, and the share of the pass. A gap counts as busy."""
    begin, period = view.begins[view.focus], max(1, view.period_ns)
    shares = [0.0] * columns
    for interval in intervals:
        if interval.kind in {"stall", "hold"}:
            continue
        low = (max(interval.start, begin) - begin) * columns / period
        high = (min(interval.end, begin + period) - begin) * columns / period
        for column in range(int(low), min(columns, int(high) + 1)):
            shares[column] += max(0.0, min(high, column + 1) - max(low, column))
    eighths = [min(8, max(round(share * 8), int(share > 0.01))) for share in shares]
    return "".join(_BLOCKS[eighth] for eighth in eighths) + f"{sum(shares) / columns:>5.0%}"


def _events(plan: Decisions, number: int, names: Sequence[str], passes: int) -> Iterator[Event]:
    trace, schedule = plan.traces[number], plan.schedules[number]
    launched = launched_steps(plan, number)
    times = simulate(trace, schedule, plan.hardware, plan.wrap, passes + 1, launched=launched)
    view = View(times[:-1], 0, times[-1].call_start)
    picture = Picture(plan, number, Views(view, view), copies_of(plan, schedule), ())
    copied = list(copied_by(plan, number, names))
    yield _named("process_name", f"{trace.method} on {plan.hardware.name}", number + 1, 0)
    for tid, (lane, intervals) in enumerate(lanes_of(picture, view).items(), 1):
        yield _named("thread_name", lane, number + 1, tid)
        for interval in intervals:
            title, args = interval.kind, {}
            if interval.of is not None and interval.kind in {"copy", "out", "disk"}:
                args = copied[interval.of]
                title = f"{title_of(args['weights'])}{' out' * (interval.kind == 'out')}"
            elif interval.of is not None:
                step = trace.steps[interval.of]
                titles_shown = {
                    "lead": f"{step.name} (lead)",
                    "read": step.name,
                    "hold": "stall for copies out",
                }
                title = titles_shown.get(title, title)
                args = {
                    "step": step.name,
                    "weights": [] if interval.kind == "lead" else [names[s] for s in step.reads],
                }
                if step.writes:
                    args["writes"] = [names[s] for s in step.writes]
            when = {"ts": interval.start / 1000, "dur": interval.nanoseconds / 1000}
            event = {"ph": "X", "name": title, "cat": interval.kind, "pid": number + 1, "tid": tid}
            yield event | when | {"args": {"pass": interval.at} | args}


def _named(event: str, name: str, pid: int, tid: int) -> Event:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": {"name": name}}


def _new_file(path: str | PathLike[str], *, force: bool) -> Path:
    """The path of a file to write. Raises PlanError where it cannot be written, before any work is done."""
    target = Path(path)
    with _as_plan_errors(), reporting(target):
        refuse_existing(target, force=force)
        if not target.parent.is_dir():
            raise PlanError(
                f"{target.parent} is not a folder that exists; create it, or choose another output"
            )
    return target


def _write(target: Path, pieces: Iterable[str], *, force: bool) -> None:
    """Write all pieces to `target`, or leave it as it is. Raises PlanError if it exists without `force`."""
    with (
        _as_plan_errors(),
        replace_file(target, force=force) as fd,
        open(fd, "w", encoding="utf-8", closefd=False) as file,
    ):
        file.writelines(pieces)


@contextmanager
def _as_plan_errors() -> Iterator[None]:
    try:
        yield
    except SourceError as error:
        raise PlanError(str(error)) from error

"""The page of a report: the facts of a plan as JSON inside one HTML file, with its style and its scripts.

The page asks for nothing: no network, no fonts, no other file. Times in its data are nanoseconds from the
start of the pass that is looked at, offsets bytes; columns named in `_DELTAS` hold differences.
"""

from __future__ import annotations

import html
import itertools
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from penstock.schedule.clock.event_graph import stalls_of
from penstock.schedule.facts.model import Decisions, Schedule, Trace
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.report.views import (
    Copy,
    Stay,
    View,
    copies_of,
    resident_of,
    stays_of,
    storage_ranges,
    views_of,
)
from penstock.schedule.report.whatif import limit_of, verdict

_SCRIPTS = (
    "base.js",
    "model.js",
    "figure.js",
    "input.js",
    "lanes.js",
    "arena.js",
    "tip.js",
    "curve.js",
    "table.js",
    "main.js",
)


def render_page(plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None) -> str:
    """The whole page; `names` has one for every storage, `sweep` the points of the budget curve."""
    data = json.dumps(page_data(plan, names, sweep), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(f"penstock: {plan.traces[0].method if plan.traces else 'plan'}"),
        "style": _read("page.css"),
        # No text of a name may end the element that it stands in.
        "data": data.replace("<", "\\u003c"),
        "script": "\n".join(_read(name) for name in _SCRIPTS),
    }
    before, *rest = _read("page.html").split("{{")
    pieces = [before]
    for piece in rest:
        name, _, text = piece.partition("}}")
        pieces += [parts[name], text]
    return "".join(pieces)


def page_data(
    plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """What the page draws."""
    kept = resident_of(plan)
    facts = plan_facts(plan, sweep)
    return {
        "plan": facts,
        "weights": _weights(plan, names, kept),
        "resident": _ranges(plan, [(s, r.start, r.nbytes) for s, r in kept]),
        "methods": [_method(plan, which, kept) for which in range(len(plan.traces))],
        "sweep": [dict(point) for point in sweep or ()],
    }


def plan_facts(plan: Decisions, sweep: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """What is said of the plan as a whole."""
    bounds = [schedule.lower_bound_ns for schedule in plan.schedules]
    here = [point["policies"] for point in sweep or () if point["budget"] == plan.budget]
    policies = {name: ns for name, ns in (here[0] if here else {}).items() if ns is not None}
    ends = [segment.stop for segment in plan.arena.segments] if plan.arena_bytes else [0]
    return {
        "budget": plan.budget,
        "arena": plan.arena.kind,
        "backing": plan.arena.backing,
        "granule": plan.arena.granule,
        "arena_bytes": plan.arena_bytes,
        "addresses": plan.arena_bytes if plan.addresses else max(ends),
        "wrap": plan.wrap,
        "outside_bytes": sum(plan.sizes[s] for s in plan.outside) if plan.sizes else None,
        "resident_bytes": sum(one.nbytes for one in plan.resident),
        "streamed_bytes": plan.streamed_bytes,
        "predicted_ns": sum(schedule.predicted_ns for schedule in plan.schedules),
        "lower_bound_ns": sum(bound or 0 for bound in bounds) if None not in bounds else None,
        "compute_ns": sum(trace.compute_ns for trace in plan.traces),
        "limit": limit_of(plan),
        "verdict": verdict(plan, policies),
        "hardware": asdict(plan.hardware),
    }


@dataclass(frozen=True)
class _Drawn:
    """One method's copies and stays, for what is said of each weight."""

    trace: Trace
    schedule: Schedule
    copies: tuple[Copy, ...]
    stays: tuple[Stay, ...]
    steady: View


def _weights(plan: Decisions, names: Sequence[str], kept: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    places = storage_ranges(plan)
    held = [0] * len(places)
    for s, piece in kept:
        held[s] += _overlap(places[s], piece)
    sizes = [place.nbytes if place else None for place in places]
    return {
        "name": list(names),
        "nbytes": list(plan.sizes) if plan.sizes else sizes,
        "address": [place.start + _shift(plan, s) if place else -1 for s, place in enumerate(places)],
        "resident": held,
        "outside": sorted(plan.outside),
    }


def _method(plan: Decisions, which: int, kept: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    trace, schedule = plan.traces[which], plan.schedules[which]
    views = views_of(plan, which)
    copies = copies_of(plan, schedule, views.passes)
    stays = stays_of(plan, which, copies)
    drawn = _Drawn(trace, schedule, copies, stays, views.steady)
    copy_ns = [plan.hardware.copy_ns(t.stop - t.start) for t in schedule.transfers]
    return {
        "name": trace.method,
        "shape": trace.shape,
        "times": trace.times,
        "compute_ns": trace.compute_ns,
        "predicted_ns": schedule.predicted_ns,
        "lower_bound_ns": schedule.lower_bound_ns,
        "copying_ns": sum(copy_ns),
        "streamed_bytes": sum(t.stop - t.start for t in schedule.transfers),
        "transfers": len(schedule.transfers),
        "tail_ns": trace.tail_ns,
        "gap_ns": trace.gap_ns,
        "steps": {
            "name": [step.name for step in trace.steps],
            "reads": [list(step.reads) for step in trace.steps],
            "lead": [step.lead_ns for step in trace.steps],
            "read": [step.read_ns for step in trace.steps],
        },
        "copies": {
            "start": _deltas([c.range.start for c in copies]),
            "nbytes": [c.range.nbytes for c in copies],
            "step": _deltas([c.step for c in copies]),
            "after": _deltas([c.after for c in copies]),
            "link": [c.link for c in copies],
            "count": [c.last - c.first for c in copies],
            "ns": [sum(copy_ns[c.first : c.last]) for c in copies],
        },
        "stages": _stages(plan, schedule, copies),
        "stays": {
            **_ranges(plan, [(s.storage, s.range.start, s.range.nbytes) for s in stays]),
            "copy": _deltas([s.copy for s in stays]),
            "until": _deltas([s.until for s in stays]),
        },
        "rows": _rows(plan, drawn, kept),
        "views": {"first": _view(views.first, copies), "steady": _view(views.steady, copies)},
    }


def _stages(plan: Decisions, schedule: Schedule, copies: Sequence[Copy]) -> dict[str, list[int]]:
    """What the disk reads for the host: for each read the copy that it is part of, and its time."""
    staged = [i for i, nbytes in enumerate(schedule.staged) if nbytes]
    lasts = [c.last for c in copies]
    return {
        "copy": [bisect_right(lasts, i) for i in staged],
        "ns": [plan.hardware.disk_ns(schedule.staged[i]) for i in staged],
    }


def _ranges(plan: Decisions, rows: Sequence[tuple[int, int, int]]) -> dict[str, list[int]]:
    """Ranges of storages as columns; addresses are where the picture has them."""
    return {
        "weight": [s for s, _, _ in rows],
        "start": _deltas([start for _, start, _ in rows]),
        "address": _deltas([start + _shift(plan, s) for s, start, _ in rows]),
        "nbytes": [nbytes for _, _, nbytes in rows],
    }


def _view(view: View, copies: Sequence[Copy]) -> dict[str, Any]:
    zero = view.begins[view.focus]
    return {
        "focus": view.focus,
        "begins": [begin - zero for begin in view.begins],
        "reads": [_deltas([start - zero for start, _ in one.reads]) for one in view.passes],
        "copies": [_deltas([one.transfers[c.first][0] - zero for c in copies]) for one in view.passes],
        "stages": [_deltas([start - zero for start, _ in one.stages]) for one in view.passes],
    }


def _rows(plan: Decisions, drawn: _Drawn, kept: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """What one method does with every weight: first step (-1 if it reads it nowhere), bytes, and why."""
    places = storage_ranges(plan)
    reads: list[list[int]] = [[] for _ in places]
    for k, step in enumerate(drawn.trace.steps):
        for s in dict.fromkeys(step.reads):
            reads[s].append(k)
    held, streamed = [0] * len(places), [0] * len(places)
    for s, piece in kept:
        held[s] += _overlap(places[s], piece)
    copies: list[set[int]] = [set() for _ in places]
    for stay in drawn.stays:
        nbytes = _overlap(places[stay.storage], stay.range)
        streamed[stay.storage] += nbytes
        if nbytes:
            copies[stay.storage].add(stay.copy)
    ends = [end for _, end in drawn.steady.passes[0].reads] + [end for _, end in _focus(drawn).reads]
    stalls = stalls_of(drawn.trace, _focus(drawn))
    outside = {s: "is held outside the arena" for s in plan.outside}
    why = []
    for s, place in enumerate(places):
        if s in outside and place is None:
            why.append("the program writes or returns it, so it never streams")
        elif not reads[s]:
            why.append(f"{drawn.trace.method} does not read it")
        elif s in outside:
            why.append(f"{_times_read(reads[s])}; all weights fit, so that nothing streams")
        else:
            ahead = max((_ahead(drawn, ends, c) for c in copies[s]), default=None)
            steps = {drawn.copies[c].step for c in copies[s]}
            share = held[s] / place.nbytes if place else 0.0
            again = "" if len(steps) >= len(reads[s]) else f" for {len(steps)} of {len(reads[s])} reads,"
            reason = _reason(share, ahead, sum(stalls[k] for k in steps.intersection(reads[s])), again)
            why.append(f"{_times_read(reads[s])}; {reason}")
    return {
        "first": [steps[0] if steps else -1 for steps in reads],
        "reads": [len(steps) for steps in reads],
        "streamed": streamed,
        "why": why,
    }


def _focus(drawn: _Drawn) -> Any:
    return drawn.steady.passes[drawn.steady.focus]


def _times_read(steps: Sequence[int]) -> str:
    return "read once a pass" if len(steps) == 1 else f"read {len(steps)} times a pass"


def _ahead(drawn: _Drawn, ends: Sequence[int], copy: int) -> int:
    """How many steps before its own a copy starts, in the steady state."""
    start = _focus(drawn).transfers[drawn.copies[copy].first][0]
    steps = len(drawn.trace.steps)
    return max(0, steps + drawn.copies[copy].step - bisect_right(ends, start))


def _reason(share: float, ahead: int | None, wait_ns: int, again: str) -> str:
    if ahead is None:
        return "stays, so it is never copied"
    what = "copied whole" if share == 0 else f"{_percent(share)} stays, the rest is copied"
    when = {0: "when its step is reached", 1: "while the step before runs"}.get(
        ahead, f"from {ahead} steps ahead"
    )
    waits = f"its step waits {format_time(wait_ns)}" if wait_ns > 0 else "in time"
    return f"{what}{again} {when}; {waits}"


def _percent(share: float) -> str:
    if not 0.01 <= share <= 0.99:
        return "under 1 %" if share < 0.5 else "over 99 %"
    return f"{share * 100:.0f} %"


def _overlap(place: Any, piece: Any) -> int:
    return max(0, min(place.stop, piece.stop) - max(place.start, piece.start)) if place else 0


def _shift(plan: Decisions, storage: int) -> int:
    """What to add to a layout offset of this storage for its address in the picture."""
    return plan.addresses[storage] - plan.arena.layout[storage] if plan.addresses else 0


def _deltas(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise((0, *values))]


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")

"""The page of a plan as one HTML file: facts, and the style, the scripts and the data that its pictures need.

The page loads nothing from the network and no other file. Its charts are drawn by uPlot, which `vendor/` has
as its authors publish it, with its licence. In the data, times are nanoseconds from the start of the pass in
focus, addresses are bytes, and a weight is given by its place in the list of weights.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib import resources
from string import Template
from typing import Any

from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_budget
from penstock.schedule.report import words
from penstock.schedule.report.pictures import (
    Box,
    Interval,
    Picture,
    boxes_of,
    held_of,
    lanes_of,
    leaving_of,
    picture_of,
)
from penstock.schedule.report.uses import uses_of
from penstock.schedule.report.verdict import Origin, verdict
from penstock.schedule.report.views import View, resident_bytes, storage_ranges
from penstock.schedule.report.whatif import curve_of, other_policies

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
    made = [origin.artifact, plan.hardware.name, date.today().isoformat()]
    return Template(_read("page.html")).substitute(
        title=html.escape(f"{origin.artifact or 'plan'} within {budget} - penstock"),
        made=html.escape(" \u00b7 ".join(filter(None, made))),
        headline=html.escape(headline),
        verdict=html.escape(" ".join(reasons)),
        cards=_listed(words.cards_of(plan)),
        terms=_listed(words.terms_of(plan)),
        command=html.escape(origin.command),
        curve=words.note_of_curve(swept=bool(sweep), logarithmic=curve["logarithmic"]),
        policies=_listed(words.explained(words.LINES, curve["lines"])),
        lives=_listed(words.explained(words.LIVES, lives)),
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
        "resident_bytes": sum(one.nbytes for one in plan.resident),
        "weights": [dict(zip(fields, weight, strict=True)) for weight in weights],
        "methods": [_method(picture_of(plan, which), names) for which in range(len(plan.traces))],
    }


def _method(picture: Picture, names: Sequence[str]) -> Facts:
    trace, views, sayings = picture.trace, picture.views, words.Sayings(picture, names)
    about: dict[str, int] = {}  # each description, as JSON, and its place in the list of descriptions
    return {
        "name": f"{trace.method}, {trace.shape}" if trace.shape else trace.method,
        "steps": [step.name for step in trace.steps],
        "uses": [vars(use) for use in uses_of(picture)],
        "steady": _view(picture, views.steady, sayings, about) | {"note": words.note_of_steady(picture)},
        "first": _view(picture, views.first, sayings, about) | {"note": words.note_of_first(picture)},
        "about": [json.loads(said) for said in about],
    }


def _view(picture: Picture, view: View, sayings: words.Sayings, about: dict[str, int]) -> Facts:
    """The passes of a view as data: bars in lanes, boxes in the arena, and the bytes that the arena holds.

    A bar or a box is a list: its colour, the place of its description, the times at which it starts, is
    complete and ends, and the two lane numbers or addresses between which it is drawn.
    """
    plan, lanes, zero = picture.plan, lanes_of(picture, view), view.now.call_start
    boxes = boxes_of(picture, view)

    def piece(paint: str, said: Facts, times: Sequence[int], low: int, high: int) -> Sequence[Any]:
        at = about.setdefault(json.dumps(said), len(about))
        return (_PAINTS.get(paint, paint), at, *(time - zero for time in times), low, high)

    def bar(one: Interval, lane: int) -> Sequence[Any]:
        return piece(one.kind, sayings.of_interval(one), (one.start, one.start, one.end), lane, lane + 1)

    def box(one: Box, paint: str, said: Facts) -> Sequence[Any]:
        moved = plan.addresses[one.storage] - plan.arena.layout[one.storage] if plan.addresses else 0
        times = (one.start, one.ready, one.end)
        return piece(paint, said, times, one.range.start + moved, one.range.stop + moved)

    drawn = [box(one, "resident" if one.until is None else "held", sayings.of_box(one)) for one in boxes]
    drawn += [box(one, "out", sayings.of_copy(number)) for number, one in leaving_of(picture, view)]

    return {
        "limits": (view.begins[0] - zero, view.end - zero),
        "period": view.period_ns,
        "lanes": list(lanes),
        "bars": [bar(one, at) for at, lane in enumerate(lanes.values()) for one in lane],
        "boxes": drawn,
        "held": list(zip(*((time - zero, nbytes) for time, nbytes in held_of(view, boxes)), strict=True)),
    }


def _listed(items: Iterable[Sequence[str]]) -> str:
    """The items of an HTML description list; each has a term, and one or two lines that describe it."""
    rows = ([html.escape(one) for one in item] for item in items)
    return "".join(f"<div><dt>{term}</dt><dd>{'</dd><dd>'.join(said)}</dd></div>" for term, *said in rows)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

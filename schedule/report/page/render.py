"""A plan as one HTML file: its facts, and the style, the scripts and the data that its pictures need.

The page loads nothing: no network, no fonts, no other file. Its charts are uPlot's, which `vendor/` has as
its authors publish it, with its licence. Times in the data are nanoseconds from the start of the pass that
is looked at, addresses are bytes, and weights are known by their places in their list.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from penstock.schedule.facts.model import Decisions, Range
from penstock.schedule.report import words
from penstock.schedule.report.pictures import Interval, Picture, boxes_of, held_of, lanes_of, picture_of
from penstock.schedule.report.uses import resident_bytes, uses_of
from penstock.schedule.report.views import View, resident_of, storage_ranges
from penstock.schedule.report.whatif import curve_of

Facts = dict[str, Any]

_PAINTS = {"read": "compute", "tail": "lead", "gap": "line"}
"""The colours of intervals that are not called as their kind is."""
_STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "figure.js", "draw.js", "input.js", "curve.js", "table.js")


def render_page(plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None) -> str:
    """The whole page; `names` has one for every storage, `sweep` the points of the budget curve."""
    data = json.dumps(page_data(plan, names, sweep), separators=(",", ":"), allow_nan=False)
    here = [point["policies"] for point in sweep or () if point["budget"] == plan.budget]
    policies = {name: ns for name, ns in (here[0] if here else {}).items() if ns is not None}
    facts = (map(html.escape, fact) for fact in words.facts_of(plan))
    return Template(_read("page.html")).substitute(
        title=html.escape(f"penstock: {plan.traces[0].method if plan.traces else 'plan'}"),
        headline=html.escape(words.headline_of(plan)),
        verdict=html.escape(words.verdict_of(plan, policies)),
        facts="\n".join(
            f"<div><dt>{title}</dt><dd>{value}</dd><dd>{more}</dd></div>" for title, value, more in facts
        ),
        curve=words.note_of_curve(bool(sweep)),
        style="\n".join(map(_read, _STYLES)),
        # Packed, so that thousands of transfers stay small, and no name can end the element.
        data=base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode(),
        licence=_read("vendor/LICENSE.txt"),
        script="\n".join(map(_read, _SCRIPTS)),
    )


def page_data(plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None) -> Facts:
    """What the page draws, as JSON: totals, weights, and for each method what happens when."""
    ends = [segment.stop for segment in plan.arena.segments] if plan.arena_bytes else [0]
    weights = zip(names, storage_ranges(plan), resident_bytes(plan), strict=True)
    return {
        "budget": plan.budget,
        "arena": plan.arena.kind,
        "arena_bytes": plan.arena_bytes,
        "addresses": plan.arena_bytes if plan.addresses else max(ends),
        "resident_bytes": sum(one.nbytes for one in plan.resident),
        "weights": [
            {
                "name": name,
                "nbytes": plan.sizes[s] if plan.sizes else place and place.nbytes,
                "address": _address(plan, s, place) if place else -1,
                "resident": held,
            }
            for s, (name, place, held) in enumerate(weights)
        ],
        "methods": [_method(picture_of(plan, which), names) for which in range(len(plan.traces))],
        "curve": curve_of(plan, sweep),
    }


def _method(picture: Picture, names: Sequence[str]) -> Facts:
    trace, views, sayings = picture.trace, picture.views, words.Sayings(picture, names)
    about: dict[str, int] = {}  # what is said of items and boxes, as JSON, and its place
    return {
        "name": f"{trace.method}, {trace.shape}" if trace.shape else trace.method,
        "steps": [step.name for step in trace.steps],
        "uses": [vars(use) for use in uses_of(picture)],
        "steady": _view(picture, views.steady, sayings, about) | {"note": words.note_of_steady(picture)},
        "first": _view(picture, views.first, sayings, about) | {"note": words.note_of_first(picture)},
        "about": [json.loads(said) for said in about],
    }


def _view(picture: Picture, view: View, sayings: words.Sayings, about: dict[str, int]) -> Facts:
    """What happens in the passes of a view: items of lanes, boxes of the arena, and what is said of them."""
    plan, zero, boxes = picture.plan, view.begins[view.focus], boxes_of(picture, view)
    begin, end = view.begins[0] - zero, view.end - zero
    held, lanes = held_of(picture, view, boxes), lanes_of(picture, view)
    waits = {one.end: one.end - one.start for one in lanes["compute"] if one.kind == "stall"}

    def known(paint: str, said: Facts) -> Facts:
        return {"paint": paint, "about": about.setdefault(json.dumps(said), len(about))}

    def item(one: Interval) -> Facts:
        said = sayings.of_interval(one.kind, one.of, waits.get(one.start, 0))
        when = {"start": one.start - zero, "end": one.end - zero}
        return when | known(_PAINTS.get(one.kind, one.kind), said)

    def box(storage: int, piece: Range, until: int | None, *times: int) -> Facts:
        where = {"weight": storage, "address": _address(plan, storage, piece), "nbytes": piece.nbytes}
        said = where | sayings.of_box(storage, piece, until)
        when = dict(zip(("start", "ready", "end"), times, strict=True))
        return when | known("resident" if until is None else "held", said)

    always = [box(storage, piece, None, begin, begin, end) for storage, piece in resident_of(plan)]
    stays = [(picture.stays[one.stay], one.start - zero, one.ready - zero, one.end - zero) for one in boxes]
    return {
        "limits": (begin, end),
        "period": view.period_ns,
        "lanes": [{"name": name, "items": [item(one) for one in lane]} for name, lane in lanes.items()],
        "boxes": always + [box(stay.storage, stay.range, stay.until, *times) for stay, *times in stays],
        "held": [[time - zero for time, _ in held], [nbytes for _, nbytes in held]],
    }


def _address(plan: Decisions, storage: int, piece: Range) -> int:
    """Where a range of a storage lies in the picture: in a paged arena that is its layout offset."""
    return piece.start + (plan.addresses[storage] - plan.arena.layout[storage] if plan.addresses else 0)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

"""A plan as one HTML file: its facts, and the style, the scripts and the data that its pictures need.

The page loads nothing: no network, no fonts, no other file. Its charts are uPlot's, which `vendor/` has as
its authors publish it, with its licence.
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

from penstock.schedule.facts.model import Decisions
from penstock.schedule.report.page.data import page_data
from penstock.schedule.report.words import facts_of, headline_of, note_of_curve, verdict_of

_STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "figure.js", "draw.js", "input.js", "curve.js", "table.js")


def render_page(plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None) -> str:
    """The whole page; `names` has one for every storage, `sweep` the points of the budget curve."""
    data = json.dumps(page_data(plan, names, sweep), separators=(",", ":"), allow_nan=False)
    here = [point["policies"] for point in sweep or () if point["budget"] == plan.budget]
    policies = {name: ns for name, ns in (here[0] if here else {}).items() if ns is not None}
    facts = (map(html.escape, fact) for fact in facts_of(plan))
    return Template(_read("page.html")).substitute(
        title=html.escape(f"penstock: {plan.traces[0].method if plan.traces else 'plan'}"),
        headline=html.escape(headline_of(plan)),
        verdict=html.escape(verdict_of(plan, policies)),
        facts="\n".join(
            f"<div><dt>{title}</dt><dd>{value}</dd><dd>{more}</dd></div>" for title, value, more in facts
        ),
        curve=note_of_curve(bool(sweep)),
        style="\n".join(map(_read, _STYLES)),
        # Packed, so that thousands of transfers stay small, and no name can end the element.
        data=base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode(),
        licence=_read("vendor/LICENSE.txt"),
        script="\n".join(map(_read, _SCRIPTS)),
    )


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

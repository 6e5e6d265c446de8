"""What the page draws, as JSON: the plan's totals, its weights, and for each method what happens when.

Times are nanoseconds from the start of the pass that is looked at; addresses are bytes. An item of a lane is
(kind, start, end, what it is about), a box of the arena (stay, start, ready, end); weights, steps, stays and
what items are about are known by their places in their lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.schedule.facts.model import Decisions, Range
from penstock.schedule.report.pictures import Interval, Picture, boxes_of, held_of, lanes_of, picture_of
from penstock.schedule.report.uses import resident_bytes, uses_of
from penstock.schedule.report.views import View, resident_of, storage_ranges
from penstock.schedule.report.whatif import curve_of
from penstock.schedule.report.words import Sayings, note_of_first, note_of_steady

Facts = dict[str, Any]


def page_data(plan: Decisions, names: Sequence[str], sweep: Sequence[Mapping[str, Any]] | None) -> Facts:
    """All data of the page; the arguments are those of `render_page`."""
    held = resident_bytes(plan)
    ends = [segment.stop for segment in plan.arena.segments] if plan.arena_bytes else [0]
    return {
        "budget": plan.budget,
        "arena": plan.arena.kind,
        "arena_bytes": plan.arena_bytes,
        "addresses": plan.arena_bytes if plan.addresses else max(ends),
        "resident_bytes": sum(one.nbytes for one in plan.resident),
        "weights": [
            {
                "name": names[s],
                "nbytes": plan.sizes[s] if plan.sizes else place and place.nbytes,
                "address": _range(plan, s, place)["address"] if place else -1,
                "resident": held[s],
            }
            for s, place in enumerate(storage_ranges(plan))
        ],
        "methods": [_method(picture_of(plan, which), names) for which in range(len(plan.traces))],
        "curve": curve_of(plan, sweep),
    }


def _method(picture: Picture, names: Sequence[str]) -> Facts:
    plan, trace, sayings = picture.plan, picture.trace, Sayings(picture, names)
    stays = [{**_range(plan, s.storage, s.range), "until": s.until} for s in picture.stays]
    always = [{**_range(plan, s, piece), "until": None} for s, piece in resident_of(plan)]
    numbers: dict[tuple[str, int | None], int] = {}

    def about(one: Interval) -> int:
        return numbers.setdefault((one.kind, one.of), len(numbers))

    def view_data(view: View, note: str) -> Facts:
        zero, boxes = view.begins[view.focus], boxes_of(picture, view)
        held, lanes = held_of(picture, view, boxes), lanes_of(picture, view)
        ends = (view.begins[0] - zero, view.end - zero)
        return {
            "note": note,
            "limits": ends,
            "period": view.period_ns,
            "lanes": {
                name: [
                    (
                        one.kind,
                        one.start - zero,
                        one.end - zero,
                        numbers.setdefault((one.kind, one.of), len(numbers)),
                    )
                    for one in lane
                ]
                for name, lane in lanes.items()
            },
            "boxes": [(len(stays) + i, ends[0], ends[0], ends[1]) for i in range(len(always))]
            + [(box.stay, box.start - zero, box.ready - zero, box.end - zero) for box in boxes],
            "held": [[time - zero for time, _ in held], [nbytes for _, nbytes in held]],
        }

    return {
        "name": f"{trace.method}, {trace.shape}" if trace.shape else trace.method,
        "steps": [step.name for step in trace.steps],
        "stays": [*stays, *always],
        "uses": [vars(use) for use in uses_of(picture)],
        "steady": view_data(picture.views.steady, note_of_steady(picture)),
        "first": view_data(picture.views.first, note_of_first(picture)),
        "about": [sayings.of(kind, number) for kind, number in numbers],
    }


def _range(plan: Decisions, storage: int, piece: Range) -> dict[str, int]:
    """A range of a storage, at its address in the picture: in a paged arena that is its layout offset."""
    shift = plan.addresses[storage] - plan.arena.layout[storage] if plan.addresses else 0
    return {"weight": storage, "address": piece.start + shift, "nbytes": piece.nbytes}

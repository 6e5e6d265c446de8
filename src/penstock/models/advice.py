"""Advice about a plan: a verdict, a comparison with other budgets and policies, and the steps that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.program import Program
from penstock.runtime.sparse.units import read_routes
from penstock.schedule.clock.event_graph import launched_steps, settle, stalls_of
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.plan import Plan
from penstock.schedule.report import comparison as whatif
from penstock.schedule.report.verdict import tokens_of, verdict
from penstock.schedule.sparse.replay import simulated_calls
from penstock.schedule.sparse.routes import profile_of


@dataclass(frozen=True)
class Advice:
    """A plan, sentences that judge it, and, if asked for, a comparison with other policies and other budgets.

    `tokens` has the number of tokens in a pass, by method. `floor_bytes` is the smallest budget for the
    plan's arena.
    """

    plan: Plan
    tokens: dict[str, int]
    floor_bytes: int
    verdict: tuple[str, ...]
    comparison: list[dict[str, Any]] | None
    points: tuple[whatif.Point, ...] | None


def advise(
    program: Program, decided: Plan, again: Callable[[int], Plan], *, compare: bool, sweep: bool
) -> Advice:
    """Judge a plan of `program` beside other policies, and beside plans that `again` makes for other budgets.

    `again` takes a budget in bytes and plans for the hardware and options of `decided`. With `compare`, the
    result has the times of other policies; with `sweep`, it has the points of the curve of time against
    budget.
    """
    point, lowest = whatif.point_of(decided), _lowest(again)
    points = None
    if sweep:
        points = whatif.sweep(again, lowest=lowest, highest=max(lowest, program.largest_budget))
    tokens = tokens_of(program.payload.methods)
    judged = verdict(decided, tokens, point.policies)
    return Advice(decided, tokens, lowest, judged, _comparison(point) if compare else None, points)


def _comparison(point: whatif.Point) -> list[dict[str, Any]]:
    """Rows for the plan, its bound and every other policy, the fastest first.

    A row has the name, the seconds of a pass, and these seconds divided by the plan's.
    """
    rows = [("this plan", point.predicted_ns), *point.policies.items()]
    if point.lower_bound_ns is not None:
        rows.append((whatif.BEST, point.lower_bound_ns))
    return [
        {"policy": name, "seconds": ns / 1e9, "times": ns / max(1, point.predicted_ns)}
        for name, ns in sorted(rows, key=lambda row: row[1])
    ]


def simulated(plan: Plan) -> list[dict[str, Any]]:
    """The times in ns of the first and of a steady pass of each method on a virtual clock, as JSON."""
    facts, plan = [], joined(plan)
    for number, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        if not trace.steps:
            continue
        launched = launched_steps(plan, number)
        done = settle(trace, schedule, plan.hardware, plan.wrap, launched=launched)
        stalls = stalls_of(trace, done.steady)
        facts.append(
            {
                "method": trace.method,
                "first_ns": done.first_ns,
                "period_ns": done.period_ns,
                "predicted_ns": schedule.predicted_ns,
                "compute_ns": trace.compute_ns,
                "copied_bytes": schedule.moved_bytes("in"),
                "written_bytes": schedule.moved_bytes("out"),
                "first_stall_ns": sum(stalls_of(trace, done.first)),
                "stall_ns": sum(stalls),
                "stalls": [
                    {"step": step.name, "ns": ns} for step, ns in zip(trace.steps, stalls, strict=True) if ns
                ],
            }
        )
    return facts


def simulated_routes(
    program: Program, plan: Plan, path: Path, facts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The facts of `simulated`, with those of the recorded calls of each method, in bytes and nanoseconds.

    `path` is the file of routes, and `number` that of a call in it.

    Raises SourceError and PayloadError for routes that cannot be read or are of other weights, and PlanError
    for a plan that reads everything whole.
    """
    payload = program.payload
    profile = profile_of(read_routes(path), payload.storages, payload.traces, payload.storage_names())
    calls = [
        {
            "number": call.number,
            "method": call.method,
            "asked_bytes": call.asked.nbytes,
            "missed_bytes": call.missed.nbytes,
            "copied_bytes": call.copied_bytes,
            "rounds": call.rounds,
            "stall_ns": call.stall_ns,
            "total_ns": call.total_ns,
        }
        for call in simulated_calls(plan, profile)
    ]
    return [fact | {"calls": [call for call in calls if call["method"] == fact["method"]]} for fact in facts]


def _lowest(make: Callable[[int], Plan]) -> int:
    """The floor in bytes, which the planner's error names for a budget below it."""
    try:
        return make(1).budget
    except BudgetError as error:
        return error.floor_bytes or 1

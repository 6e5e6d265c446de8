"""The time that a pass would take with other policies and other budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.hardware import host_beside
from penstock.schedule.facts.model import Decisions, Hardware, Trace
from penstock.schedule.report.baselines import Setting, compare, without_values

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""The budgets of a sweep: 0 is the floor, and 1 the bytes of all weights."""

BEST = "best possible"
"""The name of a plan's lower bound in curves."""
_WIDE = 12
"""Times are drawn on a logarithmic scale if the longest exceeds the shortest by more than this factor."""


@dataclass(frozen=True)
class Point:
    """One budget, and the nanoseconds of a pass: as a plan predicts, its bound, and with other policies."""

    budget: int
    predicted_ns: int
    lower_bound_ns: int | None
    policies: Mapping[str, int]


def other_policies(plan: Decisions, host: Hardware | None = None) -> dict[str, int]:
    """The period of each policy that fits into the plan's budget, summed over the plan's traces.

    What a forward keeps stays in memory under all of them, and weights have the rest of the budget. None of
    them reads a weight by units.
    The default of `host` is the host beside the plan's hardware. For a plan without sizes there is no result.
    """
    plan, host = joined(plan), host or host_beside(plan.hardware)
    found: dict[str, int] = {}
    for number, trace in enumerate(plan.traces if plan.sizes else ()):
        cap = plan.budget - _fixed(plan) - max(_alive(plan, trace), default=0)
        steps = (replace(step, reads=plan.reads_of(step)) for step in trace.steps)
        whole = without_values(replace(trace, steps=tuple(steps)))
        setting = Setting(plan.sizes, whole, max(0, cap), plan.hardware)
        periods = compare(setting, host) if trace.steps and cap >= 0 else {}
        for name, ns in periods.items():
            if ns is not None and (number == 0 or name in found):
                found[name] = found.get(name, 0) + ns
            else:
                found.pop(name, None)
    return found


def point_of(plan: Decisions) -> Point:
    """The point of one plan on the curve of time against budget."""
    return Point(plan.budget, plan.predicted_ns, plan.lower_bound_ns, other_policies(plan))


def sweep(make: Callable[[int], Decisions], *, lowest: int, highest: int) -> tuple[Point, ...]:
    """The points of a curve from the floor (`lowest`) to all weights (`highest`); `make` makes the plans."""
    budgets = sorted({lowest + int((highest - lowest) * share) for share in SHARES})
    return tuple(point_of(make(budget)) for budget in budgets)


def curve_of(
    plan: Decisions, policies: Mapping[str, int], points: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The curve of time against budget as data: `budgets` in ascending order, and `lines` by name.

    A line has a time (ns) or None for each budget. `policies` has the times of other policies for the plan's
    own budget, and `points` the points of a sweep, with the fields of `Point`. Without a sweep, the times at
    other budgets are the lower bounds that link and compute set (`best_ns`).
    """
    at: dict[int, dict[str, int | None]] = {}
    for one in points:
        known = {"plans by penstock": one["predicted_ns"], BEST: one["lower_bound_ns"]}
        at[one["budget"]] = known | one["policies"]
    if plan.sizes and not points:
        budgets = (sum(plan.sizes) * percent // 100 for percent in range(106))
        at = {one: {"link and compute at best": best_ns(plan, one)} for one in (*budgets, plan.budget)}
    own = {"this plan": plan.predicted_ns, BEST: plan.lower_bound_ns}
    at[plan.budget] = {**policies, **at.get(plan.budget, {}), **own}
    names = dict.fromkeys(name for times in at.values() for name in times)
    lines = {name: [at[budget].get(name) for budget in sorted(at)] for name in names}
    drawn = [max(1, ns) for line in lines.values() for ns in line if ns is not None]
    wide = max(drawn) > _WIDE * min(drawn)
    return {"budgets": sorted(at), "lines": lines, "logarithmic": wide, "swept": bool(points)}


def best_ns(plan: Decisions, budget: int) -> int:
    """A lower bound (ns), set by link and compute alone, for a pass of each method with `budget` bytes.

    The bytes of the weights that a method reads and the budget cannot hold are copied in every pass. What a
    forward keeps takes memory from the step that writes it to the last that reads it. So at the step at which
    most is alive, what the budget cannot hold of it and the weights is copied in, and what it cannot hold of
    it alone is copied out, too. What is read by units counts nothing.
    """
    found, hardware = 0, plan.hardware
    for trace in joined(plan).traces:
        alive = max(_alive(plan, trace), default=0)
        weights = {s for step in trace.steps for s in step.reads} - plan.produced
        left = budget - _fixed(plan)
        brought = max(0, alive + sum(plan.sizes[s] for s in weights) - left) / hardware.link_bytes_per_s
        taken = max(0, alive - left) / (hardware.write_bytes_per_s or hardware.link_bytes_per_s)
        copying = max(brought, taken) if hardware.duplex else brought + taken
        found += max(trace.compute_ns, int(copying * 1e9))
    return found


def replayed_ns(plan: Decisions) -> int:
    """Nanoseconds of a pass of each method whose call is replayed as a graph: one launch for all steps."""
    plan, found = joined(plan), 0
    alone = replace(plan.hardware, host_step_ns=0)
    for trace, schedule in zip(plan.traces, plan.schedules, strict=True):
        found += max(plan.hardware.host_step_ns, steady_period_ns(trace, schedule, alone, plan.wrap))
    return found


def _alive(plan: Decisions, trace: Trace) -> list[int]:
    """At each step, the bytes of what steps write and that have been written, or are, and are read later."""
    alive = [0] * len(trace.steps)
    last = {s: k for k, step in enumerate(trace.steps) for s in step.reads}
    for written, step in enumerate(trace.steps):
        for s in step.writes:
            for k in range(written, last.get(s, written) + 1):
                alive[k] += plan.sizes[s]
    return alive


def _fixed(plan: Decisions) -> int:
    """Bytes of the storages that no arena can hold, because the program writes or returns them."""
    return sum(plan.sizes[s] for s in plan.outside if plan.arena.layout[s] < 0)

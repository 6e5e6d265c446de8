"""What if: the time that other policies and other budgets would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schedule.facts.hardware import host_beside
from penstock.schedule.facts.model import Decisions, Hardware
from penstock.schedule.report.baselines import Setting, compare

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Budgets of a sweep, as shares of the way from the floor to everything."""

BEST = "best streaming possible"
"""What the lower bound of a plan is called."""
_WIDE = 12
"""From this ratio on times are drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Point:
    """One budget: what a plan for it takes a pass, what none can beat, and what other policies take (ns)."""

    budget: int
    predicted_ns: int
    lower_bound_ns: int | None
    policies: Mapping[str, int]


def other_policies(plan: Decisions, host: Hardware | None = None) -> dict[str, int]:
    """The period of each policy that fits into the plan's budget, summed over the plan's traces.

    `host` is by default the one that stands beside the plan's hardware. A plan without sizes is compared
    with nothing.
    """
    host = host or host_beside(plan.hardware)
    found: dict[str, int] = {}
    for number, trace in enumerate(plan.traces if plan.sizes else ()):
        setting = Setting(plan.sizes, trace, plan.budget - _fixed(plan), plan.hardware)
        periods = compare(setting, host) if trace.steps else {}
        for name, ns in periods.items():
            if ns is not None and (number == 0 or name in found):
                found[name] = found.get(name, 0) + ns
            else:
                found.pop(name, None)
    return found


def point_of(plan: Decisions) -> Point:
    """The point of one plan."""
    return Point(plan.budget, plan.predicted_ns, plan.lower_bound_ns, other_policies(plan))


def sweep(make: Callable[[int], Decisions], *, lowest: int, highest: int) -> tuple[Point, ...]:
    """Time against budget from the floor (`lowest`) to all weights (`highest`); `make` plans for a budget."""
    budgets = sorted({lowest + int((highest - lowest) * share) for share in SHARES})
    return tuple(point_of(make(budget)) for budget in budgets)


def curve_of(
    plan: Decisions, policies: Mapping[str, int], points: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Time against budget as lines: ascending budgets, and by name the times at these (ns or None).

    `policies` are the other ones for the plan's own budget, `points` those of a sweep, as `Point` has them.
    Without a sweep there is what link and compute allow at best with other budgets (`best_ns`).
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
    return {"budgets": sorted(at), "lines": lines, "logarithmic": max(drawn) > _WIDE * min(drawn)}


def best_ns(plan: Decisions, budget: int) -> int:
    """A lower bound (ns) for a pass of each method with `budget` bytes: only link and compute count.

    What the budget cannot hold of the weights that a method reads is copied in every pass of it.
    """
    found, rate = 0, plan.hardware.link_bytes_per_s / 1e9
    for trace in plan.traces:
        total = sum(plan.sizes[s] for s in {s for step in trace.steps for s in step.reads})
        found += max(trace.compute_ns, int((total + _fixed(plan) - budget) / rate))
    return found


def _fixed(plan: Decisions) -> int:
    """Bytes of the budget that are never an arena's: those of storages that the program writes or returns."""
    return sum(plan.sizes[s] for s in plan.outside if plan.arena.layout[s] < 0)

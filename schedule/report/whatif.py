"""What if: other budgets, other policies, and in words what limits a plan and what would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schedule.facts.model import Decisions, Hardware, Storage
from penstock.schedule.facts.sizes import format_size, format_time
from penstock.schedule.report.baselines import Setting, compare

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Budgets of a sweep, as shares of the way from the floor to everything."""

GIGABYTE = 10**9
_BOUND = "no plan is faster"
_ALIKE = 1.02
"""Times within this ratio are called equal."""
_WIDE = 12
"""From this ratio on times are drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Point:
    """One budget: what a plan for it takes a pass, what none can beat, and what other policies take (ns)."""

    budget: int
    predicted_ns: int
    lower_bound_ns: int | None
    policies: Mapping[str, int]


def other_policies(
    plan: Decisions, storages: Sequence[Storage], host: Hardware | None = None
) -> dict[str, int]:
    """The period of each policy that fits into the plan's budget, summed over the plan's traces."""
    outside = sum(storages[s].nbytes for s in plan.outside if storages[s].kind != "streamable")
    found: dict[str, int] = {}
    for number, trace in enumerate(plan.traces):
        setting = Setting(storages, trace, plan.budget - outside, plan.hardware)
        periods = compare(setting, host) if trace.steps else {}
        for name, ns in periods.items():
            if ns is not None and (number == 0 or name in found):
                found[name] = found.get(name, 0) + ns
            else:
                found.pop(name, None)
    return found


def point_of(plan: Decisions, storages: Sequence[Storage], host: Hardware | None = None) -> Point:
    """The point of one plan."""
    bounds = [schedule.lower_bound_ns for schedule in plan.schedules]
    known = [bound for bound in bounds if bound is not None]
    return Point(
        plan.budget,
        sum(schedule.predicted_ns for schedule in plan.schedules),
        sum(known) if len(known) == len(bounds) else None,
        other_policies(plan, storages, host),
    )


def sweep(
    make: Callable[[int], Decisions],
    storages: Sequence[Storage],
    *,
    lowest: int,
    highest: int,
    host: Hardware | None = None,
) -> tuple[Point, ...]:
    """Time against budget from the floor (`lowest`) to all weights (`highest`); `make` plans for a budget."""
    budgets = sorted({lowest + int((highest - lowest) * share) for share in SHARES})
    return tuple(point_of(make(budget), storages, host) for budget in budgets)


def curve_of(plan: Decisions, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Time against budget as lines: ascending budgets, and by name the times at these (ns or None).

    `points` are those of a sweep, as `Point` has them. Without a sweep the plan stands beside what link and
    compute allow at best with other budgets, if what does not fit is copied in every pass.
    """
    at: dict[int, dict[str, int | None]] = {}
    for one in points:
        known = {"plans by penstock": one["predicted_ns"], _BOUND: one["lower_bound_ns"]}
        at[one["budget"]] = known | one["policies"]
    if plan.sizes and not points:
        budgets = (sum(plan.sizes) * percent // 100 for percent in range(106))
        at = {one: {"link and compute at best": best_ns(plan, one)} for one in (*budgets, plan.budget)}
    at[plan.budget] = at.get(plan.budget, {}) | {"this plan": plan.predicted_ns, _BOUND: plan.lower_bound_ns}
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
        found += max(trace.compute_ns, int((total - budget) / rate))
    return found


def limit_of(plan: Decisions) -> str:
    """What sets the plan's time: `compute`, `link`, `disk`, or `memory` where none is busy all the time."""
    predicted = plan.predicted_ns
    copying = sum(plan.hardware.copy_ns(t.stop - t.start) for s in plan.schedules for t in s.transfers)
    if predicted <= plan.compute_ns * _ALIKE:
        return "compute"
    reading = sum(plan.hardware.disk_ns(nbytes) for s in plan.schedules for nbytes in s.staged if nbytes)
    busiest = max(copying, reading)
    if predicted > busiest * 1.05:
        return "memory"
    return "link" if busiest == copying else "disk"


def verdict(plan: Decisions, policies: Mapping[str, int], more: Decisions | None = None) -> tuple[str, ...]:
    """Sentences: whether streaming pays, what limits it, and what one more gigabyte buys.

    `more` is the plan for one gigabyte more, if that is less than everything.
    """
    sentences = [_limit_sentence(plan), *_best_other(plan, policies)]
    if more is not None:
        sentences.append(_more_sentence(plan, more))
    return tuple(sentences)


def _limit_sentence(plan: Decisions) -> str:
    predicted = format_time(plan.predicted_ns)
    compute = format_time(plan.compute_ns)
    if not plan.streamed_bytes:
        return "Everything fits: nothing streams."
    moved = format_size(plan.streamed_bytes)
    match limit_of(plan):
        case "compute":
            return f"Compute limits it: copying {moved} a pass hides behind {compute} of compute."
        case "link":
            rate = plan.hardware.link_bytes_per_s / 1e9
            return (
                f"The link limits it: {moved} a pass at {rate:.3g} GB/s take {predicted}, compute {compute}."
            )
        case "disk":
            read = format_size(sum(nbytes for s in plan.schedules for nbytes in s.staged))
            held = format_size(plan.host.nbytes if plan.host else 0)
            return (
                f"The disk limits it: of {moved} a pass, {read} are more than a host of {held} holds, and "
                f"reading them takes {predicted}, compute {compute}."
            )
    return (
        f"Memory limits it: within {format_size(plan.budget)} there is too little room to copy ahead, so "
        f"link and compute ({compute}) wait for each other in {predicted}."
    )


def _best_other(plan: Decisions, policies: Mapping[str, int]) -> list[str]:
    if not policies or not plan.streamed_bytes:
        return []
    name = min(policies, key=lambda policy: policies[policy])
    times = policies[name] / 1e9 / plan.predicted_seconds
    if times < 1 / _ALIKE:
        taken = format_time(policies[name])
        return [f"Another way wins here: {name!r} would take {taken}, {1 / times:.2f} times as fast."]
    if times <= _ALIKE:
        return [f"Streaming is as good as any other way here: {name!r} takes the same time."]
    return [f"Streaming pays: the best other way, {name!r}, would take {times:.2f} times as long."]


def _more_sentence(plan: Decisions, more: Decisions) -> str:
    gained = plan.predicted_seconds - more.predicted_seconds
    if gained <= plan.predicted_seconds * 0.005:
        return "One more gigabyte buys next to nothing."
    return (
        f"One more gigabyte saves {format_time(gained * 1e9)} a pass ({gained / plan.predicted_seconds:.1%})."
    )

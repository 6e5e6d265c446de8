"""A ladder of plans: some budgets from the floor up, for a program that cannot plan by itself.

A budget between two rungs is run by the lower one, so it streams more bytes than it would have to. The
second rung is twice the floor, because at the floor nothing can arrive while a step computes. From there
each rung streams the same share of the bytes of the one below, so that this loss has one limit wherever a
budget falls. Memory is five to ten times as fast as the disks that weights come from, so that a sixth of the
weights arrives while a pass reads them all: there the shares end, and the last rung holds everything.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.plan import Plan

RUNGS = 8
"""The usual number of plans in a ladder."""

_LAST = 6
"""The last rung that streams anything streams one part in so many of what the second one does."""


def budgets(lowest: int, highest: int, rungs: int = RUNGS) -> tuple[int, ...]:
    """The budgets of a ladder in bytes, ascending, from the floor `lowest` to all weights, `highest`.

    Raises PlanError for fewer than two rungs.
    """
    if rungs < 2:
        raise PlanError(
            f"a ladder has two plans or more, got {rungs}: the floor's, and one that streams nothing"
        )
    most, steps = max(0, highest - 2 * lowest), rungs - 3
    spaced = {highest - int(most * _LAST ** (-k / max(1, steps))) for k in range(steps + 1)}
    return tuple(sorted({lowest, highest, *(nbytes for nbytes in spaced if nbytes > lowest)}))


def ladder(make: Callable[[int], Plan], lowest: int, highest: int, rungs: int = RUNGS) -> tuple[Plan, ...]:
    """The plans that `make` makes for the budgets of a ladder, by ascending budget.

    A plan that is no faster than the one below it and moves no fewer bytes is left out: nothing is gained by
    its memory. Raises PlanError for fewer than two rungs.
    """
    plans: list[Plan] = []
    for budget in budgets(lowest, highest, rungs):
        plan = make(budget)
        if not plans or _gains(plan, plans[-1]):
            plans.append(plan)
    return tuple(plans)


def _gains(plan: Plan, lower: Plan) -> bool:
    return plan.streamed_bytes < lower.streamed_bytes or plan.predicted_ns < lower.predicted_ns

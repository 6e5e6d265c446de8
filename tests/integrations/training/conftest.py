"""What tests of training share: a cache of weights, and plans that have half of the weights in memory."""

import functools

import pytest

from penstock.integrations.called import plans as planning
from penstock.schedule.facts.errors import BudgetError


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Equal weights are written once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plans():
    """Let a plan have a share of the weights in memory; 0 is the floor, and None what the cap allows.

    Tiny calls take more memory than weights, which would all stay.
    """
    shares = {"now": 0.5}
    original = planning.plan_orders

    def plan_orders(orders, options, steps, units, *, budget, **asked):
        plan = functools.partial(original, orders, options, steps, units, **asked)
        if shares["now"] is None:
            return plan(budget=budget)
        try:
            return plan(budget=max(1, int(shares["now"] * steps.facts.nbytes)))
        except BudgetError as error:
            return plan(budget=error.floor_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan_orders", plan_orders)
        yield shares


@pytest.fixture(autouse=True)
def half_streams(plans):
    plans["now"] = 0.5

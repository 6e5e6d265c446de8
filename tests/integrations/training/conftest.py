"""What tests of training share: a cache of weights, and plans that have half of the weights in memory."""

from __future__ import annotations

import pytest

from penstock.integrations.called import component
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
    original = component.plan_orders

    def plan_orders(orders, arena, steps, units, budget):
        if shares["now"] is None:
            return original(orders, arena, steps, units, budget)
        try:
            return original(orders, arena, steps, units, max(1, int(shares["now"] * steps.facts.nbytes)))
        except BudgetError as error:
            return original(orders, arena, steps, units, error.floor_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(component, "plan_orders", plan_orders)
        yield shares


@pytest.fixture(autouse=True)
def half_streams(plans):
    plans["now"] = 0.5

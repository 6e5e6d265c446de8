"""A ladder of plans: which budgets it has, and what a budget between two of them loses."""

from functools import partial
from itertools import pairwise

import pytest

from penstock.schedule.facts.model import Hardware, Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.plan import budgets, ladder
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena

MIB = 1 << 20


def test_budgets_reach_from_the_floor_to_everything_and_stream_shares_of_the_one_below():
    found = budgets(10 * MIB, 1000 * MIB)
    assert len(found) == 8
    assert found[:2] == (10 * MIB, 20 * MIB)
    assert found[-1] == 1000 * MIB
    streamed = [1000 * MIB - one for one in found[1:-1]]
    shares = [after / before for before, after in pairwise(streamed)]
    assert shares == pytest.approx([6 ** (-1 / 5)] * 5)


@pytest.mark.parametrize(("lowest", "highest", "expected"), [(10, 10, (10,)), (9, 10, (9, 10))])
def test_short_ladders(lowest, highest, expected):
    assert budgets(lowest, highest) == expected


def test_a_budget_between_two_rungs_loses_no_more_than_the_page_says():
    storages = tuple(Storage(16 * MIB, "streamable") for _ in range(40))
    per = int(16 * MIB / 2e9 * 1e9 / 5)
    trace = Trace("forward", 0, "", tuple(Step(f"s{k}", (k,), 0, per) for k in range(40)), 0, 0, "modelled")
    arena = packed_arena(storages, (trace,), kind="paged", granule=2 * MIB, alignment=2 * MIB)
    problem = Problem(storages, (trace,), arena, hardware=Hardware("test", 1e12, 1e10, 2e9, 100_000, 8 * MIB))
    lowest, highest = floor(problem).upper_bytes, 40 * 16 * MIB
    make = partial(make_plan, problem, effort=0.05)
    rungs = ladder(make, lowest, highest)
    assert [one.budget for one in rungs] == list(budgets(lowest, highest))
    assert [one.streamed_bytes for one in rungs][-1] == 0
    for k in (1, 5):
        budget = lowest + (highest - lowest) * k // 12
        below = max((one for one in rungs if one.budget <= budget), key=lambda one: one.budget)
        assert below.predicted_ns <= 1.45 * make(budget).predicted_ns


def test_a_plan_that_gains_nothing_is_left_out():
    storages = (Storage(4096, "streamable"), Storage(64, "mutable"))
    trace = Trace("forward", 0, "", (Step("s", (0,), 0, 100),), 0, 0, "modelled")
    arena = packed_arena(storages, (trace,), kind="contiguous", granule=64, alignment=64)
    problem = Problem(storages, (trace,), arena, hardware=Hardware("test", 1e12, 1e11, 1e10, 10))
    asked = []

    def make(budget):
        asked.append(budget)
        return make_plan(problem, max(budget, floor(problem).upper_bytes))

    (only,) = ladder(make, 2000, 4160)
    assert only.streamed_bytes == 0
    assert len(asked) > 1

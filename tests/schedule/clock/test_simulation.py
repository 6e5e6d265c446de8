"""Plans on a virtual clock: the prediction to the nanosecond, and where steps wait."""

import pytest
from hypothesis import given, settings

from penstock.schedule.clock.event_graph import launched_steps, settle, stalls_of
from penstock.schedule.planner import floor, make_plan
from tests.hunt import scaled
from tests.schedule.traces import equal_problem, problems

UNIT = 4096


@pytest.mark.random
@given(problems())
@settings(max_examples=scaled(75))
def test_simulation_and_prediction_agree_to_the_nanosecond(p):
    budget = p.budget(floor(p).upper_bytes)
    plan = make_plan(p, budget)
    for which, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        done = settle(trace, schedule, plan.hardware, plan.wrap, launched=launched_steps(plan, which))
        assert done.period_ns == schedule.predicted_ns


def test_a_pass_is_its_compute_and_its_stalls():
    p = equal_problem(20, 0.1)
    plan = make_plan(p, 5 * UNIT)
    trace = plan.traces[0]
    done = settle(trace, plan.schedules[0], plan.hardware, plan.wrap)
    assert done.period_ns == trace.compute_ns + sum(stalls_of(trace, done.steady))
    assert done.first_ns == trace.compute_ns + sum(stalls_of(trace, done.first))
    assert min(stalls_of(trace, done.steady)) >= 0


def test_nothing_waits_where_everything_fits():
    p = equal_problem(4, 1)
    plan = make_plan(p, 4 * UNIT)
    done = settle(plan.traces[0], plan.schedules[0], plan.hardware, plan.wrap)
    assert stalls_of(plan.traces[0], done.steady) == [0] * 4
    assert done.period_ns == done.first_ns == 4000

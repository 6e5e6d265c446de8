"""A larger budget is never predicted slower, nor does a middle one move more than the smallest does."""

from itertools import product

import pytest
import torch

import penstock
from penstock.schedule.facts.model import Hardware
from penstock.schedule.planner import RUNGS
from penstock.schedule.sparse.pool import missed
from tests.hunt import nightly_but
from tests.runtime.sparse.sparse_models import Experts, Mixed, routes

MACHINES = {
    "warm": Hardware("warm", 5e11, 2e10, 2.4e10, 3_000),  # the page cache: copies hide behind compute
    "disk": Hardware("disk", 5e11, 2e10, 2e9, 60_000),
    "slow": Hardware("slow", 5e11, 2e10, 2e8, 60_000),
}


def moved(plan):
    """Bytes that a pass is expected to move."""
    pool = plan.pool
    units = [missed(trace, pool).nbytes for trace in plan.traces] if pool else []
    return plan.streamed_bytes + sum(units)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budgets")
    torch.manual_seed(0)
    mixed = torch.export.export(Mixed().eval(), (torch.arange(2), routes(2, 0, layers=2)))
    experts = torch.export.export(Experts(torch.float32).eval(), (torch.randn(1, 128), routes(1, 0)))
    return {
        "mixed": penstock.compile(mixed, folder / "mixed.penstock"),
        "experts": penstock.compile(experts, folder / "experts.penstock"),
    }


@pytest.mark.parametrize(
    ("machine", "arena"),
    nightly_but(
        {("disk", "mapped"), ("slow", "mapped")}, [*product(MACHINES, ("mapped",)), ("slow", "paged")]
    ),
)
def test_no_rung_is_slower_than_the_one_below(programs, machine, arena):
    program = programs["mixed"]
    floor = program.floor(arena=arena)
    rungs = [program.weight_bytes * number // RUNGS for number in range(1, RUNGS + 1)]
    plans = [
        program.plan(rung, hardware=MACHINES[machine], arena=arena)
        for rung in (floor, *rungs)
        if rung >= floor
    ]
    times = [plan.predicted_ns for plan in plans]
    assert len(times) > RUNGS // 2
    assert times == sorted(times, reverse=True)
    assert sum(plan.pool is not None for plan in plans) > 2
    assert plans[-1].predicted_ns == plans[-1].compute_ns


@pytest.mark.parametrize(
    ("name", "machine"),
    nightly_but({("mixed", "slow"), ("experts", "disk")}, product(("mixed", "experts"), MACHINES)),
)
def test_a_larger_budget_moves_no_more_than_the_floor(programs, name, machine):
    """Whatever granules of a mapped file come beside what a step reads."""
    program = programs[name]
    least, most = program.floor_bytes, program.weight_bytes
    budgets = [least + (most - least) * number // 8 for number in range(9)]
    found = [moved(program.plan(budget, hardware=MACHINES[machine])) for budget in budgets]
    assert max(found) == found[0]
    assert found[-1] == 0

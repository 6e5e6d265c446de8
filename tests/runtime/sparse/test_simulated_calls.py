"""Recorded calls on the clock move the very bytes that the run moved, call by call."""

import time

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.schedule.sparse.replay import replay, simulated_calls
from penstock.schedule.sparse.routes import profile_of, served_profile
from tests.engines import ENGINES
from tests.runtime.sparse.sparse_models import SLOW, Experts, Head, routes

CALLS = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Experts(torch.float32).eval()


@pytest.fixture(scope="module")
def program(model, tmp_path_factory):
    exported = torch.export.export(model, (torch.randn(2, 128), routes(2, 0)))
    return penstock.compile(exported, tmp_path_factory.mktemp("calls") / "experts.penstock")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", ["floor", 384 << 10, 832 << 10, "20%", "50%"])
def test_each_call_moves_the_bytes_that_the_run_moved(program, model, budget, engine):
    """At the smallest budgets dense weights stream, too, and reads run in rounds."""
    given = program.floor(arena="paged") if budget == "floor" else budget
    # Copies that are on their way between calls would be counted in the one or in the other.
    plan = program.plan(given, hardware=SLOW, arena="paged", wrap="barrier")
    assert plan.pool is not None
    moved = []
    loaded = program.load(plan=plan, options=LoadOptions(engine=engine))
    with loaded as module, torch.no_grad(), module.record_routes() as recorder:
        while module.stats.bytes_moved < sum(one.nbytes for one in plan.resident):
            time.sleep(0.001)  # what stays comes once, and may still be on its way when the first call begins
        for number in range(CALLS):
            before = module.stats.bytes_moved
            rows, route = torch.randn(2, 128), routes(2, number)
            assert torch.equal(module(rows, route), model(rows, route))
            moved.append(module.stats.bytes_moved - before)
    facts = program.payload
    profile = profile_of(recorder.routes, facts.storages, facts.traces, facts.storage_names())
    calls = simulated_calls(plan, profile)
    assert [one.missed.nbytes + one.copied_bytes for one in calls] == moved
    small = isinstance(budget, int) or budget == "floor"
    assert (max(one.rounds for one in calls) > 6) == small
    assert all(one.total_ns >= plan.compute_ns for one in calls)
    worst = plan.predicted_ns - sum(plan.pool.expected_ns) + sum(plan.pool.worst_ns)
    assert all(one.total_ns <= worst + 1 for one in calls[1:])


def test_a_call_by_tiles_moves_all_of_them(tmp_path_factory):
    """They are not recorded, and every call asks for them, and for rows of the same table."""
    torch.manual_seed(0)
    model = Head(torch.bfloat16, tied=True).eval()
    ids = torch.arange(4)[None]
    exported = torch.export.export(model, (ids,))
    program = penstock.compile(exported, tmp_path_factory.mktemp("tiles") / "head.penstock")
    plan = program.plan("20%", hardware=SLOW, arena="paged", wrap="barrier")
    assert plan.pool is not None
    assert plan.pool.tiles
    moved = []
    with program.load(plan=plan) as module, torch.no_grad(), module.record_routes() as recorder:
        for start in (0, 4000, 0):
            before = module.stats.bytes_moved
            assert torch.equal(module(ids + start), model(ids + start))
            moved.append(module.stats.bytes_moved - before)
    facts = program.payload
    profile = profile_of(recorder.routes, facts.storages, facts.traces, facts.storage_names())
    calls = simulated_calls(plan, profile)
    assert [one.missed.nbytes + one.copied_bytes for one in calls] == moved
    assert min(moved) > 32 << 20
    # Plans with routes, and replays, count them, too.
    again = program.plan("20%", hardware=SLOW, arena="paged", routes=recorder.routes)
    assert again.pool is not None
    assert again.pool.expected_ns[0] >= (32 << 20) * 10
    served = served_profile(profile, plan.traces, plan.pool, plan.names)
    assert replay(served, plan.pool).penstock.nbytes == sum(one.missed.nbytes for one in calls)

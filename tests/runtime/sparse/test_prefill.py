"""A prefill that asks for all experts reads them whole by the plan where that is faster; decode by units."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.schedule.facts import problem
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Hardware
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.runtime.sparse.sparse_models import Experts, routes

TOKENS = 256
SLOW_COMPUTE = Hardware("toy", 1e10, 2e10, 2e9, 60_000)
"""Computing a prefill takes half as long as reading all experts."""
SLOW_DISK = Hardware("toy", 5e11, 2e10, 2e8, 60_000)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Experts(torch.float32).eval()


@pytest.fixture(scope="module")
def program(model, tmp_path_factory):
    exported = {
        name: torch.export.export(model, (torch.randn(tokens, 128), routes(tokens, 0)))
        for name, tokens in (("prefill", TOKENS), ("decode", 1))
    }
    return penstock.compile(exported, tmp_path_factory.mktemp("prefill") / "experts.penstock")


@pytest.fixture(scope="module", autouse=True)
def as_many_prompts_as_tokens():
    """So few layers would read prompts by units, as tokens count more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "TOKENS_A_PROMPT", 1)
        yield


def times(plan):
    """The predicted ns of a pass of each method."""
    return [plan.expected_ns(number) for number in range(len(plan.traces))]


@pytest.fixture(scope="module")
def barrier(as_many_prompts_as_tokens, program):
    return program.plan("40%", hardware=SLOW_COMPUTE, arena="paged", wrap="barrier")


@pytest.fixture(scope="module")
def overlapped(as_many_prompts_as_tokens, program):
    return program.plan("40%", hardware=SLOW_COMPUTE, arena="paged")


@pytest.mark.parametrize("engine", ENGINES)
def test_prefill_streams_whole_and_decode_reads_units(program, model, barrier, engine):
    plan = barrier
    assert plan.pool is not None
    assert not plan.pool.dense
    prefill, decode = plan.schedules
    every = sum(plan.sizes[s] for s in plan.pool.storages)
    assert prefill.moved_bytes("in") > every // 2
    assert decode.moved_bytes("in") < every // 50
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module, torch.no_grad():
        moved = [module.stats.bytes_moved]
        for call, tokens in enumerate((TOKENS, 1, 1, TOKENS, 1)):
            rows, route = torch.randn(tokens, 128), routes(tokens, call)
            name = "prefill" if tokens > 1 else "decode"
            assert torch.equal(module.call(name, rows, route), model(rows, route))
            moved.append(module.stats.bytes_moved)
        assert module.stats.misses == 0
        assert module.stats.peak_bytes <= plan.budget
    took = [after - before for before, after in pairwise(moved)]
    units = 3 * 2 * (512 * 128 + 128 * 256) * 4  # two experts of three layers
    assert took[0] >= prefill.moved_bytes("in")
    assert all(
        0 < one <= units + decode.moved_bytes("in") + plan.arena_bytes for one in (*took[1:3], took[4])
    )
    assert took[1] < took[0] / 4


def test_the_faster_way_is_taken(program, overlapped):
    """Nothing hides behind compute that takes no time, and rounds read as much: the pool serves both."""
    plan = program.plan("40%", hardware=SLOW_DISK, arena="paged")
    assert plan.pool is not None
    assert plan.pool.dense
    assert plan.streamed_bytes == 0
    # Where copies hide behind compute, no other plan of the same budget takes as little.
    rounds = sum(plan.pool.worst_ns) * SLOW_DISK.link_bytes_per_s / SLOW_COMPUTE.link_bytes_per_s
    assert times(overlapped)[0] < overlapped.traces[0].compute_ns + 0.9 * rounds
    assert overlapped.predicted_ns <= sum(trace.compute_ns for trace in overlapped.traces) + rounds


def test_the_verifier_holds_a_plan_to_what_its_pool_serves(program, overlapped):
    plan, facts = overlapped, program.payload
    verify_plan(facts.storages, facts.traces, plan)
    assert plan.pool is not None
    with pytest.raises(PlanError):
        verify_plan(facts.storages, facts.traces, replace(plan, pool=replace(plan.pool, dense=True)))

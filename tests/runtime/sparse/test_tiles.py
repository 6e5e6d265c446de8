"""Heads that are computed by tiles: bits, the floor, and sizes at which tiles have other bits."""

import pytest
import torch
from torch.export import Dim, export

import penstock
from penstock import LoadOptions
from penstock.runtime.sparse import trust
from tests.runtime.sparse.sparse_models import Head, seeded
from tests.schedule.traces import machine

MIB = 1 << 20
SLOW = machine(1e8)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((torch.bfloat16, True), id="tied"),
        pytest.param((torch.float32, False), id="float32"),
        pytest.param((torch.bfloat16, False), id="bfloat16", marks=pytest.mark.nightly),
    ],
)
def case(request, tmp_path_factory):
    dtype, tied = request.param
    model = Head(dtype, tied=tied).eval()
    with torch.no_grad():
        exported = export(
            model, (torch.arange(2),), dynamic_shapes={"ids": {0: Dim("tokens", min=1, max=64)}}
        )
    return model, penstock.compile(exported, tmp_path_factory.mktemp("head") / "head.penstock"), tied


def logits(model, ids):
    with torch.no_grad():
        return model(ids)


def test_the_floor_is_below_the_head(case):
    _, program, _ = case
    dense = 1024 * 1024 * (4 if "float32" in str(program.payload.weights[0].parts[0].dtype) else 2)
    assert dense <= program.floor_bytes < dense + 3 * MIB


@pytest.mark.parametrize("budget", ["floor", "10MiB", "50MiB"])
def test_the_bits_are_those_of_the_whole(case, budget):
    model, program, _ = case
    plan = program.plan(program.floor_bytes if budget == "floor" else budget, hardware=SLOW)
    assert plan.pool is not None
    assert plan.pool.tiles
    with program.load(plan=plan, options=LoadOptions(check_reads=budget == "10MiB")) as module:
        for seed, tokens in enumerate((1, 3, 1)):
            ids = torch.randint(model.words.num_embeddings, (tokens,), generator=seeded(seed))
            assert torch.equal(module(ids), logits(model, ids))
        assert module.stats.peak_bytes <= plan.budget
        head = model.head.weight.nbytes
        kept = plan.pool.nbytes
        assert module.stats.bytes_moved >= 3 * (head - kept)


def test_a_budget_that_holds_the_head_computes_it_whole(case):
    _, program, tied = case
    plan = program.plan("80MiB" if not tied else "67MiB", hardware=SLOW)
    assert plan.pool is None or not plan.pool.tiles


def test_sizes_at_which_tiles_have_other_bits_are_refused(case, monkeypatch):
    model, program, _ = case
    trust._repeats.cache_clear()
    plan = program.plan("10MiB", hardware=SLOW)
    with program.load(plan=plan) as module:
        monkeypatch.setattr(trust, "linear", lambda x, w, b: torch.nn.functional.linear(x, w, b) + len(w))
        with pytest.raises(penstock.StreamError, match=r"product of 5 rows .* tiles"):
            module(torch.arange(5))
        monkeypatch.undo()
        trust._repeats.cache_clear()
        assert torch.equal(module(torch.arange(5)), logits(model, torch.arange(5)))
    with monkeypatch.context() as patch:
        trust._repeats.cache_clear()
        patch.setattr(trust, "linear", lambda x, w, b: torch.nn.functional.linear(x, w, b) + len(w))
        with pytest.raises(penstock.BudgetError):
            program.plan("10MiB", hardware=SLOW)
    trust._repeats.cache_clear()

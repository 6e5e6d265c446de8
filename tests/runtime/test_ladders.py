"""Plans for programs without Python, in the payload: where they come from, and that each of them runs."""

import json
import shutil

import pytest
import torch

import penstock as library
from penstock import LoadOptions
from penstock.runtime.files.artifact_files import PAYLOAD, digest_line
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.sizes import format_size
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

X = torch.ones(2, 64)


def exported(layers):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(64, 64, bias=False) for _ in range(layers)]
    return torch.export.export(torch.nn.Sequential(*linears), (X,))


@pytest.fixture(scope="module")
def laddered(tmp_path_factory):
    without = library.compile(exported(36), tmp_path_factory.mktemp("ladder") / "a.penstock")
    assert without.payload.plans == ()
    return without.write_ladder()


@pytest.mark.usefixtures("native")
def test_the_plans_of_a_ladder_run_on_the_native_engine_with_equal_outputs(laddered):
    plans, expected = laddered.payload.plans, exported(36).module()(X)
    assert [plan.budget for plan in plans] == sorted({plan.budget for plan in plans})
    assert len(plans) > 4
    floors = [laddered.floor(arena=arena) for arena in laddered.arenas() if arena != "mapped"]
    assert (plans[0].budget, plans[-1].budget) == (min(floors), laddered.weight_bytes)
    for plan in plans:
        assert plan.arena.backing == "anonymous" or plan.arena.kind == "contiguous"
        with laddered.load(plan=plan, options=LoadOptions(engine="native")) as module, torch.no_grad():
            assert torch.equal(module(X), expected)
            assert module.stats.peak_bytes <= plan.budget
            assert (module.stats.bytes_moved > 0) == (plan is not plans[-1])


def test_an_artifact_with_a_ladder_is_whole(laddered, penstock):
    assert library.open(laddered.path).payload.plans == laddered.payload.plans
    assert penstock("verify", laddered.path).status == 0


def test_the_command_writes_a_ladder_and_says_for_which_budgets(tmp_path, penstock):
    torch.export.save(exported(3), tmp_path / "model.pt2")
    artifact = tmp_path / "a.penstock"
    done = penstock("compile", "--trust", tmp_path / "model.pt2", artifact, "--ladder")
    assert done.status == 0, done.err
    budgets = [plan.budget for plan in library.open(artifact).payload.plans]
    assert len(budgets) > 1
    assert f"plans for {', '.join(map(format_size, budgets))}" in " ".join(done.out.split())


def test_a_plan_of_the_ladder_that_is_not_safe_is_refused_by_its_number(laddered, tmp_path):
    folder = shutil.copytree(laddered.path, tmp_path / "a.penstock")
    path = folder / PAYLOAD
    payload = json.loads(path.read_bytes())
    payload["plans"][1]["arena_bytes"] //= 2
    data = json.dumps(payload).encode()
    path.write_bytes(data)
    (folder / f"{PAYLOAD}.sha256").write_bytes(digest_line(data))
    with pytest.raises(PlanError, match="plan 1 of the payload is not safe"):
        library.open(folder)


def test_a_program_without_weights_has_a_ladder_of_one_plan(tmp_path):
    program = torch.export.export(torch.nn.ReLU(), (X,))
    (only,) = library.compile(program, tmp_path / "a.penstock", ladder=True).payload.plans
    assert only.streamed_bytes == 0

"""The commands on programs that are read by units, or trained with kept values that may leave memory."""

import json
import logging

import pytest
import torch
from torch.export import export

import penstock as api
from penstock.schedule.payload.codec import plan_from_json
from tests.runtime.sparse.shared_pages import Model, inputs
from tests.training_models import DECODER

GIVEN = ("--budget", "50%", "--hardware", "laptop")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("units") / "model.penstock"
    api.compile(export(Model(), inputs(0)), path)
    return path


def test_inspect_lists_what_may_be_read_by_units(penstock, artifact):
    said = " ".join(penstock("inspect", artifact).out.split())
    assert "May be read by units" in said
    assert "aten.embedding.default" in said
    facts = json.loads(penstock("inspect", artifact, "--json").out)
    assert [len(step["sparse"]) for step in facts["traces"][0]["steps"]] == [1, 1, 1]
    graph = json.loads(penstock("inspect", artifact, "--graph", "json").out)
    assert sorted(edge["units"] for edge in graph["edges"] if edge["why"] == "reads") == [64, 64, 4096]


def test_plan_says_what_the_pool_holds_and_how_long_it_is_waited_for(penstock, artifact, tmp_path):
    facts = json.loads(penstock("plan", artifact, *GIVEN, "--json", "--compare").out)
    plan, units = plan_from_json(json.dumps(facts["plan"])), facts["units"]
    assert plan.pool is not None
    assert units["pool_bytes"] == plan.pool.nbytes
    assert units["weight_bytes"] == sum(plan.sizes[s] for s in plan.pool.storages)
    assert 0 < units["expected_wait_seconds"] < units["worst_wait_seconds"]
    assert facts["predicted_seconds"] >= units["expected_wait_seconds"]
    said = " ".join(penstock("plan", artifact, *GIVEN, "--report", tmp_path / "plan.html").out.split())
    assert "for the rows or experts of 3 weights" in said
    assert "if all are asked for equally often, at worst" in said
    assert "measured in a load" in said
    assert "Everything fits" not in said
    assert "rows or experts" in (tmp_path / "plan.html").read_text()


def test_all_of_the_budget_has_no_pool(penstock, artifact):
    facts = json.loads(penstock("plan", artifact, "--budget", "100%", "--hardware", "laptop", "--json").out)
    assert facts["plan"]["pool"] is None
    assert "units" not in facts
    assert facts["verdict"][0].startswith("Everything fits: ")


WITHIN = ("--budget", "20%", "--hardware", "laptop")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "trained.penstock"
    api.compile_training(
        DECODER.model(),
        path,
        example=DECODER.inputs(),
        trainable=DECODER.patterns,
        spill=True,
        evaluate=False,
    )
    return path


def test_inspect_counts_kept_values_apart(penstock, trained):
    facts = json.loads(penstock("inspect", trained, "--json").out)
    sizes = {kind: [s["nbytes"] for s in facts["storages"] if s["kind"] == kind] for kind in ("produced",)}
    assert facts["value_bytes"] == sum(sizes["produced"]) > 0
    assert facts["weight_bytes"] + facts["value_bytes"] == sum(s["nbytes"] for s in facts["storages"])
    assert facts["dynamic_values"] == []
    said = " ".join(penstock("inspect", trained).out.split())
    assert f"in {len(sizes['produced'])} places, within the budget" in said
    assert f"in {len(facts['storages']) - len(sizes['produced'])} storages" in said
    assert "Kept values" in said
    assert "beside the budget:" not in said


def test_plan_says_what_is_written(penstock, trained, tmp_path):
    facts = json.loads(penstock("plan", trained, *WITHIN, "--json", "--compare").out)
    transfers = [t for schedule in facts["plan"]["schedules"] for t in schedule["transfers"]]
    assert (
        facts["written_bytes"]
        == sum(t["stop"] - t["start"] for t in transfers if t["direction"] == "out")
        > 0
    )
    assert facts["value_bytes"] == api.open(trained).value_bytes
    assert {row["policy"] for row in facts["comparison"]} == {"this plan", "best possible"}
    asked = (*WITHIN, "--report", tmp_path / "plan.html", "--timeline", tmp_path / "plan.json")
    said = " ".join(penstock("plan", trained, *asked).out.split())
    assert f"in {sum(t['direction'] == 'in' for t in transfers)} transfers" in said
    assert f"in {sum(t['direction'] == 'out' for t in transfers)} transfers and reads them again" in said
    assert "taken to be that of reads" in said
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    whole = " ".join(penstock("plan", trained, "--budget", "100%", "--hardware", "laptop").out.split())
    assert "within the budget; none leaves memory" in whole


def test_simulate_runs_methods_in_turn_and_counts_what_is_written(penstock, trained):
    rounds, forward, backward = json.loads(
        penstock("simulate", trained, "--budget", "20%", "--device", "sim:laptop", "--json").out
    )
    assert rounds["method"] == "forward + backward"
    assert rounds["copied_bytes"] > 0
    assert forward["bytes_written"] == 3 * rounds["written_bytes"] > 0
    assert backward["bytes_written"] == 0
    assert len(backward["pass_seconds"]) == 3
    assert "written" in penstock("simulate", trained, *WITHIN).out


def test_run_runs_what_begins_a_round_and_refuses_what_does_not(penstock, trained):
    done = json.loads(penstock("run", trained, "--budget", "20%", "--method", "forward", "--json").out)
    assert done["bytes_written"] > 0
    refused = penstock("run", trained, "--budget", "20%", "--method", "backward")
    assert refused.status
    assert "cannot run by itself" in " ".join(refused.err.split())


def test_verify_hashes_weights_alone(penstock, trained):
    verified = json.loads(penstock("verify", trained, "--json").out)["verified_bytes"]
    assert verified == api.open(trained).weight_bytes


class Scaled(torch.nn.Module):
    """Keeps scaled weights, whose size is fixed, and values of as many rows as the input has."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(64, 64) for _ in range(2))
        self.scales = torch.nn.ParameterList(torch.ones(64, 64) for _ in range(2))

    def forward(self, x):
        for weight, scale in zip(self.weights, self.scales, strict=True):
            x = torch.relu(x @ (weight * scale))
        return x.sum()


def test_inspect_names_values_of_dynamic_size(penstock, tmp_path):
    given = {"example": (torch.randn(8, 64),), "trainable": ["scales.*"], "evaluate": False}
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    path = tmp_path / "scaled.penstock"
    program = api.compile_training(Scaled(), path, **given, dynamic_shapes=rows, spill=True)
    assert program.value_bytes >= 64 * 64 * 4
    named = json.loads(penstock("inspect", path, "--json").out)["dynamic_values"]
    assert named
    said = " ".join(penstock("inspect", path).out.split())
    assert f"{len(named)} of dynamic size stay in memory, beside the budget: {named[0]}" in said


class Unscaled(torch.nn.Module):
    """Keeps values of as many rows as the input has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).sum()


def test_a_program_that_keeps_nothing_of_fixed_size_is_told_of(tmp_path, caplog):
    model = Unscaled()
    given = {"example": (torch.randn(8, 64),), "trainable": ["first.*"], "evaluate": False}
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    with caplog.at_level(logging.WARNING, logger="penstock"):
        program = api.compile_training(
            model, tmp_path / "x.penstock", **given, dynamic_shapes=rows, spill=True
        )
    assert not program.value_bytes
    assert "spill=True has no effect" in caplog.text


def test_an_arena_of_the_files_own_pages_is_refused_by_a_sentence(penstock, trained):
    refused = penstock("plan", trained, *WITHIN, "--arena", "mapped")
    said = " ".join(refused.err.split())
    assert refused.status
    assert "an arena 'mapped' has the weight files' own pages" in said
    assert "choose from contiguous, paged, or compile with spill=False" in said

"""The commands on a program whose tables and experts may be read by units."""

import json

import pytest
from torch.export import export

import penstock as api
from penstock.schedule.payload.codec import plan_from_json
from tests.cli.command_line import penstock_fixture
from tests.runtime.sparse.shared_pages import Model, inputs

__all__ = ["penstock_fixture"]
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

"""`penstock plan` with its questions, and `penstock simulate`."""

import html
import json
import math
from dataclasses import replace
from datetime import date

import pytest
import torch
from torch import nn

import penstock as api
from penstock.cli.plan import _facts
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import UNEVEN


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    exported = torch.export.export(model, (torch.randn(2, 512),))
    folder = tmp_path_factory.mktemp("plans") / "stack.penstock"
    api.compile(exported, folder)
    return folder


def test_a_plan_says_how_far_from_the_bound_it_is_and_what_limits_it(penstock, artifact):
    done = penstock("plan", artifact, "--budget", "50%", "--hardware", "rtx4090")
    assert done.status == 0
    assert "best possible" in done.out
    assert "above the best possible" in done.out
    assert "limits it" in done.out
    assert "a preset, from public figures" in done.out
    assert "contiguous" in done.out  # a device behind a link has one buffer


def test_comparison_and_sweep(penstock, artifact):
    given = ("plan", artifact, "--budget", "50%", "--hardware", "l4", "--compare", "--sweep")
    said = penstock(*given).out
    for name in ("this plan", "on demand", "one block ahead", "least recently used", "rest on the host"):
        assert name in said
    assert "Seconds a pass by budget" in said
    facts = json.loads(penstock(*given, "--json").out)
    names = "comparison confidence floor_bytes lower_bound_seconds plan predicted_seconds sweep verdict"
    assert sorted(facts) == names.split()
    assert facts["plan"]["hardware"]["name"] == "l4"
    assert facts["confidence"]["level"] == "assumed"
    periods = [point["predicted_ns"] for point in facts["sweep"]]
    assert periods == sorted(periods, reverse=True)
    times = {row["policy"]: row["times"] for row in facts["comparison"]}
    assert times["this plan"] == 1
    assert times["on demand"] > 1
    assert times["best possible"] <= 1


def test_more_bytes_a_pass_than_the_model_has_are_explained(artifact):
    program = api.open(artifact)
    plan = program.plan("50%", hardware="l4")
    twice = replace(plan, schedules=tuple(replace(s, transfers=s.transfers * 2) for s in plan.schedules))
    for decided, told in ((plan, False), (twice, twice.streamed_bytes > program.largest_budget)):
        assert ("comes more than once" in dict(_facts(program, decided))["streamed each pass"]) == told
    assert twice.streamed_bytes > program.largest_budget


def test_doubt_about_rates_is_one_short_row(artifact):
    program = api.open(artifact)
    plan = program.plan("50%", hardware="l4")
    doubted = replace(plan, hardware=replace(plan.hardware, note=f"measured on l4; {UNEVEN}"))
    assert _facts(program, doubted)[-1] == ("rates", f"l4: doubtful: {UNEVEN}; measured on l4")
    preset = "l4: assumed: a preset, from public figures; none of it was measured"
    assert _facts(program, plan)[-1] == ("rates", preset)


def test_json_has_the_plan_and_what_it_comes_to(penstock, artifact):
    facts = json.loads(penstock("plan", artifact, "--budget", "50%", "--hardware", "l4", "--json").out)
    (schedule,) = facts["plan"]["schedules"]
    assert facts["predicted_seconds"] == schedule["predicted_ns"] / 1e9
    assert facts["lower_bound_seconds"] == schedule["lower_bound_ns"] / 1e9 <= facts["predicted_seconds"]
    assert facts["floor_bytes"] == api.open(artifact).floor(arena="contiguous") < facts["plan"]["budget"]
    assert len(facts["plan"]["names"]) == len(facts["plan"]["sizes"]) > 0


def test_a_longer_search_is_asked_for_and_says_where_it_changes_nothing(penstock, artifact, caplog):
    given = ("plan", artifact, "--budget", "60%", "--hardware", "rtx4090", "--json")
    usual = json.loads(penstock(*given).out)
    longer = json.loads(penstock(*given, "--optimal", "--seconds", "2").out)
    assert longer["predicted_seconds"] < usual["predicted_seconds"]
    assert longer["lower_bound_seconds"] == usual["lower_bound_seconds"]
    paged = penstock("plan", artifact, "--budget", "60%", "--arena", "paged", "--optimal")
    assert paged.status == 0
    assert "effort='optimal' changes nothing here" in caplog.text
    assert penstock("plan", artifact, "--budget", "60%", "--seconds", "0").status == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "all"}, "effort= is 'usual' or 'optimal', got 'all'"),
        ({"effort": "optimal", "seconds": 0}, "seconds= is a number above 0, got 0"),
        ({"effort": "optimal", "seconds": math.inf}, "got inf"),
    ],
)
def test_an_effort_that_is_none_is_refused(artifact, options, message):
    with pytest.raises(PlanError, match=message):
        api.open(artifact).plan("60%", hardware="rtx4090", **options)


def test_terminal_page_and_json_say_the_same(penstock, artifact, tmp_path):
    given = ("plan", artifact, "--budget", "50%", "--hardware", "rtx4090", "--report", tmp_path / "plan.html")
    said = penstock(*given).out
    page = html.unescape((tmp_path / "plan.html").read_text())
    verdict = json.loads(penstock(*given, "--json", "--force").out)["verdict"]
    assert verdict[0].startswith("Streaming does not pay here: forward makes ")
    assert "the host (desktop)" in verdict[2]
    assert " ".join(verdict) in " ".join(said.split())  # which breaks lines where the terminal ends
    assert f"<h1>{verdict[0]}</h1>" in page
    assert " ".join(verdict[1:]) in page
    assert "<title>stack.penstock within 50% (4.01 MiB) - penstock</title>" in page
    assert f"penstock plan {artifact} --budget 50% --hardware rtx4090" in page
    assert date.today().isoformat() in page


def test_report_timeline_and_plan_are_written(penstock, artifact, tmp_path):
    report, timeline, plan = tmp_path / "plan.html", tmp_path / "timeline.json", tmp_path / "plan.json"
    given = ("plan", artifact, "--budget", "50%", "--hardware", "h200")
    done = penstock(*given, "--sweep", "--report", report, "--timeline", timeline, "--output", plan)
    assert done.status == 0
    assert report.read_text().startswith("<!doctype html>")
    assert json.loads(timeline.read_text())["traceEvents"]
    assert json.loads(plan.read_text())["hardware"]["name"] == "h200"


@pytest.mark.parametrize(
    ("command", "option"),
    [("plan", "--output"), ("plan", "--report"), ("plan", "--timeline"), ("run", "--output")],
)
def test_an_output_is_replaced_with_force_only(penstock, artifact, tmp_path, command, option):
    (tmp_path / "mine").write_text("mine")
    given = (command, artifact, "--budget", "50%", option, tmp_path / "mine")
    refused = penstock(*given)
    assert (refused.status, refused.out) == (2, "")
    assert "mine exists: choose another output, or overwrite it with --force" in refused.err
    assert (tmp_path / "mine").read_text() == "mine"
    assert penstock(*given, "--force").status == 0
    assert (tmp_path / "mine").read_bytes() != b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_simulation_agrees_with_the_prediction(penstock, artifact):
    (one,) = json.loads(penstock("simulate", artifact, "--budget", "30%", "--hardware", "t4", "--json").out)
    assert one["period_ns"] == one["predicted_ns"]
    assert one["first_ns"] >= one["compute_ns"]
    assert one["stall_ns"] == sum(stall["ns"] for stall in one["stalls"])
    done = penstock("simulate", artifact, "--budget", "30%", "--hardware", "t4")
    assert "steady pass" in done.out
    assert "Steps that wait" in done.out


def test_a_budget_below_the_floor_names_it(penstock, artifact):
    done = penstock("simulate", artifact, "--budget", "1", "--hardware", "t4")
    assert done.status == 2
    assert "below the floor" in done.err

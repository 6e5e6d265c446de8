"""The corpus of traces, and the ablation of the planner on it."""

import itertools
import json

import pytest

from benchmarks.corpus import list_programs, main
from benchmarks.plans import ablation
from benchmarks.plans.ablation import Case
from benchmarks.plans.stages import STAGES
from tests.benchmarks.in_process import invoke

UNREAD = {
    "llama-3.1-8b, train-lora": {"embed_tokens", "layers.0.q", "layers.0.k", "layers.0.v"},
    "vit-h-14, train-full": {"patches"},
}


def halves(program):
    late = [step for step in program.trace.steps if step.name.endswith(".backward")]
    return [step for step in program.trace.steps if step not in late], late


@pytest.mark.parametrize("name", UNREAD)
def test_a_backward_reads_the_forward_in_reverse_but_for_what_needs_no_gradient(name):
    forward, backward = halves(list_programs()[name]())
    expected = [step for step in reversed(forward) if step.name not in UNREAD[name]]
    assert len(forward) - len(expected) == len(UNREAD[name])
    assert [step.name.removesuffix(".backward") for step in backward] == [step.name for step in expected]
    assert [step.reads for step in backward] == [step.reads for step in expected]


def planned(path, against=None):
    main(count=2, seed=1283, arena="contiguous", check=True, json_path=path, against=against)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return rows


def test_the_same_seeds_give_the_same_plans(tmp_path, capsys):
    first = planned(tmp_path / "first")
    assert planned(tmp_path / "second", tmp_path / "first") == first
    assert [row["seed"] for row in first] == [1283, 1284]
    assert "2 problems: 0 plans are faster by 1 %, 0 slower." in capsys.readouterr().out


SHOWING = {
    Case("blocks", "scattered", "280", "", 8): ("branch and bound",),
    Case("blocks", "scattered", "0", "", 60): ("orders", "squeaky wheel"),
    Case("methods", "llama-3.1-8b, 1 layers, decode", "h100", "paged", 0.5): ("plans by age",),
    Case("small", "tiny 3", "laptop", "paged", 0.5): ("relaxation", "rounding in copies"),
    Case("small", "tiny 1", "laptop", "paged", 0.5): ("a quarter of the search", "joining"),
    Case("small", "tiny 12", "rtx4090", "paged", 0.75): (
        *("joining by size", "runs", "ends moved", "ends moved in pairs"),
    ),
    Case("small", "tiny 20", "l4", "paged", 0.5): ("memory left free",),
    Case("small", "llama-3.1-8b, 1 layers, decode", "l4", "contiguous", 0.5): ("large blocks at the ends",),
    Case("small", "gemma-3-27b, 2 layers, decode", "gh200", "contiguous", 0.9): ("pairs",),
    Case("small", "tiny 20", "server", "contiguous", 0.5): (
        *("largest sizes", "spread as the relaxation copies", "sizes of parts", "fewest young bytes"),
    ),
    Case("small", "tiny 11", "a100", "contiguous", 0.75): (
        "smallest sizes",
        "spread evenly",
        "joining parts of blocks",
    ),
}
"""Cases, and the stages without which their plan is another: together every stage but one."""


@pytest.mark.nightly
def test_without_any_stage_some_plan_is_another():
    for case, names in SHOWING.items():
        result = ablation.measure(case, [stage for stage in STAGES if stage.name in names])
        assert result is not None
        assert result.full[0] >= 1
        assert {name for name, (ratio, _) in result.without.items() if ratio != result.full[0]} == {*names}
    # test_a_larger_budget_keeps_the_plan_of_a_smaller_one shows the ladder
    shown = {"ladder of budgets", *itertools.chain(*SHOWING.values())}
    assert sorted(shown) == sorted(stage.name for stage in STAGES)


def test_a_tiny_run_ends_in_tables_with_the_rows_of_deleted_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "list_cases", lambda _: list(SHOWING)[:2])
    figures, document = tmp_path / "ablation.json", tmp_path / "page.md"
    gone = {"reached": 3, "no_plan": 0, "median": 1.1, "p95": 1.2, "worst": 1.3, "most": 1.5, "where": "x"}
    full = {"median": 1.0, "p95": 1.0, "worst": 1.0}
    row = gone | {"seconds": 0.9, "deleted": "2026-11-22"}
    figures.write_text(json.dumps({"tables": {"blocks": {"full": full, "stages": {"old": row}}}}))
    document.write_text(f"before\n{ablation.BEGIN}\n<!-- to here -->\nafter\n")
    command = ["--jobs", "1", "--json", str(figures), "--docs", str(document), "--note", "a test"]
    done = invoke(ablation.main, *command)

    assert done.exit_code == 0, done.output
    table = json.loads(figures.read_text())["tables"]["blocks"]
    assert table["cases"] == 2
    assert {"branch and bound", "squeaky wheel", "old"} <= table["stages"].keys()
    page = document.read_text()
    assert "| old (deleted 2026-11-22) | 3 | +10.00% | +20.00% | +30.00% | +50.0% (x) | -10% |" in page
    assert "a test" in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")

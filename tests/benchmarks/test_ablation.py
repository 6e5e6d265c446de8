"""The ablation of the planner: each stage can be left out, and a tiny run ends in its table."""

from benchmarks.plans import ablation
from benchmarks.plans.ablation import Case
from benchmarks.plans.stages import STAGES, replaced, watched
from tests.benchmarks.in_process import invoke


def test_each_stage_names_what_there_is():
    for stage in STAGES:
        with replaced(stage.swaps), watched([stage]) as reached:
            assert not reached


def test_a_tiny_run_ends_in_a_table(tmp_path, monkeypatch):
    cases = [Case("blocks", "scattered", "280", 8), Case("paged", "llama-3.1-8b", "h100", 0.5)]
    monkeypatch.setattr(ablation, "list_cases", lambda _: cases)
    document = tmp_path / "page.md"
    document.write_text(f"{ablation.BEGIN}\n<!-- to here -->\n")
    done = invoke(ablation.main, "--jobs", "1", "--docs", document)

    assert done.exit_code == 0, done.output
    page = document.read_text()
    assert "| branch and bound | +17.4% | +17.4% | +17.4% | +17.4% (scattered, 280, 8) |" in page
    assert "| plans by age |" in page

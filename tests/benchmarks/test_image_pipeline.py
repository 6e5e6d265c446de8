"""The prediction of a pipeline runs from end to end at few layers, and its figures follow from its parts."""

import json

import pytest

from benchmarks.calls.pipeline import BEGIN, main
from benchmarks.calls.pipeline_table import WHOLE
from tests.benchmarks.in_process import invoke


def test_few_layers_are_planned_within_every_cap(tmp_path):
    document, figures = tmp_path / "benchmarks.md", tmp_path / "pipeline.json"
    document.write_text(f"before\n{BEGIN}\nstale\n<!-- to here -->\nafter\n")
    caps = ["--cap", "100MB", "--cap", "2GB", "--cap", "800MB"]
    paths = ["--json", str(figures), "--docs", str(document)]

    done = invoke(main, "--layers", "1", "--pixels", "128", "--steps", "3", *caps, *paths)

    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    assert "not a measurement" in found["kind"]
    roomy, tight, none = found["images"]
    assert none["failure"].startswith("CLIP-L text encoder: of 100 MB (95.37 MiB) device memory")
    assert [one["calls"] for one in tight["components"]] == [1, 1, 3, 1]
    for image in (roomy, tight):
        assert image["peak_bytes"] <= image["cap_bytes"]
        assert image["bound_seconds"] <= image["seconds_per_image"]
        for one in image["components"]:
            assert one["compute_seconds"] <= one["bound_seconds"] <= one["seconds"]
            assert one["copied_bytes"] >= one["weight_bytes"]
    assert roomy["seconds_per_image"] < tight["seconds_per_image"]
    assert roomy["baselines"][WHOLE]["ratio"] == pytest.approx(1), "where all fits, the plan copies all once"
    assert tight["baselines"][WHOLE] == {"seconds": None, "ratio": None}
    assert tight["baselines"]["on demand"]["ratio"] > 1
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert "| 0.80 | Flux.1-dev transformer | 3 |" in text
    assert "| 0.10 | does not run: " in text

"""The benchmark of rows, on a small table: all ways find the same, and only what penstock reads is little."""

import json
from pathlib import Path

import torch

from benchmarks.experts import rows
from benchmarks.experts.rows import BEGIN, COUNTS, render
from benchmarks.table import END
from tests.benchmarks.in_process import invoke, started_here

PAGE = 4096


def test_all_ways_find_the_same_rows(request, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "started", started_here(rows.stepping, []))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    folder = Path(request.config.cache.mkdir("rows"))  # a temporary folder may have no disk behind it
    document = tmp_path / "page.md"
    document.write_text(f"{BEGIN}\nold\n{END}\n")
    sizes = ["--rows", "9000", "--width", "2048", "--rounds", "1", "--budget", "1MiB"]
    paths = ["--folder", str(folder), "--json", str(tmp_path / "facts.json"), "--docs", str(document)]

    done = invoke(rows.main, *sizes, *paths)

    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "facts.json").read_text())
    assert [*result["ways"]] == list(rows.WAYS)
    found = {name: way["steps"] for name, way in result["ways"].items()}
    assert all([step["rows"] for step in steps] == list(COUNTS) for steps in found.values())
    assert len({tuple(step["digest"] for step in steps) for steps in found.values()}) == 1
    whole = 9000 * PAGE
    for name, steps in found.items():
        for step in steps:
            if name == "whole":
                assert whole <= step["read"] < 1.01 * whole
            elif name == "penstock":
                assert step["rows"] * PAGE // 2 <= step["read"] <= step["rows"] * PAGE
    assert "old" not in document.read_text()
    assert "Measured: " in document.read_text()
    assert not list(folder.iterdir())
    assert (
        invoke(rows.main, "--render", str(tmp_path / "facts.json")).output.strip() == render(result).strip()
    )

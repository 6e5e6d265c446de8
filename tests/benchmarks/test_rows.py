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


def test_a_verdict_can_fail_and_a_failure_is_named():
    steps = [{"rows": 256, "seconds": 0.01, "processor": 0.01, "read": 100, "digest": "a"}]
    steps = [*steps, *({**steps[0], "rows": count} for count in (8, 4096))]
    other = [{**step, "digest": "b"} for step in steps]
    ways = {"penstock": steps, "mmap": other, "whole": []}
    failures = {"whole": "was killed"}
    table = {"rows": 50, "width": 100, "budget": 1000}
    machine = {"cpu": "a processor", "cores": 2, "torch": "2", "date": "today"}
    made = {name: {"failure": failures.get(name, ""), "steps": one} for name, one in ways.items()}
    result = {"machine": machine, "table": table, "ways": made}
    text = render(result)
    assert "| 256 | penstock | 10.0 (10.0 to 10.0) | 10.0 | 100 B | 0.01000 | equal |" in text
    assert "| 256 | mmap | 10.0 (10.0 to 10.0) | 10.0 | 100 B | 0.01000 | **different** |" in text
    assert "| 8 | whole | was killed |" in text
    assert "0.01000 at most, met." in text
    steps[0]["read"] = 101
    assert "**not met**" in render(result)

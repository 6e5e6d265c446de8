"""The benchmark of a mixture of experts, tiny: all ways compute alike, and verdicts follow from figures."""

import json

import pytest
import torch

from benchmarks.experts import __main__ as experts
from benchmarks.experts.mixture import SHAPES
from benchmarks.experts.table import BEGIN, judge, render
from benchmarks.table import END
from tests.benchmarks.in_process import invoke, started_here

MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch):
    """Have all ways run here; the limits that their groups would have."""
    given = []
    monkeypatch.setattr(experts, "started", started_here(experts.stepping, given))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return given


def test_all_ways_compute_the_same_and_read_what_they_should(limits, tmp_path):
    document = tmp_path / "page.md"
    document.write_text(f"{BEGIN.format(model='tiny')}\nold\n{END}\n")
    paths = ["--folder", str(tmp_path), "--json", str(tmp_path / "facts.json"), "--docs", str(document)]
    done = invoke(
        experts.main,
        *("--model", "tiny", "--no-group", "--tokens", "2", "--warm-up", "1", "--routings", "recorded,zipf"),
        *paths,
    )
    assert done.exit_code == 0, done.output
    assert limits == [{}, {}, {}]
    result = json.loads((tmp_path / "facts.json").read_text())
    assert [*result["tables"]] == ["recorded", "zipf"]
    shape = SHAPES["tiny"]
    unit = 2 * shape.width * shape.inner
    for ways in result["tables"].values():
        assert [*ways] == [*experts.WAYS, "disk"]
        assert len(ways["disk"]["steps"]) == 2 * len(ways["units"]["steps"]) == 6
        assert all(step["read"] >= 64 * MIB for step in ways["disk"]["steps"])
        tokens = {
            name: [one["digest"] for one in way["steps"]] for name, way in ways.items() if name != "disk"
        }
        assert len({tuple(one) for one in tokens.values()}) == 1
        assert len(set(tokens["units"])) == 3
        moved = {name: ways[name]["steps"][-1]["moved"] for name in ("before", "units", "least")}
        assert moved["units"] <= moved["least"] < moved["before"]
        # At the least budget nothing is found, but the unit that the token before has left behind.
        assert moved["least"] >= 3 * shape.layers * (shape.asked - 1) * 3 * unit
    assert result["asked"] == shape.layers * shape.asked * 3 * unit
    text = document.read_text()
    assert "old" not in text
    assert text.count("### tiny, ") == 3
    assert "| outputs that differ | at most 0 | 0.000 | yes |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"facts.json", "page.md"}
    assert (
        invoke(experts.main, "--render", str(tmp_path / "facts.json")).output.strip()
        == render(result).strip()
    )


def step(seconds, read=0, digest="same"):
    memory = {"anonymous": 5 * MIB, "peak": 7 * MIB}
    return {"seconds": seconds, "processor": seconds, "read": read, "moved": 0, "digest": digest} | memory


def made(**ways):
    return {name: {"failure": "", "bare": 0, "steps": steps} for name, steps in ways.items()}


@pytest.fixture
def result():
    """A disk of 100 MB/s, that is half as fast in the second round that counts; the first does not."""
    disk = [{"seconds": s, "read": 100} for s in (9.0, 9.0, 1e-6, 1e-6, 2e-6, 2e-6)]
    table = made(
        memory=[step(9.0), step(1e-6), step(1e-6)],
        before=[step(9.0), step(20e-6, 1200), step(40e-6, 1200)],
        units=[step(9.0), step(2.2e-6, 100), step(3.3e-6, 100)],
        mmap=[step(9.0), step(5e-6, 300), step(5e-6, 200)],
        disk=disk,
    )
    full = made(memory=[step(9.0), step(1.0), step(2.0)], full=[step(1.0), step(1.0), step(2.0)])
    machine = {"cpu": "a processor", "cores": 2, "torch": "2", "date": "today"}
    options = {"model": "tiny", "layers": 3, "share": 0.25, "tokens": 2, "warm_up": 1, "group": True}
    facts = {"machine": machine, "options": options, "weights": 100 * MIB, "asked": 8 * MIB}
    return facts | {"floors": [MIB, 9 * MIB], "tables": {"zipf": table}, "full": full}


def test_verdicts_compare_within_rounds(result):
    found = {one.what: one for one in judge(result)}
    assert [round(one.measured, 3) for one in found.values()] == [
        pytest.approx(200 / 2400, abs=1e-3),
        pytest.approx(200 / 500),
        1.1,  # 2.2 over 1 + 1, and 3.3 over 2 + 1
        pytest.approx((2.2 / 20 + 3.3 / 40) / 2, abs=1e-3),
        1.0,
        0.0,
    ]
    assert all(one.met for one in found.values())
    assert "zipf: time against whole's, where the disk bounds (here compute does)" in found
    assert "| no |" not in render(result)

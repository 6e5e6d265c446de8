"""The benchmark of a mixture of experts, tiny: all ways compute alike, and a table says what they read."""

import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks.experts import __main__ as experts
from benchmarks.experts.mixture import SHAPES
from tests.benchmarks.in_process import invoke, started_here

MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch):
    """Have all ways run here; the limits that their groups would have."""
    given = []
    monkeypatch.setattr(experts, "started", started_here(experts.stepping, given))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return given


def test_all_ways_compute_the_same_and_read_what_they_should(limits, tmp_path, monkeypatch):
    tables = []
    measure = experts.measure
    monkeypatch.setattr(experts, "measure", lambda *asked: tables.append(measure(*asked)) or tables[-1])
    options = ("--model", "tiny", "--no-group", "--tokens", "2", "--warm-up", "1", "--folder", tmp_path)
    done = invoke(experts.main, *options)
    assert done.exit_code == 0, done.output
    assert limits == [{}, {}]
    shape = SHAPES["tiny"]
    unit = 2 * shape.width * shape.inner
    for ways in tables:
        assert [*ways] == [*experts.WAYS]
        tokens = {name: [step["digest"] for step in way.steps] for name, way in ways.items()}
        assert len({tuple(digests) for digests in tokens.values()}) == 1
        assert len(set(tokens["units"])) == 3
        moved = {name: ways[name].steps[-1]["moved"] for name in experts.STREAMED}
        assert moved["units"] <= moved["least"]
        # At the least budget nothing is found, but the unit that the token before has left behind.
        assert moved["least"] >= 3 * shape.layers * (shape.asked - 1) * 3 * unit
    assert re.findall("### tiny, (.*)", done.output) == ["zipf", "uniform"]
    assert done.output.count("| equal |") == 2 * len(experts.WAYS)
    assert not list(tmp_path.iterdir())


def way(*steps, failure=""):
    facts = {"processor": 1.0, "read": 2 * MIB, "peak": 7 * MIB}
    return SimpleNamespace(
        failure=failure,
        steps=[
            facts | {"seconds": seconds, "moved": moved, "digest": digest} for seconds, moved, digest in steps
        ],
    )


def test_a_table_compares_within_rounds_and_says_what_differs_or_failed():
    ways = {
        "memory": way((9.0, 0, "a"), (1.0, 0, "b"), (2.0, 0, "c")),
        "units": way((9.0, MIB, "a"), (2.0, 4 * MIB, "b"), (4.0, 7 * MIB, "c")),
        "mmap": way((9.0, 0, "a"), (4.0, 0, "x"), (8.0, 0, "c")),
        "accelerate": way(failure="was killed"),
    }
    lines = list(experts.render(ways, 1))[2:]
    assert lines == [
        "| memory | 1.500 (1.000 to 2.000) | 0.50 | 1.000 | 2 | 0 | 7 | equal |",
        "| units | 3.000 (2.000 to 4.000) | 1.00 | 1.000 | 2 | 3 | 7 | equal |",
        "| mmap | 6.000 (4.000 to 8.000) | 2.00 | 1.000 | 2 | 0 | 7 | **different** |",
        "| accelerate | was killed |" + " |" * 6,
    ]

"""`penstock replay` on recorded routes of a small table."""

import json

import pytest
import torch
from torch import nn

import penstock as api

ROWS, WIDTH = 1024, 1024


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    exported = torch.export.export(nn.Embedding(ROWS, WIDTH), (torch.arange(2),))
    folder = tmp_path_factory.mktemp("replays") / "table.penstock"
    api.compile(exported, folder)
    return folder


@pytest.fixture(scope="module")
def routes(artifact):
    """Three calls for rows of a page each: 0 and 1, then 1 and 2, then 0 and 1 again."""
    path = artifact.parent / "routes.jsonl"
    with api.open(artifact).load("25%") as module, torch.no_grad(), module.record_routes() as recorder:
        for start in (0, 1, 0):
            module(torch.tensor([start, start + 1]))
    recorder.save(path)
    return path


def test_sizes_as_json(penstock, artifact, routes):
    done = penstock(
        *("replay", routes, "--artifact", artifact, "--pool", "4096", "--pool", "8KiB", "--pool", "12KiB"),
        "--json",
    )
    facts = json.loads(done.out)
    assert facts["calls"] == 3
    found = [one["replay"] for one in facts["replays"]]
    assert [one["pool_bytes"] for one in found] == [4096, 8192, 12288]
    assert [one["cut"] for one in found] == [3, 0, 0]
    assert [one["penstock"] for one in found] == [
        {"units": units, "nbytes": units * 4096} for units in (5, 4, 3)
    ]
    assert [one["least_bytes"] // 4096 for one in found] == [5, 4, 3]
    assert found[2]["hits"] == {"penstock": 0.5, "lru": 0.5, "lfu": 0.5, "most": 0.5}


def test_a_table_by_size(penstock, artifact, routes):
    done = penstock("replay", routes, "--artifact", artifact)
    assert done.status == 0
    assert "3 calls of 8.00 KiB each" in done.out
    for word in ("pool", "missed a call", "at least", "penstock", "LRU", "LFU", "Belady", "50.0%"):
        assert word in done.out
    assert "rounds" not in done.out
    cut = penstock("replay", routes, "--artifact", artifact, "--pool", "4096")
    assert "run there in rounds" in cut.out


def test_pools_of_plans(penstock, artifact, routes):
    given = ("replay", routes, "--artifact", artifact, "--budget", "25%", "--budget", "100%")
    done = penstock(*given)
    assert "25%" in done.out
    assert "read whole" in done.out
    part, whole = json.loads(penstock(*given, "--json").out)["replays"]
    assert part["replay"]["pool_bytes"] == 1 << 20
    assert whole == {"budget": "100%", "replay": None}


def test_what_cannot_be_replayed(penstock, artifact, routes, tmp_path):
    both = penstock("replay", routes, "--artifact", artifact, "--budget", "25%", "--pool", "1MiB")
    assert both.status == 2
    assert "give one of them" in both.err
    empty = tmp_path / "empty.jsonl"
    first = routes.read_text().splitlines()[0]
    empty.write_text(first.replace('"calls":3', '"calls":0') + "\n")
    done = penstock("replay", empty, "--artifact", artifact)
    assert done.status == 2
    assert "none of the 0 calls of these routes asks for a unit: call the module within" in done.err
    other = tmp_path / "other.jsonl"
    other.write_text(routes.read_text().replace('"count":1024', '"count":2048'))
    done = penstock("replay", other, "--artifact", artifact)
    assert done.status == 2
    assert "the routes are of another program" in done.err
    assert "Traceback" not in done.err


def test_recorded_calls_on_the_clock(penstock, artifact, routes):
    given = ("simulate", artifact, "--budget", "25%", "--routes", routes)
    (one,) = json.loads(penstock(*given, "--json").out)
    assert [call["missed_bytes"] for call in one["calls"]] == [8192, 4096, 0]
    assert [call["asked_bytes"] for call in one["calls"]] == [8192] * 3
    for number, call in enumerate(one["calls"]):
        assert (call["number"], call["method"], call["rounds"]) == (number, "forward", 1)
        assert call["total_ns"] == one["compute_ns"] + call["stall_ns"]
        assert (call["stall_ns"] == 0) == (number == 2)
    done = penstock(*given)
    assert "3 recorded calls" in done.out
    for word in ("all, on the average", "hits", "missed", "copied", "waits", "takes", "50.0%"):
        assert word in done.out
    done = penstock("simulate", artifact, "--budget", "100%", "--routes", routes)
    assert done.status == 2
    assert "reads all weights whole, so routes change nothing" in done.err

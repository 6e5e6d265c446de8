"""The benchmark runs to its end at a tiny size, and its figures follow from its samples."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.disk import competitors, rounds
from benchmarks.disk.__main__ import application
from benchmarks.disk.cases import make_meta_module, write_weights
from benchmarks.disk.competitors import Job
from benchmarks.disk.reader import list_ways
from benchmarks.disk.summary import summarise
from benchmarks.disk.worker import Session
from benchmarks.ways import started
from tests.benchmarks.in_process import started_here
from tests.engines import ENGINES


@pytest.fixture
def folder(request):
    """A folder beside the checkout's files: a temporary one may have no disk behind it."""
    return Path(request.config.cache.mkdir("benchmarks"))


def serve(job):
    """A competitor in this process; `benchmarks.ways.Way` gives it one of its own."""
    return Session(job).load()


def test_tiny_run_measures_every_competitor(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "started", started_here(serve, []))
    monkeypatch.setattr(rounds, "run_apart", lambda _, how, job: competitors.prepare(Job(**json.loads(job))))
    options = "--size 4MiB --rounds 1 --passes 2 --models linears --tokens 4 --states cold --budgets 50%"
    options += f" --engines {','.join(('auto', *ENGINES[1:]))}"
    paths = ["--work", str(folder), "--json", str(tmp_path / "disk.json")]

    done = CliRunner().invoke(application, [*options.split(), "--peers", "mmap", *paths])

    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "disk.json").read_text())
    (case,) = result["cases"]
    assert not case["failures"]
    rows = {row["name"]: row for row in case["rows"]}
    disk = {f"disk, {way}" for way in list_ways(Path(__file__))}
    ours = {"penstock 50%", *(f"penstock 50%, {engine}" for engine in ENGINES[1:])}
    assert set(rows) == {"memory", "mmap"} | ours | disk
    assert all(row["equal"] for name, row in rows.items() if name not in disk)
    assert all(rows[name]["misses"] == 0 for name in ours)
    assert all(rows[name]["bytes_moved"] > 0 for name in ours)
    assert len(case["competitors"]["mmap"]["rounds"][0]["samples"]) == 2
    assert "| penstock 50% |" in done.output
    assert not list(folder.iterdir())


def test_a_process_of_its_own_answers_as_one_here_and_says_why_it_ends(folder):
    weights = folder / "weights.safetensors"
    write_weights(make_meta_module("linears", 1 << 20), weights)
    job = Job("plain", "memory", "linears", 1 << 20, 4, str(weights), folder="")
    train = '{"passes": 1, "cold": true}'
    with started(rounds.WORKER, [job], {}, {}) as ways:
        ways["plain"].step(train)
        (answered,) = ways["plain"].steps
        assert answered["output"] == serve(job)(train)["output"] is not None
        assert ways["plain"].bare > 1 << 20
        assert ways["plain"].peak_anonymous >= 1 << 20
        ways["plain"].step('{"sleeps": 1}')
        assert "unexpected keyword argument 'sleeps'" in ways["plain"].failure
    weights.unlink()


def make_entry(kind, seconds, *, budget=0, disk_bytes=0, **figures):
    """What a case holds about a competitor that took `seconds` in its rounds of one pass."""
    sample = {"disk_bytes": disk_bytes, "gap_bytes": 0, "cached": 0.0}
    if kind == "penstock":
        sample |= {"misses": 0, "stall_seconds": 0.0, "bytes_moved": disk_bytes}
    peak = figures.get("peak", 100)
    trains = [
        {
            "samples": [sample | {"seconds": value}],
            "output": None if kind == "raw" else "same",
            "peak_total": peak,
        }
        for value in seconds
    ]
    return {
        "kind": kind,
        "budget_bytes": budget,
        "rounds": trains,
        "bare_total": 100,
        "bare_anonymous": 0,
        "load_seconds": 0.0,
        "peak_anonymous": 0,
    }


def make_case(**competitors):
    return {
        "model": "linears",
        "tokens": 8,
        "state": "cold",
        "weight_bytes": 1000,
        "cgroup_bytes": None,
        "skipped": None,
        "competitors": competitors,
        "failures": {},
    }


def test_ratios_are_taken_within_rounds():
    # The machine runs at half its speed in the second round: no ratio may change by that.
    case = make_case(
        memory=make_entry("memory", [0.1, 0.2], peak=130),
        raw=make_entry("raw", [1.0, 2.0]),
        mmap=make_entry("mmap", [3.0, 6.0], disk_bytes=1000, peak=1100),
        accelerate=make_entry("accelerate", [4.0, 8.0], disk_bytes=1000, peak=400),
        penstock=make_entry("penstock", [1.0, 2.0], budget=200, disk_bytes=800),
    )
    rows = {row["name"]: row for row in summarise(case)}
    penstock = rows["penstock"]
    assert penstock["limit_share"] == pytest.approx(0.8)
    assert penstock["best_peer"] == pytest.approx(3)
    assert penstock["over_memory"] == pytest.approx(10)
    assert rows["mmap"]["total_bytes"] == 1000

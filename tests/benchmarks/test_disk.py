"""The benchmark of disks at a tiny size, and the processes of its ways."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import ways
from benchmarks.disk import rounds
from benchmarks.disk.__main__ import application
from benchmarks.disk.cases import make_meta_module, write_weights
from benchmarks.disk.competitors import Job
from benchmarks.disk.process import Worker, WorkerError
from benchmarks.disk.reader import list_ways
from benchmarks.disk.summary import summarise
from benchmarks.disk.tables import BEGIN
from benchmarks.disk.worker import Session
from benchmarks.table import END
from benchmarks.ways import in_turn, scratch, started
from tests.engines import ENGINES


@pytest.fixture
def folder(request):
    """A folder beside the checkout's files: a temporary one may have no disk behind it."""
    return Path(request.config.cache.mkdir("benchmarks"))


class Here:
    """A competitor in this process; `benchmarks.disk.process.Worker` gives it one of its own."""

    peak_anonymous = 0

    def __init__(self, job, log, *, group=None):
        self.job, self._session = job, Session()

    def ask(self, command, **arguments):
        request = {"command": command, "job": dataclasses.asdict(self.job), **arguments}
        return json.loads(json.dumps(self._session.answer(request)))

    def close(self):
        self._session.loaded.close()


def test_tiny_run_measures_every_competitor(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "Worker", Here)
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{BEGIN}\nstale table\n{END}\nafter\n")
    options = "--size 4MiB --rounds 1 --passes 2 --models linears --tokens 4 --states cold --budgets 50%"
    options += f" --engines {','.join(('auto', *ENGINES[1:]))}"
    paths = ["--work", str(folder), "--json", str(tmp_path / "disk.json"), "--docs", str(document)]

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
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale table" not in text
    assert "| penstock 50% |" in text
    assert not list(folder.iterdir())


def test_a_process_of_its_own_answers_as_one_here_and_says_why_it_ends(folder):
    weights = folder / "weights.safetensors"
    write_weights(make_meta_module("linears", 1 << 20), weights)
    job = Job("memory", "linears", 1 << 20, 4, str(weights), folder="")
    log = folder / "log.txt"
    outputs = []
    with closing(Worker(job, log)) as worker, closing(Here(job, log)) as here:
        for one in (worker, here):
            one.ask("load")
            outputs.append(one.ask("train", passes=1, cold=True)["output"])
        assert outputs[0] == outputs[1] is not None
        assert worker.ask("bare") > 1 << 20
        with pytest.raises(
            WorkerError, match="memory ended with status 1 during 'sleep': ValueError: unknown"
        ):
            worker.ask("sleep")
    weights.unlink()
    log.unlink()


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
        "held_total": 100,
        "load_peak": figures.get("load_peak", 100),
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
        penstock=make_entry("penstock", [1.0, 2.0], budget=200, disk_bytes=800, load_peak=350, peak=340),
    )
    rows = {row["name"]: row for row in summarise(case, 1.0)}
    penstock = rows["penstock"]
    assert penstock["limit_share"] == pytest.approx(0.8)
    assert penstock["best_peer"] == pytest.approx(3)
    assert penstock["best_bounded_peer"] == pytest.approx(4), "mmap holds all weights"
    assert penstock["over_memory"] == pytest.approx(10)
    assert penstock["bound"] == "disk"
    assert penstock["excess_mib"] * 2**20 == pytest.approx(350 - 100 - 200 - 30)
    assert rows["mmap"]["total_bytes"] == 1000


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from benchmarks.ways import answer
job = json.loads(sys.argv[2])

def load():
    print("a library says this")
    if job["way"] == "broken":
        raise SystemExit("it has no weights")
    return lambda line: {"said": line, "way": job["way"], "size": job["size"]}

answer(load)
"""


@dataclass(frozen=True)
class OfWay:
    way: str
    size: int = 3


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The name of a module that is a way."""
    (tmp_path / "own_ways.py").write_text(SCRIPT)
    paths = (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return "own_ways"


def test_each_way_answers_its_own_lines_and_one_that_fails_leaves_the_others(script):
    with started(script, [OfWay("one"), OfWay("broken"), OfWay("two", 5)], {}) as running:
        assert list(running) == ["one", "broken", "two"]
        for number in range(2):
            for name in in_turn(running, number):
                running[name].step(f"line {number}")
    assert running["one"].steps == [{"said": f"line {n}", "way": "one", "size": 3} for n in range(2)]
    assert [step["size"] for step in running["two"].steps] == [5, 5]
    assert (running["broken"].steps, running["broken"].failure) == ([], "it has no weights")
    assert running["one"].bare > 0


HOLDING = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.ways import scratch
with scratch(1, Path({base!r})) as folder:
    (folder / "weights").write_bytes(bytes(100))
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_to_the_next(tmp_path, number):
    code = HOLDING.format(root=str(Path(ways.__file__).resolve().parent.parent), base=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout
        assert process.stdout.readline() == "holding\n"
        (held,) = tmp_path.iterdir()
        with scratch(1, tmp_path) as own:
            assert {*tmp_path.iterdir()} == {held, own}, "what a run still holds is left alone"
        process.send_signal(number)
        process.wait()
    assert list(tmp_path.iterdir()) == ([] if number == signal.SIGTERM else [held])
    with scratch(1, tmp_path) as own:
        assert [*tmp_path.iterdir()] == [own]

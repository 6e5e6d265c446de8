"""Processes that answer line by line, and the folder for their files, which nothing outlives."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import ways
from benchmarks.ways import Way, in_turn, scratch, started

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
class Job:
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
    with started(script, [Job("one"), Job("broken"), Job("two", 5)], {}) as running:
        assert list(running) == ["one", "broken", "two"]
        for number in range(2):
            for name in in_turn(running, number):
                running[name].step(f"line {number}")
    assert running["one"].steps == [{"said": f"line {n}", "way": "one", "size": 3} for n in range(2)]
    assert [step["size"] for step in running["two"].steps] == [5, 5]
    assert (running["broken"].steps, running["broken"].failure) == ([], "it has no weights")
    assert running["one"].bare > 0


def test_a_group_has_a_bare_process_and_the_limit_of_its_way(script, tmp_path, monkeypatch):
    limits: list[int] = []
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def group(limit):
        limits.append(limit)
        yield SimpleNamespace(folder=tmp_path)

    class Seen(Way):
        def __init__(self, script, job, group, environment):
            super().__init__(script, job, group, environment)
            seen.append((job.way, group is not None))
            self.bare = 1000

    monkeypatch.setattr(ways, "make_group", group)
    monkeypatch.setattr(ways, "Way", Seen)
    with started(script, [Job("capped"), Job("free")], {"capped": 7}) as running:
        running["capped"].step("x")
    assert limits == [1007]
    assert seen == [("capped", False), ("capped", True), ("free", False)]
    assert len(running["capped"].steps) == 1
    assert (tmp_path / "cgroup.procs").read_text().strip().isdigit()


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

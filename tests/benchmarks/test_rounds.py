"""One competitor that fails leaves its case, whenever it fails; all others are measured."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks.disk import rounds
from benchmarks.disk.process import WorkerError
from benchmarks.disk.rounds import Bench, Case, Options


class Answering:
    """A process that answers at once, and fails at the command that `failing` names for its competitor."""

    peak_anonymous = 7

    def __init__(self, competitor, failing):
        self.competitor, self._failing = competitor, failing

    def ask(self, command, **_):
        if self._failing.get(self.competitor) == command:
            raise WorkerError(f"{self.competitor} was killed during {command!r}")
        return {"bare": 100, "prepare": None, "load": {}, "train": {"samples": [{"seconds": 1.0}]}}[command]

    def close(self):
        pass


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A bench of a small model that is never read. Fill its `failing`; `limits` has the groups' bytes."""

    @contextmanager
    def group(limit_bytes):
        limits.append(limit_bytes)
        yield tmp_path

    failing = {}
    limits = []
    made = Bench(Options(1 << 20, 2, 1, tmp_path, pack=True), lambda said: None)
    monkeypatch.setattr(made, "_start", lambda job, _: Answering(job.competitor, failing))
    monkeypatch.setattr(rounds, "_require_group", group)
    monkeypatch.setattr(rounds, "drop_cache", lambda paths: None)
    monkeypatch.setattr(rounds, "measure_readers", lambda path: [])
    return SimpleNamespace(run=made.run, failing=failing, limits=limits)


CASE = Case("linears", 4, "cgroup", ("50%",), ("mmap", "accelerate"))


@pytest.mark.parametrize("command", ["bare", "prepare", "load", "train"])
def test_one_that_fails_leaves_the_others(bench, command):
    bench.failing["accelerate"] = command
    result = bench.run(CASE)
    assert result["failures"] == {"accelerate": f"accelerate was killed during {command!r}"}
    measured = {name: len(one["rounds"]) for name, one in result["competitors"].items()}
    assert measured == {"memory": 2, "mmap": 2, "penstock 50%": 2} | (
        {"accelerate": 0} if command == "train" else {}
    )

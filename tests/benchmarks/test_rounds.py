"""One competitor that fails leaves its case, whenever it fails; all others are measured."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import typer

from benchmarks.disk import rounds
from benchmarks.disk.rounds import Bench, Case, Options
from penstock.schedule.facts.errors import StreamError

CASE = Case("linears", 4, "cgroup", ("50%",), ("mmap", "accelerate"))
FACTS = {"load_seconds": 1.0, "bare_total": 100, "samples": [{"seconds": 1.0}]}


class Answering:
    """A process that answers at once, until it has been asked `asks` times."""

    bare, peak_anonymous, failure = 50, 70, ""

    def __init__(self, asks):
        self.steps, self._asks = [], asks

    def step(self, line):
        if len(self.steps) == self._asks:
            self.failure = "was killed"
        elif not self.failure:
            self.steps.append(FACTS)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A bench of a small model that is never read; `asks` has the answers of those that fail."""

    @contextmanager
    def started(_, jobs, limits, environment):
        given.limits.update(limits)
        if given.groups is None:
            raise typer.BadParameter("no memory group can be made here")
        yield {job.way: Answering(given.asks.get(job.competitor)) for job in jobs}

    def prepare(_, how, job):
        if how == "--prepare" and given.broken and given.broken in job:
            raise StreamError("the process ended with 1: no room")

    made = Bench(Options(1 << 20, 2, 1, tmp_path), lambda said: None)
    given = SimpleNamespace(run=made.run, asks={}, limits={}, broken="", groups=True)
    monkeypatch.setattr(rounds, "started", started)
    monkeypatch.setattr(rounds, "run_apart", prepare)
    monkeypatch.setattr(rounds, "measure_readers", lambda path: [])
    return given


@pytest.mark.parametrize("asks", [0, 1])
def test_one_that_ends_too_early_leaves_the_others(bench, asks):
    bench.asks["accelerate"] = asks
    result = bench.run(CASE)
    assert result["failures"] == {"accelerate": "accelerate was killed"}
    measured = {name: len(facts["rounds"]) for name, facts in result["competitors"].items()}
    assert measured == {"memory": 2, "mmap": 2, "penstock 50%": 2}
    assert result["competitors"]["mmap"]["bare_anonymous"] == 50


def test_one_that_cannot_be_prepared_leaves_the_others(bench):
    bench.broken = '"competitor": "accelerate"'
    result = bench.run(CASE)
    assert result["failures"] == {"accelerate": "the process ended with 1: no room"}
    assert [*result["competitors"]] == ["memory", "mmap", "penstock 50%"]
    quarter = result["weight_bytes"] // 4
    assert bench.limits == {"mmap": quarter, "penstock 50%": quarter}
    assert quarter == result["cgroup_bytes"]


def test_a_case_in_groups_is_left_out_where_none_can_be_made(bench):
    bench.groups = None
    assert bench.run(CASE)["skipped"] == "no memory group can be made here"

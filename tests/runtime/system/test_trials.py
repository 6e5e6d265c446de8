"""Trials: medians, spreads, and whether the processor was there; on a clock that the tests hold."""

from itertools import accumulate
from types import SimpleNamespace

import pytest

from penstock.runtime.machine import figures
from penstock.runtime.machine.figures import LEAST, MOST, SECONDS, Trials, repeat, waiting_ns


def clock(monkeypatch, seconds):
    """Lets each run of the work take the next of these times, the last one again and again."""
    each = [0.0, *(x for one in [*seconds, *[seconds[-1]] * MOST] for x in (one, 0.0))]
    times = accumulate(each)
    monkeypatch.setattr(figures, "time", SimpleNamespace(perf_counter=lambda: next(times)))


def test_the_median_of_several_trials_counts(monkeypatch):
    clock(monkeypatch, [0.01, 0.5, 0.01, 0.02, 0.01])
    found = repeat(lambda: None, 100.0)
    assert found.median == pytest.approx(10_000)
    assert len(found.figures) == MOST or sum(100 / rate for rate in found.figures) >= SECONDS


def test_slow_work_is_done_a_few_times_only(monkeypatch):
    runs = []
    clock(monkeypatch, [9.0])
    assert repeat(lambda: runs.append(1), 9.0).figures == pytest.approx([1.0] * LEAST)
    assert len(runs) == LEAST + 1


def test_the_spread_is_the_interquartile_range_over_the_median():
    assert Trials((1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(2 / 3)
    assert Trials((7.0,) * 5).spread == Trials((7.0,)).spread == 0
    assert Trials((100.0, 100.0, 100.0, 100.0, 1.0)).spread == 0  # one hiccup is no spread


def test_the_time_for_which_threads_had_to_wait_is_a_share_of_all_of_it(monkeypatch, tmp_path):
    for task, waited in (("11", 5), ("12", 7)):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(f"1000 {waited} 3\n")
    monkeypatch.setattr(figures, "_TASKS", tmp_path)
    assert waiting_ns() == 12
    (tmp_path / "12" / "schedstat").write_text("not a number")
    assert waiting_ns() == 5
    monkeypatch.setattr(figures, "_TASKS", tmp_path / "nowhere")
    assert waiting_ns() == 0

    clock(monkeypatch, [0.1])
    waits = iter([0, 150_000_000])  # in three trials of 0.1 s on two threads
    monkeypatch.setattr(figures, "waiting_ns", lambda: next(waits))
    assert repeat(lambda: None, 1.0, threads=2).waited == pytest.approx(0.25)

"""Rates of the machine: measured once, remembered, and doubted in the plan where they are noisy."""

import gc

import pytest
import torch

from penstock.runtime.machine import calibrate
from penstock.runtime.machine.calibrate import NO_FILES, common_dtype, measure_cpu
from penstock.runtime.machine.figures import LEAST, Measurement, Subject, Trials, this_machine
from penstock.runtime.machine.rates import Arrival
from penstock.schedule.facts.model import Part, Weight


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def measured(monkeypatch):
    """What is measured, in order."""
    done = []
    monkeypatch.setattr(calibrate, "_products", lambda dtype: done.append(dtype) or Trials((2e11, 2.1e11)))
    monkeypatch.setattr(calibrate, "_memory", lambda: done.append("memory") or Trials((1.5e10,)))
    return done


def arriving(rate, spread=0.0, answers=0.9):
    reads = Measurement(Subject("reads", this_machine(), cache="past"), rate, spread, 0.0, 9, 0)
    answer = Measurement(Subject("answer", this_machine(), cache="past"), 50_000.0, answers, 0.0, 9, 0)
    return Arrival(reads, answer)


def weight(dtype, *shape):
    return Weight("w", "parameter", "cpu", (Part("", dtype, shape, (1,) * len(shape), 0, 0),))


def test_rates_are_measured_once_and_arrival_is_as_given(measured):
    first = measure_cpu((), arriving(3e9), "so")
    second = measure_cpu((), arriving(4e9), "and so")
    assert measured == ["float32", "memory"]
    assert (first.flops_per_s, first.memory_bytes_per_s, first.link_bytes_per_s) == (2.05e11, 1.5e10, 3e9)
    assert (second.flops_per_s, second.memory_bytes_per_s, second.link_bytes_per_s) == (2.05e11, 1.5e10, 4e9)
    assert first.note.endswith("threads; direct reads at 3.00 GB/s; so")
    assert (first.link_in_flight_bytes, second.link_in_flight_bytes) == (150_000, 200_000)
    assert first.link_fill_ns == second.link_fill_ns == 50_000
    assert not first.uneven  # answers vary beside computing
    without = measure_cpu((), None, "no file")
    assert (without.link_bytes_per_s, without.link_in_flight_bytes) == (NO_FILES, 0)


def test_products_are_measured_in_the_dtype_that_most_weights_have(measured):
    weights = (weight("bfloat16", 64, 64), weight("float32", 64), weight("int8", 4096, 4096))
    assert common_dtype(weights) == "bfloat16"
    measure_cpu(weights, arriving(3e9), "")
    measure_cpu((), arriving(3e9), "")
    assert measured == ["bfloat16", "memory", "float32"]


def test_a_busy_machine_is_told_of_in_the_plan(monkeypatch):
    monkeypatch.setattr(calibrate, "_products", lambda dtype: Trials((6e9, 2e11, 2e11, 1e10)))
    monkeypatch.setattr(calibrate, "_memory", lambda: Trials((3e9, 3e9), waited=0.6))
    note = measure_cpu((), arriving(3e9, spread=0.5), "").note
    assert note.endswith("direct reads at 3.00 GB/s; measured rates are uneven: see `penstock hardware`")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(calibrate, "_products", lambda dtype: Trials((2e11, 2e11)))
    monkeypatch.setattr(calibrate, "_memory", lambda: Trials((3e9, 3e9)))
    steady = measure_cpu((), arriving(3e9), "")
    assert steady.note == "measured on this machine with 1 thread; direct reads at 3.00 GB/s"
    assert not steady.uneven
    assert measure_cpu((), arriving(3e9, answers=3.1), "").uneven


def test_this_machine_has_rates(monkeypatch):
    monkeypatch.setattr(calibrate, "_LEAST_MATRIX", 64)
    monkeypatch.setattr(calibrate, "_MATRIX", 64)
    monkeypatch.setattr(calibrate, "_BUFFER", 1 << 16)
    products, memory = calibrate.compute_rates("float32")
    assert products.trials >= LEAST
    assert memory.trials >= LEAST
    assert min(products.median, memory.median) > 1e6


@pytest.mark.parametrize(
    ("flops", "sizes"),
    [(1e11, [128, 256, 512, 1024]), (2.1e10, [128, 256, 512]), (3e9, [128, 256, 512]), (1e8, [128])],
)
def test_slow_products_are_measured_on_smaller_matrices(flops, sizes, monkeypatch):
    """Three products of 1,024 rows, which are 2 * 1,024 ** 3 operations each, take 0.3 s at 21.5 GFLOP/s."""
    seen = []

    def trials(_, amount, **options):
        seen.append(round((amount / 2) ** (1 / 3)))
        return Trials((flops / 9, flops, flops / len(seen)))

    monkeypatch.setattr(calibrate, "repeat", trials)
    rates, _ = calibrate.compute_rates("float16")
    assert seen[:-1] == sizes  # the last is memory
    assert rates.median == flops / len(sizes)


def test_measuring_takes_less_memory_than_a_load_may_take_beside_its_budget(monkeypatch):
    def alive():
        return sum(one.nbytes for one in gc.get_objects() if type(one) is torch.Tensor)

    seen = []

    def looked_at(*_, **options):
        seen.append(alive() - before)
        return Trials((1e12,) * LEAST)  # fast enough for the largest matrices

    monkeypatch.setattr(calibrate, "repeat", looked_at)
    before = alive()
    calibrate.compute_rates("float32")
    assert len(seen) == 5
    assert 0 < max(seen) <= 40 << 20

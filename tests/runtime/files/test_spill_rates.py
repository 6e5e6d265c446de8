"""How fast a folder takes what leaves memory, and whether writes and reads at once slow each other."""

import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.passes.trace import PRESET_CPU
from penstock.runtime.machine import rates
from penstock.runtime.machine.calibrate import with_leaving
from penstock.runtime.machine.figures import Measurement, Subject, Trials, this_machine
from penstock.runtime.machine.rates import Leaving, leaving, measure_writes
from penstock.schedule.facts.errors import SourceError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Disk:
    """A file whose blocks take two milliseconds each, one after another where they share a `link`."""

    block = 512

    def __init__(self, link):
        self._link = link

    def write_from(self, offset, address, nbytes):
        with self._link:
            time.sleep(0.002)

    read_into = write_from

    def close(self):
        pass


@pytest.mark.parametrize(("link", "least", "most"), [(threading.Lock(), 0.6, 1.5), (nullcontext(), 1.5, 2.0)])
def test_what_goes_on_both_ways_at_once(link, least, most, monkeypatch):
    monkeypatch.setattr(rates, "open_scratch", lambda folder, nbytes: Disk(link))
    writes, both, past = measure_writes(Path())
    assert past
    assert writes.median > 0
    assert least <= both.median <= most


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    writes, both, _ = measure_writes(folder)
    assert min(writes.figures) > 1e6
    assert 0 < both.median <= 2
    assert not list(folder.iterdir())
    with pytest.raises(SourceError, match="No such file"):
        measure_writes(tmp_path / "none")


def test_figures_of_a_folder_are_remembered(tmp_path, monkeypatch):
    asked = []

    def measure(folder):
        asked.append(folder)
        if folder.name == "none":
            raise SourceError("no file can be made")
        return Trials((2e9,)), Trials((1.9,)), folder.name != "buffered"

    monkeypatch.setattr(rates, "measure_writes", measure)
    for name in ("past", "buffered"):
        found = [leaving(tmp_path / name) for _ in range(2)]
        assert found[0] == found[1]
        assert found[0]
        assert (found[0].rate.median, found[0].duplex) == (2e9, True)
    assert asked == [tmp_path / "past", tmp_path / "buffered"]
    assert [leaving(tmp_path / "none") for _ in range(2)] == [None, None]


def figure(quantity, median):
    return Measurement(Subject(quantity, this_machine(), "/tmp", "", "", "past"), median, 0.0, 0.0, 3, 0)


def test_the_machine_says_how_values_leave():
    in_turn = with_leaving(PRESET_CPU, Leaving(figure("writes", 1.5e9), figure("both ways", 1.2)))
    assert (in_turn.write_bytes_per_s, in_turn.duplex) == (1.5e9, False)
    assert in_turn.note.endswith("direct writes at 1.50 GB/s, in turn with reads")
    beside = with_leaving(PRESET_CPU, Leaving(figure("writes", 1.5e9), figure("both ways", 1.85)))
    assert beside.duplex
    assert beside.note.endswith("beside reads")
    unknown = with_leaving(PRESET_CPU, None)
    assert (unknown.write_bytes_per_s, unknown.duplex) == (None, False)
    assert unknown.note.endswith("no rate of writes: they are taken for reads")
    assert figure("both ways", 1.2).amount == "1.20 of 2 rates"

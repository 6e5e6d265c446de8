"""How fast weights arrive: in which way they are read, what is measured of it, and what is remembered."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from penstock.runtime.files.artifact_files import stamp_file
from penstock.runtime.files.source import Source
from penstock.runtime.machine import rates
from penstock.runtime.machine import rates as arrival
from penstock.runtime.machine.figures import MOST, Trials
from penstock.runtime.machine.rates import WeightFiles

MIB = 1 << 20


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A file of weights, and nothing that is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(9 * MIB, dtype=torch.uint8)}, path)
    return WeightFiles((stamp_file(path, recorded_path=path.name),), tmp_path)


@pytest.fixture
def taken(monkeypatch):
    """The measurements that were taken."""
    done = []

    def read(source, *, shift, cold, **options):
        done.append(f"{source.mode} reads{' off blocks' * bool(shift)}{' of cold blocks' * cold}")
        return Trials((2e9,))

    def populate(source, *, cold, **options):
        done.append(f"mapping{' of cold blocks' * cold}")
        return Trials((5e11,))

    def answer(source, beside, *, cold):
        beside()
        done.append(f"answers{' of cold blocks' * cold}")
        return Trials((80_000.0,))

    monkeypatch.setattr(arrival, "measure_read", read)
    monkeypatch.setattr(arrival, "measure_answer", answer)
    monkeypatch.setattr(arrival, "measure_populate", populate)
    return done


def page_cache(monkeypatch, share):
    monkeypatch.setattr(Source, "cached_fraction", lambda self: share)


def fits(block):
    return True


def test_what_the_page_cache_holds_is_mapped_and_the_rest_is_read_past_it(files, taken, monkeypatch):
    for share, mapped, title in (
        (1.0, True, "mapping from the page cache"),
        (0.9, True, "direct reads"),  # however fast the part is that could be mapped
        (1.0, False, "buffered reads from the page cache"),
        (0.0, False, "direct reads"),
    ):
        page_cache(monkeypatch, share)
        for _ in range(2):
            found = files.arrival(mapped=mapped, fits=fits)
            assert (found.rate.subject.title, found.why) == (title, "")
            assert found.rate.subject.where
            assert found.in_flight_bytes == (0 if mapped and share == 1 else 160_000)  # at 2 GB/s for 80 us
    assert taken == ["mapping", "direct reads", "answers", "buffered reads", "answers"]


def test_without_direct_reads_cold_blocks_are_measured(files, taken, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    page_cache(monkeypatch, 0.5)
    mapping = files.arrival(mapped=True, fits=fits)
    assert mapping.rate.subject.title == "mapping with a cold page cache"
    assert mapping.answer
    assert mapping.answer.amount == "0.080 ms"
    found = files.arrival(mapped=False, fits=fits)
    assert found.rate.subject.title == "buffered reads with a cold page cache"
    assert "lacks O_DIRECT" in found.why
    assert taken == ["mapping of cold blocks", "answers of cold blocks", "buffered reads of cold blocks"]


def test_reads_that_need_a_copy_have_a_figure_of_their_own(files, taken, monkeypatch):
    page_cache(monkeypatch, 0.0)
    files.arrival(mapped=False, fits=fits)
    found = files.arrival(mapped=False, fits=lambda block: False)
    assert found.rate.subject.title == "direct reads off the disk's blocks"
    assert taken == ["direct reads", "answers", "direct reads off blocks"]


def test_the_disk_is_asked_once_and_files_are_opened_for_that_only(files, taken, monkeypatch):
    first = files.disk()
    assert taken == ["direct reads"]
    monkeypatch.setattr(arrival, "Source", None)
    assert files.disk() == first


def test_other_files_have_figures_of_their_own(files, taken):
    other = files.folder / "other.safetensors"
    save_file({"w": torch.ones(MIB, dtype=torch.uint8)}, other)
    files.disk()
    WeightFiles((stamp_file(other, recorded_path=other.name),), files.folder).disk()
    assert len(taken) == 2


def test_blocks_in_the_page_cache_tell_nothing_of_a_cold_disk(files, monkeypatch):
    block = 4096
    monkeypatch.setattr(rates, "_BLOCK", block)
    monkeypatch.setattr(rates, "is_cached", lambda fd, offset, nbytes: offset < 5 * MIB)
    read = []
    with Source(files.files, files.folder, mode="buffered") as source:
        plain = source.read_into

        def record(file, offset, address, nbytes):
            read.append(offset)
            plain(file, offset, address, nbytes)

        monkeypatch.setattr(source, "read_into", record)
        found = rates.measure_read(source, nbytes=64 * block, cold=True)
        assert min(read) >= 5 * MIB
        assert len(found.figures) == MOST
        # Where all is cached, that is what there is to measure.
        monkeypatch.setattr(rates, "is_cached", lambda fd, offset, nbytes: True)
        assert rates.measure_read(source, nbytes=8 * block, cold=True).median > 0


def test_answers_are_timed_one_by_one_beside_other_work(files):
    computed = 0

    def compute():
        nonlocal computed
        computed += 1

    asked = []
    with Source(files.files, files.folder, mode="buffered") as source:
        plain = source.read_into

        def read(file, offset, address, nbytes):
            time.sleep(0.001)
            asked.append((offset, nbytes))
            plain(file, offset, address, nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "read_into", read)
            patch.setattr(rates, "_ANSWERS", 40)
            patch.setattr(rates, "_ANSWERING", 60)
            found = rates.measure_answer(source, compute)
    assert len(found.figures) == MOST
    assert found.median > 1e6
    assert computed
    assert len(set(asked)) >= 40
    assert all(nbytes == 4096 and offset + nbytes <= files.files[0].nbytes for offset, nbytes in asked)


def test_the_answer_of_a_file_smaller_than_a_block(tmp_path):
    path = tmp_path / "small.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with Source((stamp_file(path, recorded_path=path.name),), tmp_path, mode="buffered") as source:
        assert rates.measure_answer(source, lambda: None).median > 0


def test_the_answer_of_a_file_that_ends_inside_of_a_block(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({"w": torch.zeros(2000)}, path)  # two blocks of 4 KiB, the second not whole
    stamp = stamp_file(path, recorded_path=path.name)
    for mode in ("buffered", "direct"):
        with Source((stamp,), tmp_path, mode=mode) as source:
            assert rates.measure_answer(source, lambda: None).median > 0


def test_one_long_pause_of_the_disk_changes_no_median():
    ended = [(0.01 * (k + 1) + (5.0 if k >= 40 else 0.0), 1000) for k in range(90)]
    found = Trials(tuple(rates._stretches(0.0, ended, threads=3)))
    assert found.median == pytest.approx(100_000)
    assert len(found.figures) == MOST
    assert found.spread == pytest.approx(0, abs=1e-6)
    (only,) = rates._stretches(1.0, [(3.0, 500)], threads=3)
    assert only == 250

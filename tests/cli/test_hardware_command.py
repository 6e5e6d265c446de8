"""`penstock hardware`: presets, and what was measured of this machine."""

import json
from dataclasses import replace

import pytest

from penstock.runtime.machine import calibrate, figures
from penstock.runtime.machine.figures import WEEK, Subject, Trials, measured, this_machine
from penstock.schedule.facts.hardware import PRESETS

COLUMNS = 80


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """What is measured, in no time; nothing is remembered."""
    done = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(calibrate, "_products", lambda dtype: done.append(dtype) or Trials((2e11,) * 3))
    monkeypatch.setattr(calibrate, "_memory", lambda: done.append("memory") or Trials((1e10, 4e10), 0.5))
    monkeypatch.setattr(calibrate, "leaving", lambda: done.append("writes"))
    return done


def reads(name="/srv/models/a-model-with-a-long-name/model-00001-of-00191.safetensors"):
    return Subject("reads", this_machine(), f"{name} and 190 more", "abc", "ext4 on /dev/nvme0n1p2", "past")


def test_presets_and_figures_fit_a_terminal(penstock):
    measured(reads(), lambda: Trials((1.5e9, 1.6e9)))
    measured(Subject("pass", this_machine(), "forward", "def"), lambda: Trials((2.5e7,)))
    done = penstock("hardware")
    assert done.status == 0
    assert all(len(line) <= COLUMNS for line in done.out.splitlines())
    assert all(name in done.out for name in PRESETS)
    laptop = next(line for line in done.out.splitlines() if "laptop" in line)
    assert [cell.strip() for cell in laptop.strip("\u2502").split("\u2502")][1:] == [
        "0.9",
        "90",
        "7",
        "-",
        "32",
    ]
    assert "disk: that of a GPU's host" in " ".join(done.out.split())
    for words in ("direct reads", "1.55 GB/s", "ext4 on", "compute of a pass of", "25.000 ms"):
        assert words in done.out


def test_one_preset(penstock):
    done = penstock("hardware", "h200")
    assert "4800 GB/s" in done.out
    assert "the same rate, which is assumed, in turn with what arrives" in " ".join(done.out.split())
    assert "launching a step takes 5.8 us of the calling thread" in " ".join(done.out.split())
    assert "rtx4090" not in done.out
    h200 = json.loads(penstock("hardware", "h200", "--json").out)
    assert (h200["memory_bytes_per_s"], h200["host_step_ns"]) == (4.8e12, 5_800)
    assert "launching" not in penstock("hardware", "laptop").out  # whose steps have that time


def test_measuring_again_forgets_this_machine_and_takes_every_dtype_that_was_known(penstock, machine):
    assert "Nothing has been measured" in penstock("hardware", "auto").out
    measured(reads(), lambda: Trials((1.5e9,)))
    measured(Subject("products", this_machine(), "float16"), lambda: Trials((1.0,)))
    facts = json.loads(penstock("hardware", "auto", "--measure", "--json").out)
    assert machine == ["float32", "memory", "bfloat16", "float16", "writes"]
    assert facts["presets"] == []
    assert sorted(one["title"] for one in facts["measured"]) == [
        "products of bfloat16",
        "products of float16",
        "products of float32",
        "reading memory",
    ]
    (memory,) = (one for one in facts["measured"] if one["subject"]["quantity"] == "memory")
    assert (memory["median"], memory["unit"], memory["waited"], memory["trials"]) == (2.5e10, "B/s", 0.5, 2)
    assert len(memory["doubts"]) == 2
    assert memory["fresh"]


def test_noise_and_age_are_told(penstock, monkeypatch):
    penstock("hardware", "--measure")
    said = penstock("hardware", "auto").out
    assert said.count("doubtful") == 1
    assert "  reading memory varied by 60% between 2 trials, waited for a processor 50% of\n" in said
    assert "spread: how far apart they are" in said
    now = figures.measurements()[0].taken_at + WEEK
    monkeypatch.setattr("time.time", lambda: float(now))
    assert penstock("hardware", "auto").out.count("expired") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["H200"], "did you mean 'h200'"), (["h200", "--measure"], "is another: leave out one of them")],
)
def test_what_is_refused(penstock, arguments, words):
    done = penstock("hardware", *arguments)
    assert (done.status, words in done.err, "Traceback" in done.err) == (2, True, False)


def test_a_file_is_listed_once_however_often_it_was_written_and_measured(penstock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    old, new = (replace(reads("/srv/model.safetensors"), identity=one) for one in ("old", "new"))
    for subject in (old, replace(old, cache="warm"), replace(old, quantity="answer"), new):
        measured(subject, lambda: Trials((1.5e9, 3.5e9)))
    table, doubts = penstock("hardware", "auto").out.split("Doubtful")
    assert table.count("/srv/model.safetensors") == 1
    assert table.count("direct reads") == 1
    assert "reads from the page cache" in table
    assert (
        " ".join(doubts.split()).count("direct reads of /srv/model.safetensors and 190 more varied by") == 1
    )
    measured_ = json.loads(penstock("hardware", "auto", "--json").out)["measured"]
    assert len(measured_) == 4

"""Rates of the machine: measured once, remembered, and never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.runtime import calibrate
from penstock.runtime.calibrate import measure_hardware


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "hardware.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, in order."""
    done: list[str] = []
    monkeypatch.setattr(calibrate, "_flops_per_s", lambda dtype: done.append("flops") or 2e11)
    monkeypatch.setattr(calibrate, "_memory_bytes_per_s", lambda: done.append("memory") or 1.5e10)
    return done


def test_rates_are_measured_once_and_the_link_is_as_given(cache: Path, measured: list[str]) -> None:
    first = measure_hardware((), 3e9, "so")
    second = measure_hardware((), 4e9, "and so")
    assert measured == ["flops", "memory"]
    assert (first.flops_per_s, first.memory_bytes_per_s, first.link_bytes_per_s) == (2e11, 1.5e10, 3e9)
    assert (second.flops_per_s, second.memory_bytes_per_s, second.link_bytes_per_s) == (2e11, 1.5e10, 4e9)
    (key,) = json.loads(cache.read_text())
    assert "threads, torch.float32, torch 2" in key


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"other": [1.0, 2.0]}', '{"KEY": [0.0, 1.0]}', '{"KEY": [1.0]}', '{"KEY": ["1", 2.0]}'],
)
def test_a_file_that_makes_no_sense_is_measured_over(cache: Path, measured: list[str], content: str) -> None:
    measure_hardware((), 3e9, "")
    (key,) = json.loads(cache.read_text())
    cache.write_text(content.replace("KEY", key.replace('"', "")))
    assert measure_hardware((), 3e9, "").flops_per_s == 2e11
    assert measured == ["flops", "memory"] * 2
    assert key in json.loads(cache.read_text())


def test_what_others_measured_stays(cache: Path, measured: list[str]) -> None:
    cache.parent.mkdir()
    cache.write_text('{"another machine": [1.0, 2.0]}')
    measure_hardware((), 3e9, "")
    assert json.loads(cache.read_text())["another machine"] == [1.0, 2.0]


def test_a_folder_that_cannot_be_written_is_not_missed(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    for _ in range(2):
        assert measure_hardware((), 3e9, "").flops_per_s == 2e11
    assert measured == ["flops", "memory"] * 2
    assert blocked.read_text() == ""

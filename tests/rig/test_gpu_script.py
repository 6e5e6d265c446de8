"""`make gpu`'s benchmark runs from its first cell to its table on a device that is no CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from penstock.demo.llama import Shape, make_meta_decoder
from penstock.runtime import calibrate
from tests.rig import machine


def test_the_benchmark_of_a_gpu_runs_on_the_rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "CALLS", (("llama", 1), ("llama", 8)))
    monkeypatch.setattr(gpu, "SHARES", (0.0, 1.0))
    monkeypatch.setattr(gpu, "PEERS", {})
    monkeypatch.setattr(calibrate, "_DEVICE_MATRIX", 64)
    monkeypatch.setattr(calibrate, "_DEVICE_BUFFER", 1 << 20)
    with machine.ordered("late"):
        gpu.main(device="rig", sizes="1MiB", rounds=1, json_path=tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(row["model"], row["tokens"]) for row in found["rows"]] == [
        call for call in gpu.CALLS for _ in gpu.SHARES
    ]
    for row in found["rows"]:
        assert row["equal"]
        assert row["misses"] == 0
        assert 0 < row["held_bytes"] <= row["budget"]
        assert row["seconds"] > 0
        assert row["driver_bytes"] >= row["held_bytes"]
    assert found["device"] == f"rig, {machine.MEMORY} bytes"
    assert capsys.readouterr().out.count("| yes |") == len(found["rows"])


def test_a_decoder_makes_its_angles_where_its_tokens_are(late: None) -> None:
    decoder = make_meta_decoder(Shape(128, 1, 256)).to_empty(device="rig").requires_grad_(False)
    for weight in decoder.parameters():
        weight.fill_(0.01)
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="rig")
    assert decoder(tokens).device == tokens.device
    assert "a pageable copy to the device" not in machine.blocked()

"""Models of libraries stream to the rig through `apply`, and give the bits that libraries give there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.integrations import apply, load
from penstock.schedule.facts.errors import PenstockError
from tests.integrations import models
from tests.rig import machine

IDS = torch.tensor([[5, 17, 99, 23, 42]])


@pytest.mark.parametrize(
    ("make", "memory", "order"), [(models.sliding, "300KB", "late"), (models.t5, "200KB", "lagging")]
)
def test_what_is_generated_on_the_rig_is_what_its_library_generates_there(
    make: Any, memory: str, order: str, tmp_path: Path
) -> None:
    machine.load()
    model = make().to("rig")
    reference = models.twin(model)
    with machine.ordered(order), apply(model, memory, device="rig", cache=tmp_path) as applied:
        assert {p.device for p in model.parameters()} == {torch.device("rig:0")}
        ids = IDS.to("rig")
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        (component,) = applied.components.values()
        assert component.stats.bytes_moved > 0
        assert component.stats.misses == 0
        assert component.stats.peak_bytes <= component.stats.budget < 300_000
        assert torch.equal(got, reference.generate(ids, max_new_tokens=4, do_sample=False))


def test_numbers_that_a_caller_has_on_the_cpu_stay_there(tmp_path: Path) -> None:
    """As torch takes them beside tensors of a device. A model moves them itself, as caches that slide do."""
    machine.load()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(
            self, x: torch.Tensor, factor: torch.Tensor, rows: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = layer(x) * factor
            return x[: rows.shape[0]], factor + 1, factor.to(x.device)

    model = models.frozen(Scaled()).to("rig")
    reference = models.twin(model)
    x, factor, rows = torch.randn(3, 8).to("rig"), torch.tensor(0.3), torch.empty(2, 0)
    with machine.ordered("late"), apply(model, "1MiB", device="rig", cache=tmp_path):
        got, expected = model(x=x, factor=factor, rows=rows), reference(x, factor, rows)
        assert [one.device for one in got] == [one.device for one in expected]
        assert [str(one.device) for one in got] == ["rig:0", "cpu", "rig:0"]
        assert all(torch.equal(*both) for both in zip(got, expected, strict=True))
        with pytest.raises(PenstockError, match=r"input tensors_1: expected a tensor on rig, got one on cpu"):
            model(x=x, factor=factor.expand(8), rows=rows)


def test_a_pipeline_draws_on_the_rig_what_it_draws_there_without_streaming(tmp_path: Path) -> None:
    machine.load()
    (tmp_path / "vocabulary").mkdir()
    made = models.pipeline(tmp_path / "vocabulary")
    made.save_pretrained(tmp_path / "saved", safe_serialization=True)
    expected = models.picture(made.to("rig"))
    assert sum(weight.nbytes for weight in made.unet.parameters()) > 3_000_000
    with machine.ordered("late"):
        streamed = load(
            tmp_path / "saved", "3MB", cache=tmp_path / "cache", example=models.nothing, device="rig"
        )
        streamed.set_progress_bar_config(disable=True)
        assert torch.equal(models.picture(streamed), expected)
        parts = streamed.penstock_applied.components
        assert parts["vae"].stats.peak_bytes <= parts["vae"].stats.budget
        streamed.penstock_applied.close()

"""Models of libraries stream to the rig through `apply`, and give the bits that libraries give there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.integrations import apply, load
from tests.integrations import models
from tests.rig import machine

IDS = torch.tensor([[5, 17, 99, 23, 42]])


@pytest.mark.parametrize(("make", "memory"), [(models.llama, "300KB"), (models.t5, "200KB")])
def test_what_is_generated_on_the_rig_is_what_its_library_generates_there(
    make: Any, memory: str, tmp_path: Path
) -> None:
    machine.load()
    model = make().to("rig")
    reference = models.twin(model)
    for order in (("late", 0), ("lagging", 0)):  # what the first one exports, the other finds in the cache
        with machine.ordered(*order), apply(model, memory, device="rig", cache=tmp_path) as applied:
            assert {p.device for p in model.parameters()} == {torch.device("rig:0")}
            ids = IDS.to("rig")
            got = model.generate(ids, max_new_tokens=4, do_sample=False)
            (component,) = applied.components.values()
            assert component.stats.bytes_moved > 0
            assert component.stats.misses == 0
            assert component.stats.peak_bytes <= component.stats.budget < 300_000
            assert torch.equal(got, reference.generate(ids, max_new_tokens=4, do_sample=False))


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

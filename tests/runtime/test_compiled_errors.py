"""Options that defeat streaming, and artifacts of another machine, are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import penstock
from penstock.runtime.program import Program
from penstock.schedule.payload import Payload
from tests.runtime.compiled_models import export


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freezing": True}, "'freezing' folds weights into constants"),
        ({"aot_inductor.package_constants_in_so": True}, "puts the weights into the shared object"),
        ({"aot_inductor.use_runtime_constant_folding": True}, "computes with weights once"),
    ],
)
def test_options_that_defeat_streaming_are_refused(tmp_path, options, message):
    exported = export(torch.nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(penstock.PassError, match=message):
        penstock.compile(exported, tmp_path / "m.penstock", lowering="inductor", options=options)
    assert not (tmp_path / "m.penstock").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "2.1.0"}, r"compiled by torch 2\.1\.0, and this is torch"),
        ({"machine": "cpu linux riscv64"}, "compiled for linux riscv64"),
        ({"machine": "cpu linux x86_64 AVX1024"}, "a processor with AVX1024"),
    ],
)
def test_an_artifact_of_another_machine_is_refused_by_name(compiled, change, message):
    payload: Payload = compiled["odd"].program.payload
    assert payload.program is not None
    if "machine" in change:
        payload = replace(payload, program=replace(payload.program, **change))
    else:
        payload = replace(payload, **change)
    with pytest.raises(penstock.PayloadError, match=message):
        Program(compiled["odd"].program.path, payload).load("50%")

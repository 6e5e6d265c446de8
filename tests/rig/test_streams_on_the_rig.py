"""What only late kernels show: passes on several streams, and closing while kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.program import Program
from tests.rig import machine
from tests.rig.rig_runs import plan_of


class Wide(nn.Module):
    """Linears of one size, of which the first ones stay; each output shows all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, nn.Module]:
    torch.manual_seed(1)
    module = Wide().requires_grad_(False)
    path = tmp_path_factory.mktemp("wide") / "wide.penstock"
    return penstock.compile(export(module, (torch.zeros(2, 64),)), path), module


@pytest.mark.parametrize("share", ["50%", "80%", "100%"])
def test_closing_waits_for_kernels_on_any_stream(wide: Any, order: str, share: str) -> None:
    program, module = wide
    values = torch.randn(2, 64).to("rig")
    expected = module.to("rig")(values)
    stream = torch.Stream("rig")
    stream.wait_stream(torch.accelerator.current_stream())
    plan = plan_of(program, share, keep=("layers.7.*",))  # read behind all probes
    streamed = program.load(plan=plan, device="rig")
    with torch.no_grad(), stream:
        output = streamed(values)
    streamed.close()
    del streamed
    taken = [torch.full((4096,), 7.0, device="rig") for _ in range(64)]  # the memory that was given back
    torch.accelerator.current_stream().synchronize()
    with stream:
        assert torch.equal(output, expected)
    del taken


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50)).requires_grad_(False)
    path = tmp_path_factory.mktemp("embedding") / "m.penstock"
    return penstock.compile(export(module, (torch.arange(6),)), path), module


def test_an_error_of_a_late_kernel_is_the_devices_and_closing_stays_clean(embedding: Any, order: str) -> None:
    program, module = embedding
    tokens, plan = torch.arange(6), plan_of(program, "60%")
    expected = module.to("rig")(tokens.to("rig")).cpu()
    streamed = program.load(plan=plan, device="rig")
    with torch.no_grad():
        wrong = (tokens + 45).to("rig")
        with pytest.raises((RuntimeError, penstock.StreamError), match="index out of range"):
            streamed(wrong).cpu()
        with pytest.raises(penstock.StreamError, match=r"rig:0 is lost .* index out of range"):
            streamed(wrong)
        streamed.close()
        torch.ops.rig.restart()  # as a new process would
        with program.load(plan=plan, device="rig") as again:
            assert torch.equal(again(tokens.to("rig")).cpu(), expected)


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("share", ["floor", "60%"])
def test_passes_on_streams_in_turn_see_each_others_weights(
    wide: Any, order: str, wrap: Any, share: str
) -> None:
    program, module = wide
    calls = [torch.randn(2, 64).to("rig") for _ in range(6)]
    resident = module.to("rig")
    expected = [resident(values) for values in calls]
    streams = [torch.Stream("rig") for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())
    budget = program.floor("rig") if share == "floor" else share
    plan = plan_of(program, budget, wrap=wrap)
    outputs = []
    with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
        before = machine.blocked()
        for number, values in enumerate(calls):
            with streams[number % 2]:
                outputs.append(streamed(values))
        assert machine.blocked() == before
        streams[0].synchronize()  # as far as the other has to come for it, and no further
        for number, output in enumerate(outputs):
            with streams[number % 2]:
                assert torch.equal(output, expected[number]), number

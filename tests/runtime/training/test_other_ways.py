"""Training on the simulated device, and by code that Inductor compiled."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.program import Program
from tests.training_models import DECODER, WIDTH, Adapted


class Chain(nn.Module):
    """Three adapted layers, small enough for Inductor to compile within seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def gradients(program: Program, budget: int | str, device: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of the second of two steps, which has no misses."""
    with program.load(budget, device=device) as module:
        for _ in range(2):
            module.zero_grad()
            torch.manual_seed(0)
            result = module(*inputs)
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
        assert module.stats.misses == 0
        assert bool(module.stats.bytes_moved) == (budget != "100%")
        found = [one.grad for one in module.parameters()]
    assert all(one is not None and one.any() for one in found)
    return [loss.detach(), *(one for one in found if one is not None)]


def test_on_the_simulated_device(tmp_path: Path) -> None:
    program = penstock.compile_training(
        DECODER.model(), tmp_path / "m.penstock", example=DECODER.inputs(), trainable=DECODER.patterns
    )
    plain = DECODER.model()
    torch.manual_seed(0)
    loss = plain(*DECODER.inputs())[0]
    loss.backward()
    expected = [loss.detach(), *(one.grad for one in plain.parameters() if one.requires_grad)]
    floor = program.floor("sim")
    for budget in (floor, "50%", "100%"):
        assert all(
            torch.equal(*pair)
            for pair in zip(gradients(program, budget, "sim", *DECODER.inputs()), expected, strict=True)
        )


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiler")
def test_compiled_by_inductor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = penstock.compile_training(
            Chain(),
            tmp_path / "m.penstock",
            example=(x,),
            trainable=["*down*", "*up*"],
            lowering="inductor",
            evaluate=False,
            resident_below="1KiB",
        )
    expected = gradients(program, "100%", "cpu", x)
    for budget in (program.floor_bytes, "50%"):
        assert all(
            torch.equal(*pair) for pair in zip(gradients(program, budget, "cpu", x), expected, strict=True)
        )


class Turned(nn.Module):
    """Its forward keeps values that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.frozen = nn.Linear(48, 48), nn.Linear(48, 480)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.down(x).sin().transpose(0, 1).repeat(1, 1, 3).unsafe_split(48, -1)
        y = parts[0].sigmoid_() * parts[1].tanh()
        return self.frozen(torch.nn.functional.dropout(y, 0.3)).square().mean()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiler")
def test_values_that_are_not_contiguous_compiled_by_inductor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(7, 5, 48).transpose(0, 1)
    torch.manual_seed(1)
    model(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = penstock.compile_training(
            model, tmp_path / "m.penstock", example=(x,), trainable=["down.*"], lowering="inductor"
        )
    with program.load("100%") as module:
        torch.manual_seed(1)
        module(x).backward()
        found = dict(module.named_parameters())["down.weight"].grad
    assert found is not None
    assert model.down.weight.grad is not None
    torch.testing.assert_close(found, model.down.weight.grad)

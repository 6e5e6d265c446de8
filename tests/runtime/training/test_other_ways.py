"""Training on the simulated device, and by code that Inductor compiled."""

import warnings

import pytest
import torch
from torch import nn

import penstock
from tests.training_models import DECODER, WIDTH, Adapted


class Chain(nn.Module):
    """Two adapted layers, small enough for Inductor to compile within seconds.

    Its forward keeps values that are not contiguous.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        parts = x.sin().transpose(0, 1).repeat(1, 1, 3).unsafe_split(WIDTH, -1)
        y = parts[0].sigmoid_() * parts[1].tanh()
        return self.head(torch.nn.functional.dropout(y, 0.3)).square().mean()


def gradients(program, budget, device, *inputs):
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


def test_on_the_simulated_device(program_of):
    program = program_of(DECODER)
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
def test_compiled_by_inductor(tmp_path):
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(7, 5, WIDTH).transpose(0, 1)
    trained = [one.requires_grad_("base" not in n and "head" not in n) for n, one in model.named_parameters()]
    torch.manual_seed(0)
    loss = model(x)
    loss.backward()
    plain = [loss.detach(), *(one.grad for one in trained if one.requires_grad)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = penstock.compile_training(
            model,
            tmp_path / "m.penstock",
            example=(x,),
            trainable=["*down*", "*up*"],
            lowering="inductor",
            evaluate=False,
            resident_below="1KiB",
        )
    expected = gradients(program, "100%", "cpu", x)
    torch.testing.assert_close(expected, plain)
    for budget in (program.floor_bytes, "50%"):
        assert all(
            torch.equal(*pair) for pair in zip(gradients(program, budget, "cpu", x), expected, strict=True)
        )

"""A training program that returns one tensor several times has the gradients of autograd."""

import copy

import pytest
import torch
from torch import nn

import penstock


class Repeating(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.outer(self.inner(x))
        return {"logits": y, "again": (y, [y]), "turned": y.t()}


LOSSES = {
    "of the first": lambda found: (found["logits"] ** 2).sum() + found["turned"].sum(),
    "of all": lambda found: (
        (found["logits"] * found["again"][0] * found["again"][1][0]).sum() + (found["turned"] * 3).sum()
    ),
    "of the last": lambda found: found["again"][1][0].sum() + found["turned"].exp().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_autograd(name, tmp_path):
    torch.manual_seed(0)
    model, x = Repeating(), torch.randn(3, 8)
    reference, expected = copy.deepcopy(model), LOSSES[name]
    program = penstock.compile_training(model, tmp_path / "m.penstock", trainable=["inner.*"], example=(x,))
    with program.load(program.floor_bytes) as module:
        for one in (reference, module):
            found = one(x)
            assert found["logits"] is found["again"][0] is found["again"][1][0]
            expected(found).backward()
        gradients = {fqn: value.grad for fqn, value in module.named_parameters()}
    assert set(gradients) == {"inner.weight", "inner.bias"}
    for fqn, gradient in gradients.items():
        assert torch.equal(gradient, reference.get_parameter(fqn).grad)

"""Batch norms of operands that are not contiguous: training has PyTorch's bits, by the strides of kernels."""

import copy

import pytest
import torch
from torch import nn

import penstock

WIDTH = 16


class Turned(nn.Module):
    """A norm of channels that lie last, between two linears."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        order = [0, x.dim() - 1, *range(1, x.dim() - 1)]
        back = [0, *range(2, x.dim()), 1]
        return self.after(self.norm(self.before(x).permute(order)).permute(back))


class Rows(Turned):
    """A norm over the columns of a transposed matrix."""

    def forward(self, x):
        return self.after(self.norm(self.before(x[0]).t()).t())


MEMBERS = {
    "sequences": (lambda: Turned(nn.BatchNorm1d(WIDTH)), (2, 7, WIDTH)),
    "no statistics": (lambda: Turned(nn.BatchNorm1d(WIDTH, track_running_stats=False)), (2, 7, WIDTH)),
    "no weights": (lambda: Turned(nn.BatchNorm1d(WIDTH, affine=False)), (2, 7, WIDTH)),
    "images": (lambda: Turned(nn.BatchNorm2d(WIDTH)), (2, 3, 5, WIDTH)),
    "volumes": (lambda: Turned(nn.BatchNorm3d(WIDTH)), (2, 3, 2, 5, WIDTH)),
    "rows": (lambda: Rows(nn.BatchNorm1d(7)), (2, 7, WIDTH)),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_step_has_the_bits_of_autograd(name, train, tmp_path):
    make, shape = MEMBERS[name]
    model, x = make().train(train), torch.randn(shape)
    trainable = ["before.weight", "after.bias"]
    reference = copy.deepcopy(model).requires_grad_(False)
    for fqn in trainable:
        reference.get_parameter(fqn).requires_grad_(True)
    program = penstock.compile_training(
        model,
        tmp_path / "m.penstock",
        trainable=trainable,
        example=(x,),
        activations=["keep"],
        evaluate=False,
    )
    with program.load(program.floor_bytes) as module:
        for one in (reference, module):
            (one(x) ** 2).sum().backward()
        trained = dict(module.named_parameters())
        assert torch.equal(module(x), reference(x))
    for fqn in trainable:
        assert torch.equal(trained[fqn].grad, reference.get_parameter(fqn).grad), fqn

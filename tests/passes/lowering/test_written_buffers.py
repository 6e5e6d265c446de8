"""Buffers that compiled methods write: results that are what a buffer held before, and tiny buffers."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import penstock


class Writing(nn.Module):
    """Writes a buffer, and counts in buffers of few elements; another method peeks at both."""

    def __init__(self, counts):
        super().__init__()
        self.linear, self.peeks = nn.Linear(64, 64), False
        self.register_buffer("held", torch.randn(8, 64))
        for number, count in enumerate(counts):
            self.register_buffer(f"count{number}", count)

    def forward(self, x):
        held, counts = self.held, list(self.buffers())[1:]
        y = self.linear(x) + torch.stack([count.sum() for count in counts]).sum()
        if self.peeks:
            return y, held.clone()
        copied = held.clone()
        old = [
            held[:4].clone(),
            held.clone().T,
            torch.cat([held]),
            torch.constant_pad_nd(held, [0, 0]),
            [copied, copied[:2]],
            [count.clone() for count in counts],
        ]
        held.mul_(2)
        for count in counts:
            count.add_(1)
        return y, old, held, [count * 2 for count in counts]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiler")
def test_results_are_of_the_time_when_they_were_computed(tmp_path):
    model = Writing([torch.zeros(()), torch.tensor(3), torch.ones(1), torch.arange(4.0)]).eval()
    peeking = deepcopy(model)
    peeking.load_state_dict(model.state_dict(), assign=True)
    peeking.peeks = True
    methods, x = {"write": model, "peek": peeking}, torch.randn(4, 64)
    programs = {name: torch.export.export(one, (x,)) for name, one in methods.items()}
    program = penstock.compile(programs, tmp_path / "model.penstock", lowering="inductor")
    with program.load("100%") as module:
        for name in ("peek", "write", "write", "peek", "write"):
            found, expected = getattr(module, name)(x), methods[name](x)
            for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
                torch.testing.assert_close(one, other)


class Counting(nn.Module):
    """Counts at places that are written down, here and in a part, and computes with both."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(64, 64)
        self.part.factor = torch.tensor([0.5, 2.0])  # no parameter and no buffer
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

    def forward(self, x):
        self.count.index_put_((torch.tensor([0, 2]),), torch.tensor([2, 3]), accumulate=True)
        y = self.part(x)[:, torch.tensor([3, 1])] * self.part.factor
        return y + torch.tensor([0.25]) + self.count.sum()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiler")
def test_tensors_that_a_forward_writes_down_may_stand_beside_a_counter(tmp_path):
    model, x = Counting().eval(), torch.randn(4, 64)
    exported = torch.export.export(model, (x,))
    program = penstock.compile(exported, tmp_path / "model.penstock", lowering="inductor")
    with program.load("100%") as module, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(module(x), model(x))

"""Buffers that compiled methods write: results that are what a buffer held before, and tiny buffers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock


class Writing(nn.Module):
    """Writes a buffer, and counts in buffers of few elements; another method peeks at both."""

    def __init__(self, counts: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.peeks = nn.Linear(64, 64), False
        self.register_buffer("held", torch.randn(8, 64))
        for number, count in enumerate(counts):
            self.register_buffer(f"count{number}", count)

    def forward(self, x: Tensor) -> object:
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
def test_results_are_of_the_time_when_they_were_computed(tmp_path: Path) -> None:
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

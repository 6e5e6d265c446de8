"""as_strided with an offset, which counts from where the storage of a weight begins, on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock

WIDTH = 64


class Strided(nn.Module):
    """Reads weights, views of weights and a buffer by offsets in their storages, behind another weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Parameter(torch.randn(2 * WIDTH, WIDTH), requires_grad=False)
        self.lower = nn.Parameter(self.both.detach()[WIDTH:], requires_grad=False)
        self.alone = nn.Parameter(torch.randn(2, WIDTH, WIDTH)[1], requires_grad=False)
        self.register_buffer("state", torch.zeros(3 * WIDTH))

    def forward(self, x):
        x = self.first(x)
        x = x @ self.both.as_strided((WIDTH, WIDTH), (1, WIDTH), 3)
        x = x @ self.lower.as_strided((WIDTH, WIDTH), (WIDTH, 1), WIDTH)
        x = x @ self.alone.t().as_strided((WIDTH, WIDTH), (1, WIDTH), WIDTH * WIDTH // 2)
        self.state.as_strided((WIDTH,), (1,), 5).add_(x.mean(0))
        return x / WIDTH + self.state[:WIDTH]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_bytes_are_those_of_the_module(share, tmp_path):
    model, x = Strided().eval(), torch.randn(5, WIDTH)
    reference = Strided().eval()  # a copy of it would have a storage for each parameter
    program = penstock.compile(torch.export.export(model, (x,)), tmp_path / "m.penstock")
    floor = program.floor("sim")
    budget = max(floor, int(program.weight_bytes * share))
    plan = program.plan(budget, device="sim", hardware="laptop")
    with program.load(plan=plan, device="sim", poison=True) as module, torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(x), reference(x))

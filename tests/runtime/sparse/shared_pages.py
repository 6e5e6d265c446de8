"""A model whose units share pages, and pools of several sizes for it."""

from dataclasses import replace

import torch
from torch import nn

from penstock.schedule.facts.model import Hardware

HARDWARE = Hardware("toy", 1e12, 1e10, 1e9, 4_000)
POOLS = {"rounds": 24 * 4096, "one unit": 11 * 4096, "several": 80 * 4096}
"""Bytes of pools: of two experts, of one, and of what some calls name."""


class Model(nn.Module):
    """Rows of a table, ten to a page, and experts of two stacks, neither a whole number of pages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4096, 100))
        self.up = nn.Parameter(torch.randn(64, 100, 96))
        self.down = nn.Parameter(torch.randn(64, 96, 50))

    def forward(self, rows, ids):
        x = nn.functional.embedding(rows, self.table).sum(0)
        return ((x @ self.up[ids])[:, None] @ self.down[ids]).sum(0)


def inputs(call):
    """Rows and experts of a call, some of them those of the call before."""
    dice = torch.Generator().manual_seed(call // 2)
    again = torch.Generator().manual_seed(call)
    rows = torch.cat([torch.randint(4096, (4,), generator=dice), torch.randint(4096, (4,), generator=again)])
    ids = torch.cat([torch.randint(64, (2,), generator=dice), torch.randint(64, (3,), generator=again)])
    return rows, ids


def plan_with(program, pool):
    """A plan with a pool of a size of `POOLS`."""
    plan = program.plan("50%", hardware=HARDWARE)
    assert plan.pool is not None
    return replace(plan, pool=replace(plan.pool, nbytes=POOLS[pool]))

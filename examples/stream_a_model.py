"""Runs an exported model in a quarter of the memory that its weights take.

    python examples/stream_a_model.py [BUDGET]        # 25%, 64MiB, ... ; 25% unless given

Exports a module, compiles it once into an artifact, plans for a budget, and runs it. The artifact could be
opened again in a process that knows neither the model's class nor its source. docs/first-steps.md explains
it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import penstock


class Block(nn.Module):
    """A feed-forward block, as transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(folder: Path, budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(768) for _ in range(8))).eval()
    x = torch.randn(4, 768)

    program = penstock.compile(torch.export.export(model, (x,)), folder / "model.penstock")
    print(f"{program.weight_bytes:,} bytes of weights; {program.floor_bytes:,} is the least that runs them")

    plan = program.plan(budget)
    bound = (
        f"; no plan can take less than {plan.lower_bound_seconds:.4f} s" if plan.lower_bound_seconds else ""
    )
    print(f"{plan.streamed_bytes:,} bytes stream in {plan.predicted_seconds:.4f} s a pass{bound}")

    with program.load(plan=plan) as module, torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(x), model(x))
        print(f"bit-equal; at most {module.stats.peak_bytes:,} bytes held, {module.stats.misses} misses")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), sys.argv[1] if len(sys.argv) > 1 else "25%")

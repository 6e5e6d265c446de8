"""Exports a model for ExecuTorch, with its weights in a file that they stream from.

    python examples/executorch_export.py [BUDGET]

A decoder with two methods, a shared cache and a tied head goes through ExecuTorch's own export. penstock's
partitioner marks what reads weights. The `.pte` then has code and plans, and the `.ptd` each weight once.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
except ModuleNotFoundError as error:
    sys.exit(f"this example needs {error.name}: pip install '.[executorch]'")

from penstock.backends.executorch import PenstockPartitioner, read, save


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 1024, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        self.keys.index_copy_(0, positions, self.k(x))
        self.values.index_copy_(0, positions, self.v(x))
        seen = torch.arange(len(self.keys)) <= positions[:, None]
        scores = (self.q(x) @ self.keys.t()).masked_fill(~seen, -1e9)
        x = x + torch.softmax(scores / len(self.q.weight) ** 0.5, -1) @ self.values
        return self.head(x + self.down(torch.relu(self.up(x))))


def main() -> None:
    budget = sys.argv[1] if len(sys.argv) > 1 else "60%"
    model = Decoder().eval()
    methods = {"prefill": torch.arange(8), "decode": torch.tensor([8])}
    programs = {name: torch.export.export(model, (given, given.clone())) for name, given in methods.items()}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # ExecuTorch's own
        edge = to_edge_transform_and_lower(programs, partitioner=[PenstockPartitioner(budget=budget)])
        program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
        exported = read(save(program, Path(folder) / "model.pte"))
        files = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    print(f"files: {files}")
    for weight in exported.payload.weights:
        place = exported.place_of(weight.parts[0])
        print(f"{weight.fqn}: " + (f"{place[0].name} at byte {place[1]}" if place else "begins as zeros"))
    print(f"{len(exported.regions)} delegates run {len(exported.programs)} programs")
    for plan in exported.payload.plans:
        print(
            f"with {plan.budget} bytes for weights a pass of each method brings {plan.streamed_bytes} bytes"
        )


if __name__ == "__main__":
    main()

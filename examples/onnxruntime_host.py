"""Streams the weights of an ONNX model under onnxruntime, in memory that penstock fills.

    python examples/onnxruntime_host.py

The bits are those of onnxruntime alone, run over the same files with the same options.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

try:
    import onnxruntime
except ModuleNotFoundError as error:
    sys.exit(f"this example needs {error.name}: pip install '.[onnx]'")

from penstock import LoadOptions
from penstock.backends.onnx import StreamedModel, plain_options, write_onnx


class Encoder(nn.Module):
    """Blocks of a feed-forward network over embeddings, whose matrix is also the head."""

    def __init__(self, width: int = 256, depth: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    @staticmethod
    def block(width: int) -> nn.Module:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model, tokens = Encoder().eval(), torch.randint(0, 1000, (1, 16))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_onnx(torch.export.export(model, (tokens,)), folder)
        alone = onnxruntime.InferenceSession(folder / "model.onnx", plain_options())
        (expected,) = alone.run(None, {alone.get_inputs()[0].name: tokens.numpy()})
        with StreamedModel(folder, "40%", options=LoadOptions(arena="contiguous")) as streamed:
            for _ in range(3):
                (output,) = streamed(tokens.numpy())
                assert np.array_equal(output, expected)
            stats, count = streamed.weights.stats, len(streamed.sessions)
    print(f"{count} sessions, {stats.passes} passes, equal bit for bit")
    print(f"{stats.bytes_moved:,} bytes moved, {stats.misses} misses, at most {stats.peak_bytes:,} held")
    difference = np.abs(expected - model(tokens).detach().numpy()).max()
    print(f"onnxruntime and torch differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()

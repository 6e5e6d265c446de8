"""What the tests of all backends share: a model with a cache, and how a lowered graph is run and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.weights.lifted import weights_among
from penstock.schedule.payload.codec import Payload

WIDTH = 64


class Decoder(nn.Module):
    """Layers over a cache of what was seen, with a head tied to the embedding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(16, WIDTH))

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        self.cache.index_copy_(0, places, x)
        x = x + self.cache.mean(0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


PROMPT = (torch.arange(5), torch.arange(5))
TOKEN = (torch.tensor([7]), torch.tensor([5]))


def decoder() -> tuple[Decoder, dict[str, torch.export.ExportedProgram]]:
    """The model, and its two methods over one cache."""
    torch.manual_seed(0)
    model = Decoder().eval()
    return model, {
        "prefill": torch.export.export(model, PROMPT),
        "decode": torch.export.export(model, TOKEN),
    }


class Layers(nn.Module):
    """Linears with a function between them, some of which is nothing that reads a weight."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 2 + x
        return x


def layers() -> tuple[Layers, torch.export.ExportedProgram, torch.Tensor]:
    """The model, its program and an input."""
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(3, WIDTH)
    return model, torch.export.export(model, (x,)), x


def arguments(
    graph_module: fx.GraphModule,
    payload: Payload,
    method: str,
    tensors: Mapping[str, torch.Tensor],
    inputs: Sequence[Any],
) -> list[Any]:
    """What a graph is called with: weights by their names, and the inputs between them."""
    held, given = weights_among(graph_module, payload, method), iter(inputs)
    names = [node.name for node in placeholders_of(graph_module.graph)]
    return [tensors[held[name].fqn] if name in held else next(given) for name in names]

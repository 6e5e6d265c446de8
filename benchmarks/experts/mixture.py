"""A mixture of experts with random weights, which is told the routes of its tokens.

Routes are an input, so that they can be drawn: uniformly, or by a law of Zipf, with favourites of each layer
that drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

ROUTINGS = ("zipf", "uniform")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: those of an expert, and of how many `experts` a token asks for `asked`."""

    layers: int
    width: int
    inner: int
    experts: int
    asked: int
    words: int = 50304


SHAPES = {
    "olmoe": Shape(6, 2048, 1024, 64, 8),
    "qwen3-30b": Shape(5, 2048, 768, 128, 8, 151936),
    "small": Shape(3, 1024, 512, 64, 8, 8192),
    "tiny": Shape(3, 128, 64, 64, 8, 1024),
}


class Experts(nn.Module):
    """Experts as transformers holds and calls them: two stacks, and products of the rows sorted by expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        chosen = route.reshape(-1)
        order = torch.argsort(chosen)
        rows = x[order // route.shape[1]]
        counts = torch.histc(chosen.float(), self.gate_up.shape[0], 0, self.gate_up.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), ends).chunk(2, -1)
        out = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), ends)
        back = torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0]))
        mixed: torch.Tensor = out[back].view(*route.shape, -1).mean(1)
        return mixed


class Layer(nn.Module):
    """A dense part as large as attention, and experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](x)
        for one in self.mix:
            seen = one(seen)
        x = x + seen
        out: torch.Tensor = x + self.experts(self.norms[1](x), route)
        return out


class Model(nn.Module):
    """A table of words, layers, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, tokens: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer, route in zip(self.layers, routes, strict=True):
            x = layer(x, route)
        logits: torch.Tensor = self.head(x)
        return logits


_PRIME = 4194301
"""How many numbers are drawn, over and over. As it divides no expert, each expert begins at another one."""


def write_weights(shape: Shape, path: Path) -> int:
    """Write random weights whose products keep their size; returns their bytes."""
    with torch.device("meta"):
        model = Model(shape)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_PRIME, generator=generator).to(torch.bfloat16)
    values: dict[str, torch.Tensor] = {}
    for number, (name, one) in enumerate(model.named_parameters()):
        if one.dim() == 1:
            values[name] = torch.ones(one.shape, dtype=torch.bfloat16)
            continue
        rolled = noise.roll(7919 * number) * one.shape[-1] ** -0.5
        times = -(-one.numel() // len(rolled))
        values[name] = rolled.repeat(times)[: one.numel()].view(one.shape)
    save_file(values, path)
    return sum(value.nbytes for value in values.values())


def draw(shape: Shape, routing: str, tokens: int) -> list[torch.Tensor]:
    """Return the routes of each token, (layers, 1, asked); `routing` is one of `ROUTINGS`."""
    generator = torch.Generator().manual_seed(1)
    rank = torch.arange(1, shape.experts + 1, dtype=torch.float64)
    weight = torch.ones_like(rank) if routing == "uniform" else 1 / rank
    orders = [torch.randperm(shape.experts, generator=generator) for _ in range(shape.layers)]
    found = []
    for token in range(tokens):
        if token % 32 == 31:  # two experts of each layer change places
            for order in orders:
                pair = torch.randperm(shape.experts, generator=generator)[:2]
                order[pair] = order[pair.flip(0)]
        picked = [order[torch.multinomial(weight, shape.asked, generator=generator)] for order in orders]
        found.append(torch.stack(picked).unsqueeze(1))
    return found

"""Small models with adapters, whose other weights are frozen, for the tests of training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

WIDTH = 128


class Adapted(nn.Module):
    """A frozen linear with an adapter of two trainable matrices beside it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=False)
        self.down = nn.Linear(inner, 4, bias=False)
        self.up = nn.Linear(4, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention whose queries, keys and values are three views of one weight, and a gated product."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.packed = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.out = Adapted(width, width)
        self.gate = Adapted(width, 2 * width)
        self.back = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        seen = self.norms[0](x)
        query, key, value = (
            functional.linear(seen, one).view(batch, length, 4, width // 4).transpose(1, 2)
            for one in self.packed.chunk(3)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.back(functional.silu(self.gate(self.norms[1](x)))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head tied to it; returns the loss and the logits."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


class Normed(nn.Module):
    """Convolutions with batch norms, which write their statistics, and a trainable head."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.adapter = nn.Conv2d(3, 8, 1)
        self.head = Adapted(8, 5)

    def forward(self, x):
        x = self.adapter(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = functional.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class Trained:
    """A model, what it is called with, which of its parameters are trained, and its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    trainable: tuple[str, ...]
    loss: Callable[..., torch.Tensor]

    def model(self, dtype=torch.float32):
        """The model with random weights, all but `trainable` frozen."""
        torch.manual_seed(0)
        model = self.make().to(dtype)
        for name, parameter in model.named_parameters():
            words = name.split(".")
            parameter.requires_grad_(any(word in words for word in self.trainable))
        return model

    @property
    def patterns(self):
        return [f"*{word}.*" for word in self.trainable]


def _tokens(batch=2, length=16):
    tokens = torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def _pictures():
    return (torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1)),)


DECODER = Trained(Decoder, _tokens, ("down", "up"), lambda result: result[0])
NORMED = Trained(Normed, _pictures, ("down", "up", "adapter"), lambda result: result.square().mean())

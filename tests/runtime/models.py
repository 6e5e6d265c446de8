"""Small models and their artifacts, shared by the runtime's tests."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """A residual block with a norm and two linears."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks of uneven width between an embedding and a head tied to it."""

    def __init__(self, width=384, blocks=6, tokens=300):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


class Counter(nn.Module):
    """Mutates a buffer at every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) * self.calls


def aligned(module):
    """The module itself, every weight cloned into memory that torch aligns to 64 bytes."""
    with torch.no_grad():
        for weight in [*module.parameters(), *module.buffers()]:
            weight.data = weight.data.clone()
    return module


@contextmanager
def broken(streamed, release, *errors):
    """Has the pass within raise InterruptedError at its release of that number, and expects one of `errors`.

    The end of a capture that breaks may raise an error of its own.
    """
    inner = streamed._weights.streamer
    released = []

    def count(graph, step):
        released.append(step)
        if len(released) == release:
            raise InterruptedError
        type(inner).release(inner, graph, step)

    inner.release = count
    with pytest.raises(errors):
        yield
    del inner.release
    assert len(released) == release

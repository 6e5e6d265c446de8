"""Small models with what is hard to export: ties, caches that two methods share, constants of one name."""

import torch
from torch import nn


class Mlp(nn.Module):
    """Two linears worth a region, and a norm that is not."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(128, 256), nn.Linear(256, 128), nn.LayerNorm(128)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


class Decoder(nn.Module):
    """One layer of attention over caches, and a head that is tied to the embedding."""

    def __init__(self, vocabulary=512, width=64, length=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.full((length, width), 0.5))
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1), persistent=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        self.keys.index_copy_(0, positions, self.k(x))
        self.values.index_copy_(0, positions, self.v(x))
        scores = self.q(x) @ self.keys.t() / 8 + self.mask[positions]
        x = x + torch.softmax(scores, -1) @ self.values
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x)


def methods_of(decoder):
    """A method for eight tokens and one for a single token."""
    prefill = (torch.arange(8), torch.arange(8))
    decode = (torch.tensor([3]), torch.tensor([8]))
    return {
        name: torch.export.export(decoder, given)
        for name, given in (("prefill", prefill), ("decode", decode))
    }

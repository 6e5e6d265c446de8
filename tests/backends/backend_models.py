"""What the tests of all backends share: a model with a cache, and how a lowered graph is run and compared."""

import torch
from torch import nn

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.weights.lifted import weights_among

WIDTH = 64


class Decoder(nn.Module):
    """Layers over a cache of what was seen, with a head tied to the embedding."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(16, WIDTH))

    def forward(self, tokens, places):
        x = self.embed(tokens)
        self.cache.index_copy_(0, places, x)
        x = x + self.cache.mean(0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


PROMPT = (torch.arange(5), torch.arange(5))
TOKEN = (torch.tensor([7]), torch.tensor([5]))


def decoder():
    """The model, and its two methods over one cache."""
    torch.manual_seed(0)
    model = Decoder().eval()
    return model, {"prefill": torch.export.export(model, PROMPT), "decode": torch.export.export(model, TOKEN)}


class Layers(nn.Module):
    """Linears with a function between them, some of which is nothing that reads a weight."""

    def __init__(self, count=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 2 + x
        return x


def layers():
    """The model, its program and an input."""
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(3, WIDTH)
    return model, torch.export.export(model, (x,)), x


def arguments(graph_module, payload, method, tensors, inputs):
    """What a graph is called with: weights by their names, and the inputs between them."""
    held, given = weights_among(graph_module, payload, method), iter(inputs)
    names = [node.name for node in placeholders_of(graph_module.graph)]
    return [tensors[held[name].fqn] if name in held else next(given) for name in names]

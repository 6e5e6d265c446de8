"""Weights and buffers that a call writes, in whatever place and from any call on, keep what was written."""

import pytest
import torch
from torch import nn

from penstock import LoadOptions
from penstock.integrations import apply
from tests.hunt import nightly_but
from tests.integrations import models

POISONED = LoadOptions(arena="contiguous", poison=True)


class Model(nn.Module):
    """Layers, and what `write` does to weights of the model from call number `since` on."""

    def __init__(self, write, since):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.register_buffer("large", torch.randn(512, 512))
        self.write, self.since, self.calls = write, since, 0
        own = self.layers[3].forward
        self.layers[3].forward = lambda x: own(x) + self.own()

    def own(self):
        if self.calls >= self.since and self.write in IN_ITS_STEP:
            self.write(self.layers[3])
        return 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.since and self.write not in IN_ITS_STEP:
            self.write(self)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.large.sum(0)[:64]


def in_its_step(layer):
    layer.bias.add_(1)


def through_data(layer):
    layer.weight.data.mul_(0.5)


def by_numpy(layer):
    layer.bias.numpy()[::2] += 1


IN_ITS_STEP = in_its_step, through_data, by_numpy
"""What a layer does to its own weights while its forward runs."""


def moving_average(model):
    for mine, other in zip(model.layers[4].parameters(), model.layers[5].parameters(), strict=True):
        mine.mul_(0.9).add_(other * 0.1)


WRITES = {
    **{write.__name__: write for write in IN_ITS_STEP},
    "outside of its step": lambda model: model.layers[2].weight.mul_(0.5),
    "as out=": lambda model: torch.mul(model.layers[1].bias, 1.5, out=model.layers[1].bias),
    "an average": moving_average,
    "a large buffer": lambda model: model.large.mul_(1.5),
    "rows of a large buffer": lambda model: model.large.__setitem__(model.calls, 1.0),
}


CASES = [(name, since) for name in WRITES for since in (1, 3)]
CASES.remove((through_data.__name__, 3))  # no version tells of these: only a first call compares bytes
CASES.remove((by_numpy.__name__, 3))


SAMPLE = [*((name, 1) for name in WRITES), ("an average", 3), ("in_its_step", 3)]


@pytest.mark.parametrize(("name", "since"), nightly_but(SAMPLE, CASES))
def test_it_keeps_what_was_written(name, since, tmp_path):
    def made():
        return models.frozen(Model(WRITES[name], since))

    model, reference = made(), made()
    x = torch.randn(6, 64)
    with torch.no_grad():
        with apply(model, "3MB", cache=tmp_path, options=POISONED) as applied:
            for count in (6, 6, 6, 2, 6):
                assert torch.equal(model(x[:count]), reference(x[:count]))
            applied.idle()
            assert torch.equal(model(x), reference(x))
        for mine, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
            assert torch.equal(mine, other)

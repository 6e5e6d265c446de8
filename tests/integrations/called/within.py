"""Models that are called within a number of bytes for weights, whatever calls take beside them."""

import copy

import torch

from penstock import LoadOptions
from penstock.integrations.cap import Cap
from tests.integrations.models import frozen

POISONED = LoadOptions(arena="contiguous", poison=True)
CHECKED = LoadOptions(check_reads=True)


class Room(Cap):
    """A cap that leaves `budget` bytes for weights, whatever calls take beside them."""

    budget = 0

    @property
    def room(self):
        sizes = self.module._sizes
        return self.budget + (sizes.room(self.nbytes) if sizes else 1 << 39)


def agrees(model, reference, *calls):
    """Tell whether all calls have the same bits."""
    return all(torch.equal(model(one), reference(one)) for one in calls)


def tokens(*shape, most=4096, seed=0):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def pair(model):
    model = frozen(model)
    return model, copy.deepcopy(model)

"""Models that are called within a number of bytes for weights, whatever calls take beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.integrations.cached import stored_tensors
from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import make_facts
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.hollow import Hollow
from penstock.integrations.own_files import keep_weights
from penstock.runtime.cache import Cache
from penstock.runtime.loading import LoadOptions
from tests.integrations.models import frozen

POISONED = LoadOptions(arena="contiguous", poison=True)
CHECKED = LoadOptions(debug=True)

Called = Callable[..., CalledModule]


class Room(Cap):
    """A cap that leaves `budget` bytes for weights, whatever calls take beside them."""

    budget = 0
    module: CalledModule

    @property
    def room(self) -> int:
        return self.budget + (self.module._room_beside() if self.module._measured else 1 << 39)


@pytest.fixture
def called(tmp_path: Path) -> Iterator[Called]:
    """Returns a function that has a model called within a share of its weights, or so many bytes."""
    made: list[CalledModule] = []

    def within(model: nn.Module, budget: float, options: LoadOptions = CHECKED) -> CalledModule:
        kept = keep_weights(model, stored_tensors(model), Cache.at(tmp_path / str(len(made))), "model")
        facts = make_facts(model, kept)
        Hollow(model, "call the model itself", torch.device("cpu"), called=True)
        cap = Room(1 << 40)
        cap.module = module = CalledModule("model", model, facts, kept, cap, options=options)
        cap.budget = int(budget * facts.nbytes) if budget <= 1 else int(budget)
        made.append(module)
        return module

    yield within
    for one in made:
        one.let_go()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def agrees(model: nn.Module, reference: nn.Module, *calls: Any) -> bool:
    """Tell whether all calls have the same bits."""
    return all(torch.equal(model(one), reference(one)) for one in calls)


def tokens(*shape: int, most: int = 4096, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = frozen(model)
    return model, copy.deepcopy(model)

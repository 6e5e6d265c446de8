"""Fixtures of called models: one calls a model within a budget, the other turns gradients off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import make_facts
from penstock.integrations.emptied.hollow import Hollow
from penstock.integrations.own_files import keep_weights
from penstock.integrations.weight_files import stored_tensors
from penstock.runtime.cache import Cache
from penstock.runtime.loading import LoadOptions
from tests.integrations.called.within import CHECKED, Called, Room


@pytest.fixture
def called(tmp_path: Path) -> Iterator[Called]:
    """Returns a function that has a model called within a share of its weights, or so many bytes."""
    made: list[CalledModule] = []

    def within(model: nn.Module, budget: float, options: LoadOptions = CHECKED) -> CalledModule:
        kept = keep_weights(model, stored_tensors(model), Cache.at(tmp_path / str(len(made))), "model")
        facts = make_facts(model, kept)
        Hollow(model, "call the model itself", torch.device("cpu"))
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

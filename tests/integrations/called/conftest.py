"""Fixtures of called models: one calls a model within a budget, the other turns gradients off."""

import pytest
import torch

from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import make_facts
from penstock.integrations.emptied.hollow import Hollow
from penstock.integrations.own_files import keep_weights
from penstock.integrations.weight_files import stored_tensors
from penstock.runtime.cache import Cache
from tests.integrations.called.within import CHECKED, Room


@pytest.fixture
def called(tmp_path):
    """Returns a function that has a model called within a share of its weights, or so many bytes."""
    made = []

    def within(model, budget, options=CHECKED):
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
def without_gradients():
    with torch.no_grad():
        yield

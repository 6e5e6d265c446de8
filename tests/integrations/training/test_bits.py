"""Gradients and adapters are bit-equal to those of the model in memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from penstock.integrations import apply
from penstock.integrations.calls import exported
from penstock.integrations.streamed import Component
from tests.hunt import sampled
from tests.integrations.training.adapted import MEMORY, adapted, batch, equal, gradients, steps, trained

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

BATCHES = [
    batch(length, padded=padded, seed=seed)
    for seed, (length, padded) in enumerate(
        [(16, False), (40, True), (130, False), (16, True), (130, True), (40, False)]
    )
]

KINDS = [
    ((dtype, attention, dropout), share)
    for dtype in (torch.float32, torch.bfloat16)
    for attention in ("sdpa", "eager")
    for dropout in (0.1, 0.0)
    for share in (0.0, 0.25, 1.0)
]
"""Types, attentions, dropouts, and budgets: at 0 the floor, at 1 room for all weights."""


@pytest.fixture
def budgets(share, monkeypatch):
    """The budgets of the plans, which are this share of the way from the floor to all weights."""
    made = []

    def budget(self, program, room, beside):
        floor = program.floor()
        made.append(floor + int(share * (program.weight_bytes - floor)))
        assert made[-1] <= room - beside
        return made[-1]

    monkeypatch.setattr(Component, "_budget", budget)
    return made


@pytest.mark.random
@pytest.mark.parametrize(("kind", "share"), sampled(KINDS, 19))
def test_gradients_and_adapters_are_those_of_the_model_in_memory(kind, share, budgets, cache):
    layers = 1 if share else 2  # which read the same kinds of weights
    expected = steps(adapted(*kind, layers=layers), BATCHES)
    model = adapted(*kind, layers=layers)
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        assert equal(steps(model, BATCHES), expected)
        (component,) = applied.components.values()
        assert len(component.prepared) == 2  # padded or not; lengths are open
        stats = component.stats
        assert stats.misses == 0
        assert stats.peak_bytes <= max(budgets)
        assert (stats.bytes_moved == 0) == (share == 1.0)
    assert equal([p.detach() for p in trained(model).values()], expected[-len(trained(model)) :])


def test_packed_sequences_are_seen_where_there_is_no_mask(cache, monkeypatch):
    differentiated = mock.Mock(side_effect=exported.differentiate)
    monkeypatch.setattr(exported, "differentiate", differentiated)
    reference, model = adapted(layers=1), adapted(layers=1)
    plain = {name: value for name, value in batch(16).items() if name != "attention_mask"}
    positions = torch.arange(16).expand(2, 16).contiguous()
    packed = plain | {"position_ids": torch.where(positions < 9, positions, positions - 9)}
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        for given in (packed, plain | {"position_ids": positions}):
            expected = gradients(reference, given, use_cache=False)
            assert equal(gradients(model, given, use_cache=False), expected)
        assert len(*applied.prepared.values()) == differentiated.call_count == 2  # and no wrong guess
    assert not equal(expected, gradients(reference, packed, use_cache=False))

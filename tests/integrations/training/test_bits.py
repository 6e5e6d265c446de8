"""Gradients and adapters are bit-equal to those of the model in memory."""

from __future__ import annotations

import pytest
import torch

from penstock.integrations import apply
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
    (torch.float32, "sdpa", 0.1),
    (torch.float32, "eager", 0.0),
    (torch.bfloat16, "sdpa", 0.0),
    (torch.bfloat16, "eager", 0.1),
]


@pytest.mark.random
@pytest.mark.parametrize(("dtype", "attention", "dropout"), sampled(KINDS, 3))
def test_gradients_and_adapters_are_those_of_the_model_in_memory(dtype, attention, dropout, cache):
    expected = steps(adapted(dtype, attention, dropout), BATCHES)
    model = adapted(dtype, attention, dropout)
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        assert equal(steps(model, BATCHES), expected)
        (component,) = applied.components.values()
        assert len(component.prepared) == 2  # padded or not; lengths are open
        stats = component.stats
        assert stats.misses == 0
        assert stats.peak_bytes < sum(p.nbytes for p in model.parameters())
    assert equal([p.detach() for p in trained(model).values()], expected[-len(trained(model)) :])


def test_packed_sequences_are_seen_where_there_is_no_mask(cache):
    reference, model = adapted(), adapted()
    plain = {name: value for name, value in batch(16).items() if name != "attention_mask"}
    positions = torch.arange(16).expand(2, 16).contiguous()
    packed = plain | {"position_ids": torch.where(positions < 9, positions, positions - 9)}
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        for given in (packed, plain | {"position_ids": positions}):
            expected = gradients(reference, given, use_cache=False)
            assert equal(gradients(model, given, use_cache=False), expected)
        assert len(*applied.prepared.values()) == 2
    assert not equal(expected, gradients(reference, packed, use_cache=False))

"""Gradients and adapters are bit-equal to those of the model in memory."""

import pytest
import torch
from peft import LoraConfig

from penstock import LoadOptions
from penstock.integrations import apply
from tests.hunt import nightly_but, sampled
from tests.integrations import expert_models
from tests.integrations.training.adapted import (
    MEMORY,
    adapted,
    batch,
    check_streamed,
    checkpointed,
    equal,
    gradients,
    steps,
    trained,
)

BATCHES = [
    batch(length, padded=padded, seed=seed)
    for seed, (length, padded) in enumerate(
        [(16, False), (40, True), (130, False), (16, True), (130, True), (40, False)]
    )
]

POISONED = LoadOptions(arena="contiguous", poison=True)

KINDS = [
    ((dtype, attention, dropout), share, options)
    for dtype in (torch.float32, torch.bfloat16)
    for attention in ("sdpa", "eager")
    for dropout in (0.1, 0.0)
    for share in (0.0, 0.25, 1.0)
    for options in (POISONED, None)
]
"""Types, attentions, dropouts; the share of the weights that is in memory, of which 0 is the least."""


@pytest.mark.random
@pytest.mark.parametrize(("kind", "share", "options"), sampled(KINDS, 7))
def test_gradients_and_adapters_are_those_of_the_model_in_memory(kind, share, options, plans, cache):
    expected = steps(adapted(*kind), BATCHES)
    model = adapted(*kind)
    plans["now"] = share
    with apply(model, MEMORY, train=True, cache=cache, options=options) as applied:
        assert equal(steps(model, BATCHES), expected)
        (component,) = applied.components.values()
        stats = component.stats
        assert stats.misses == 0
        assert stats.peak_bytes <= component.plan.budget
        assert (stats.bytes_moved == 0) == (share == 1.0)
    assert equal([p.detach() for p in trained(model).values()], expected[-len(trained(model)) :])


@pytest.mark.parametrize(("how", "share"), [("reentrant", 0.0), ("not reentrant", 0.5)])
def test_layers_that_are_computed_again_are_steps_of_the_backward(how, share, plans, cache):
    batches = [*BATCHES[:2], *BATCHES[:2]]
    expected = steps(checkpointed(adapted(), how), batches)
    model = checkpointed(adapted(), how)
    plans["now"] = share
    with apply(model, MEMORY, train=True, cache=cache, options=POISONED) as applied:
        assert equal(steps(model, batches), expected)
        check_streamed(applied)


def test_checkpointing_may_begin_between_two_steps(plans, cache):
    reference, model = adapted(), adapted()
    plans["now"] = 0.3
    with apply(model, MEMORY, train=True, cache=cache, options=POISONED) as applied:
        for turn in range(3):
            for one in (reference, model):
                if turn:
                    one.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
            for _ in range(3):
                assert equal(gradients(model, BATCHES[0]), gradients(reference, BATCHES[0]))
            (component,) = applied.components.values()
            assert component.stats.misses == 0


class Normed(torch.nn.Module):
    """Ends in a node that asks for a weight, and then for what checkpointing has dropped."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(32, 32).requires_grad_(False) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.trained = torch.nn.Linear(32, 32)
        self.norm = torch.nn.LayerNorm((32, 32)).requires_grad_(False)

    def forward(self, x):
        return self.norm(self.second(self.trained(self.first(x)).relu()) @ self.scale)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_weight_stays_while_its_node_has_a_layer_computed_again(share, plans, cache):
    torch.manual_seed(0)
    reference, model, x = Layers(), Layers(), torch.randn(32, 32)
    model.load_state_dict(reference.state_dict())
    plans["now"] = share
    with apply(model, MEMORY, train=True, cache=cache, options=POISONED):
        for _ in range(3):
            found = []
            for one in (reference, model):
                one.zero_grad()
                one(x).backward()
                found.append([value.grad for value in one.parameters() if value.requires_grad])
            assert equal(*found)


IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]


@pytest.mark.parametrize("implementation", nightly_but(["grouped_mm"], IMPLEMENTATIONS))
def test_an_adapter_beside_experts_learns_as_in_memory(implementation, plans, cache):
    plans["now"] = 0.0
    batches = [{"input_ids": batch(n)["input_ids"] % 64} for n in (8, 8, 8)]
    batches = [one | {"labels": one["input_ids"]} for one in batches]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    reference, model = (
        expert_models.olmoe(torch.bfloat16, experts_implementation=implementation).requires_grad_(False)
        for _ in range(2)
    )
    for one in (reference, model):
        torch.manual_seed(1)
        one.add_adapter(config)
        one.train()
    expected = steps(reference, batches)
    with apply(model, MEMORY, train=True, cache=cache, options=POISONED):
        assert equal(steps(model, batches), expected)

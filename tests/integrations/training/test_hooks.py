"""Hooks on gradients are called; hooks on what autograd saves get what is no weight."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from penstock import LoadOptions
from penstock.integrations import apply
from tests.integrations.training.adapted import MEMORY, adapted, batch, equal, gradients, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
]

GIVEN = batch(16)


@pytest.fixture
def both(cache):
    """A model in memory and one that streams, with equal adapters."""
    model = adapted()
    with apply(model, MEMORY, train=True, cache=cache, options=LoadOptions(arena="contiguous", poison=True)):
        yield adapted(), model


def doubled(module, given, *made):
    return tuple(None if one is None else one * 2 for one in given)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_gradients_are_called(kind, both):
    for model in both:
        getattr(model.get_base_model().model.layers[0].mlp, kind)(doubled)
        model.register_full_backward_pre_hook(lambda module, given: None)
        next(iter(trained(model).values())).register_hook(lambda gradient: gradient * 3)
    for _ in range(2):
        assert equal(*(gradients(model, GIVEN) for model in both))


def moved(model):
    """Gradients of a forward whose saved tensors hooks take elsewhere, around the model and within it."""
    places = {}

    def pack(value):
        places[len(places)] = value.detach().clone()
        return len(places) - 1

    def forward(*args, **kwargs):
        with saved_tensors_hooks(pack, places.__getitem__):
            return own(*args, **kwargs)

    layer = model.get_base_model().model.layers[1]
    own, layer.forward = layer.forward, forward
    try:
        model.zero_grad()
        torch.manual_seed(4)
        with save_on_cpu():
            loss = model(**GIVEN).loss
        loss.backward()
    finally:
        layer.forward = own
    return [*(value.grad.clone() for value in trained(model).values())], places


def test_hooks_on_saved_tensors_get_what_is_no_weight(both):
    frozen = [value for value in both[0].parameters() if not value.requires_grad and value.dim() > 1]
    for _ in range(2):
        (expected, of_plain), (found, of_streamed) = (moved(model) for model in both)
        assert equal(found, expected)
        shapes = [{tuple(one.shape) for one in places.values()} for places in (of_plain, of_streamed)]
        assert shapes[1] < shapes[0]
        assert {tuple(one.t().shape) for one in frozen} & (shapes[0] - shapes[1])


def test_what_a_node_has_saved_can_be_looked_at(both):
    found = []
    for model in both:
        node = model(input_ids=GIVEN["input_ids"]).logits.grad_fn
        while not hasattr(node, "_saved_mat2"):
            node = node.next_functions[0][0]
        found.append(node._saved_mat2)
    assert torch.equal(*found)

"""Hooks on gradients: those of the whole model and of parameters are called, those of parts are refused."""

from __future__ import annotations

import pytest

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError, StreamError
from tests.integrations.training.adapted import MEMORY, adapted, batch, equal, gradients, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
]

KINDS = ("register_full_backward_hook", "register_full_backward_pre_hook")


def part(model):
    return model.get_base_model().model.layers[0].mlp


def doubled(module, given, *made):
    return tuple(None if one is None else one * 2 for one in given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_on_a_part_is_refused_until_it_is_removed(kind, cache):
    model, reference = adapted(), adapted()
    hook = getattr(part(model), kind)(doubled)
    with pytest.raises(PassError, match=r"layers\.0\.mlp has a hook on its gradients \(doubled\)"):
        apply(model, MEMORY, train=True, cache=cache)
    hook.remove()
    with apply(model, MEMORY, train=True, cache=cache):
        expected = gradients(reference, batch(16))
        assert equal(gradients(model, batch(16)), expected)
        hook = getattr(part(model), kind)(doubled)
        with pytest.raises(StreamError, match=r"layers\.0\.mlp\._backward_(pre_)?hooks\.\d+ changed"):
            gradients(model, batch(16))
        hook.remove()
        assert equal(gradients(model, batch(16)), expected)


def test_hooks_on_the_model_and_on_its_parameters_are_called(cache):
    found = []
    for model in (adapted(), adapted()):
        model.register_full_backward_pre_hook(lambda module, given: None)
        next(iter(trained(model).values())).register_hook(lambda gradient: gradient * 3)
        found.append(model)
    expected = gradients(found[0], batch(16))
    with apply(found[1], MEMORY, train=True, cache=cache):
        assert equal(gradients(found[1], batch(16)), expected)


def test_gradients_of_what_is_returned_beside_the_loss_are_refused(cache):
    model = adapted()
    with apply(model, MEMORY, train=True, cache=cache):
        output = model(**batch(16))
        with pytest.raises(
            StreamError, match="beside its loss, or to none: there are gradients from the loss"
        ):
            (output.loss + output.logits.mean()).backward()

"""Layers that the user has compiled: each is one step, with the bits of the compiled layer in memory."""

import pytest
import torch

from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import BudgetError
from tests.hunt import nightly_but
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])
MEMORY = {
    "little": ("230KB", LoadOptions()),
    "poisoned": ("260KB", LoadOptions(arena="contiguous", poison=True)),
    "all": ("4MB", LoadOptions()),
}


@pytest.fixture(autouse=True)
def reset_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model, backend):
    for layer in model.model.layers:
        layer.compile(backend=backend)


def check_equal(model, reference):
    for ids in (IDS, IDS, IDS[:, :3], IDS):
        assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("memory", nightly_but(["poisoned"], MEMORY))
def test_layers_that_were_compiled_before(memory, tmp_path):
    model, reference = models.llama(), models.llama()
    for one in (model, reference):
        compile_layers(one, "eager")
    memory, options = MEMORY[memory]
    with apply(model, memory, cache=tmp_path, options=options) as applied:
        check_equal(model, reference)
        (component,) = applied.components.values()
        assert component.orders[0].paths[1:3] == ("model.layers.0", "model.layers.1")
    check_equal(model, reference)


def test_layers_that_are_compiled_while_they_stream(tmp_path):
    model, reference = models.llama(num_hidden_layers=1), models.llama(num_hidden_layers=1)
    with apply(model, "160KB", cache=tmp_path):
        check_equal(model, reference)
        for one in (model, reference):
            compile_layers(one, "eager")
        check_equal(model, reference)
    check_equal(model, reference)


def test_a_layer_that_a_compiled_one_stands_for(tmp_path):
    model, reference = models.llama(num_hidden_layers=1), models.llama(num_hidden_layers=1)
    for one in (model, reference):
        one.model.layers[0].mlp = torch.compile(one.model.layers[0].mlp, backend="eager")
    with apply(model, "160KB", cache=tmp_path):
        check_equal(model, reference)
    check_equal(model, reference)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_code_of_inductor_has_its_bits(tmp_path):
    model, reference = models.llama(num_hidden_layers=1), models.llama(num_hidden_layers=1)
    for one in (model, reference):
        compile_layers(one, "inductor")
    with apply(model, "160KB", cache=tmp_path):
        check_equal(model, reference)


def test_a_model_that_is_compiled_while_it_streams(tmp_path):
    model, reference = models.llama(num_hidden_layers=1), models.llama(num_hidden_layers=1)
    with apply(model, "160KB", cache=tmp_path):
        compiled = torch.compile(model, backend="eager")
        check_equal(compiled, reference)
        model.compile(backend="eager")
        with pytest.raises(BudgetError, match="or compile its layers instead of the whole"):
            model(IDS)

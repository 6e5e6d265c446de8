"""Torch asks whether a weight requires grad, and folds the inputs of its matrix products otherwise."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.integrations import apply, load
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42], [7, 3, 64, 11, 90]])


@pytest.fixture
def model():
    """As its library makes it: every parameter requires grad."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**models.SIZES | {"num_hidden_layers": 1})).eval()


def logits(model):
    options = {"max_new_tokens": 4, "do_sample": False}
    said = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **options)
    return torch.stack(said.logits)


def test_a_model_as_its_library_makes_it_gives_the_bits_that_it_gives_in_memory(model, tmp_path):
    frozen = models.frozen(models.twin(model))
    for one in (model, frozen):
        expected = logits(one)
        with apply(one, "190KB", cache=tmp_path):
            assert torch.equal(logits(one), expected)
        assert torch.equal(logits(one), expected)
    assert all(value.requires_grad for value in model.parameters())
    assert not any(value.requires_grad for value in frozen.parameters())


def test_a_folder_gives_the_bits_of_the_model_that_its_library_loads(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", "190KB", cache=tmp_path / "cache")
    assert torch.equal(logits(loaded), logits(LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()))

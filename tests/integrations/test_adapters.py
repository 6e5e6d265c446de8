"""LoRA adapters that a model has when penstock is applied, and what is said where they change later."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from penstock.integrations import apply
from penstock.schedule.errors import StreamError
from tests.integrations import models

# peft asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[5, 17, 99, 23, 42]])


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


@pytest.fixture
def adapted():
    """A Llama with an adapter that changes its outputs."""
    model = models.llama()
    plain = models.twin(model)
    model.add_adapter(lora(), "first")
    model = models.frozen(model)
    assert not torch.equal(model(IDS).logits, plain(IDS).logits)
    return model


def test_an_adapter_is_exported_with_its_model(adapted, tmp_path):
    reference = models.twin(adapted)
    with apply(adapted, "340KB", cache=tmp_path):
        assert torch.equal(adapted.generate(IDS, max_new_tokens=4), reference.generate(IDS, max_new_tokens=4))


def test_a_model_of_peft_generates_through_its_base(tmp_path):
    model = models.frozen(get_peft_model(models.llama(), lora()))
    reference = models.twin(model)
    with apply(model, "340KB", cache=tmp_path) as applied:
        got = model.generate(input_ids=IDS, max_new_tokens=4)
        assert torch.equal(got, reference.generate(input_ids=IDS, max_new_tokens=4))
        assert applied.components["LlamaForCausalLM"].stats.bytes_moved > 0
        with model.disable_adapter(), pytest.raises(StreamError, match="adapters were switched"):
            model(input_ids=IDS)


def test_a_merged_adapter_is_a_weight_like_any_other(tmp_path):
    model = models.frozen(get_peft_model(models.llama(), lora()).merge_and_unload())
    reference = models.twin(model)
    with apply(model, "340KB", cache=tmp_path):
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_what_changes_afterwards_is_refused_and_never_ignored(adapted, tmp_path):
    with apply(adapted, "340KB", cache=tmp_path):
        adapted.disable_adapters()
        with pytest.raises(StreamError, match="adapters were switched"):
            adapted(IDS)
        adapted.enable_adapters()
        adapted(IDS)
        adapted.config.pad_token_id = 3
        with pytest.raises(StreamError, match=r"configuration changed \(pad_token_id\)"):
            adapted(IDS)
        adapted.config.pad_token_id = 0
        adapted.train()
        with pytest.raises(StreamError, match="training mode"):
            adapted(IDS)
        adapted.eval()
        adapted(IDS)


def test_an_adapter_that_comes_later_is_refused_and_the_model_is_restored(tmp_path):
    model = models.llama()
    reference = models.twin(model)
    with apply(model, "340KB", cache=tmp_path):
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]), "late")
        with pytest.raises(StreamError, match="submodules were replaced or added"):
            model(IDS)
    assert torch.equal(models.frozen(model)(IDS).logits, reference(IDS).logits)  # it begins as nothing

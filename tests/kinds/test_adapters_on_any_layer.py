"""Adapters on any layer, trained and saved while their model streams: what peft gives in memory."""

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from penstock.integrations import apply, load
from tests.hunt import nightly_but
from tests.integrations import models

# peft asks transformers for what transformers has renamed, and warns of what it is asked to do here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

IDS = torch.tensor([[5, 9, 11, 3]])
SIZES = models.SIZES | {"num_hidden_layers": 1}
MEMORY = "4MB"


def adapted(make=None, **options):
    """Make a model with LoRA on its queries, and on what `options` name."""
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    model = make() if make else models.llama()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**given))


def gemma():
    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16))


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES))


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters() if one.requires_grad}


def equal(one, other):
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


TRAINED = {
    "tokens, tied": lambda: adapted(gemma, trainable_token_indices=[1, 5]),
    "tokens, tied together": lambda: adapted(gemma, trainable_token_indices=[1, 5], ensure_weight_tying=True),
    "tokens, untied": lambda: adapted(llama, trainable_token_indices=[1, 5]),
    "tokens of a layer": lambda: adapted(llama, trainable_token_indices={"embed_tokens": [2, 7]}),
    "tokens of an encoder": lambda: adapted(
        bert, target_modules=["query"], trainable_token_indices={"word_embeddings": [5, 9]}
    ),
    "head": lambda: adapted(llama, target_modules=["q_proj", "lm_head"]),
    "table": lambda: adapted(llama, target_modules=["q_proj", "embed_tokens"]),
    "head, tied": lambda: adapted(gemma, target_modules=["q_proj", "lm_head"]),
    "a head of its own": lambda: adapted(llama, modules_to_save=["lm_head"]),
    "a table of its own": lambda: adapted(llama, modules_to_save=["embed_tokens"]),
}


SAMPLE = ("tokens, tied together", "tokens of an encoder", "head, tied", "table", "a table of its own")


@pytest.mark.parametrize("name", nightly_but(SAMPLE, TRAINED))
def test_it_is_trained_and_saved_as_in_memory(name, tmp_path):
    model, reference = TRAINED[name]().train(), TRAINED[name]().train()

    def step(one):
        torch.manual_seed(3)
        loss = one(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss

    with apply(model, MEMORY, train=True, cache=tmp_path / "c"):
        for _ in range(2):
            assert torch.equal(step(model), step(reference))
        model.save_pretrained(tmp_path / "mine")
    reference.save_pretrained(tmp_path / "other")
    mine, other = gradients(model), gradients(reference)
    assert mine.keys() == other.keys()
    assert all(equal(mine[name], other[name]) for name in mine)
    assert any(one is not None and one.any() for one in mine.values())
    saved, expected = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("mine", "other"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize(("target", "way"), [("lm_head", "a function"), ("embed_tokens", "a configuration")])
def test_it_is_saved_of_a_folder(target, way, tmp_path):
    llama().save_pretrained(tmp_path / "m")
    config = LoraConfig(r=4, target_modules=["q_proj", target])
    adapter = config if way == "a configuration" else lambda model: get_peft_model(model, config)
    model = load(tmp_path / "m", MEMORY, train=True, adapter=adapter, cache=tmp_path / "c")
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path / "mine")
    saved = load_file(tmp_path / "mine" / "adapter_model.safetensors")
    expected = get_peft_model(llama(), config)
    expected.save_pretrained(tmp_path / "other")
    if way == "a function":
        assert saved.keys() == load_file(tmp_path / "other" / "adapter_model.safetensors").keys()
    assert any("lora" in name and target in name for name in saved)


CONFIGS = {
    "LoRA": LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False),
    "of convolutions": LoraConfig(
        r=4, target_modules=["conv1", "time_emb_proj", "to_out.0"], init_lora_weights=False
    ),
    "LoHa": LoHaConfig(r=4, target_modules=["to_q", "to_v"], init_weights=False),
}


ROOMS = [(name, memory) for name in CONFIGS for memory in ("6MB", "40MB")]


@pytest.mark.parametrize(("name", "memory"), nightly_but([("of convolutions", "6MB")], ROOMS))
def test_a_network_of_diffusers_is_trained_at_any_batch(name, memory, tmp_path):
    def made():
        torch.manual_seed(0)
        unet = models.unet().requires_grad_(False)
        torch.manual_seed(1)
        unet.add_adapter(CONFIGS[name])
        return unet.train()

    def loss(unet, count):
        torch.manual_seed(count)
        noisy, at = torch.randn(count, 4, 8, 8), torch.randint(1, 900, (count,))
        return unet(noisy, at, torch.randn(count, 5, 32)).sample.square().mean()

    model, reference = made(), made()
    with apply(model, memory, train=True, cache=tmp_path):
        for count in (2, 1):
            for one in (model, reference):
                loss(one, count).backward()
            mine, other = gradients(model), gradients(reference)
            assert all(torch.equal(mine[name], other[name]) for name in other)

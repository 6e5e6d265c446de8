"""Families of models besides Llama: gradients, adapters and losses of steps are those in memory."""

import pytest
import torch
import transformers
from peft import LoraConfig

from penstock.integrations import apply, load
from tests.hunt import sampled
from tests.integrations.training.adapted import MEMORY, check_streamed, equal, steps, trained

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
DECODER = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
GEMMA_2 = DECODER | {"num_hidden_layers": 2, "sliding_window": 8}  # for every other layer
ENCODER = SIZES | {"intermediate_size": 128, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128, "n_positions": 64}
OPT = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
OPT = OPT | {"vocab_size": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}

# A model that is left to find out which problem it solves notes it in its configuration, which is refused.
CLASSIFIED = {"num_labels": 3, "problem_type": "single_label_classification"}

QV = ["q_proj", "v_proj"]
FAMILIES = {
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER, QV),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER, QV),
    "Mistral": ("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 8}, QV),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", DECODER, QV),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA_2, QV),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2, ["c_attn", "c_fc"]),
    "OPT, classification": ("OPTConfig", "OPTForSequenceClassification", OPT | CLASSIFIED, QV),
    "BERT, classification": (
        "BertConfig",
        "BertForSequenceClassification",
        ENCODER | CLASSIFIED,
        ["query", "value"],
    ),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}, ["q", "v"]),
}


def family(name):
    """A tiny model of a family, with values, in memory."""
    config, kind, sizes, _ = FAMILIES[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def lora(name):
    conv1d = {"fan_in_fan_out": True} if name == "GPT-2" else {}
    return LoraConfig(
        r=4, target_modules=FAMILIES[name][3], init_lora_weights=False, lora_dropout=0.1, **conv1d
    )


def rows(name, length, seed):
    """Rows of which one is padded at its end, as tokenizers of classifiers pad."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 128, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 3 :] = 0
    ids[mask == 0] = 0
    labels = torch.tensor([0, 2]) if "classification" in name else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def adapted(name, model):
    torch.manual_seed(1)
    model.add_adapter(lora(name))
    return model.train()


BOTH = [(name, way) for name in FAMILIES for way in ("apply", "load")]
"""Each family by each way. Five is odd, so that the sample takes the two ways in turns."""


@pytest.mark.random
@pytest.mark.parametrize(("name", "way"), sampled(BOTH, 5))
def test_a_family_learns_as_in_memory(name, way, cache, tmp_path):
    batches = [rows(name, 12, seed=0), rows(name, 20, seed=1)]
    family(name).save_pretrained(tmp_path)
    kind = type(family(name))
    reference = adapted(name, kind.from_pretrained(tmp_path))
    expected = steps(reference, batches)
    if way == "apply":
        model = adapted(name, kind.from_pretrained(tmp_path))
        with apply(model, MEMORY, train=True, cache=cache) as applied:
            assert equal(steps(model, batches), expected)
            check_streamed(applied)
        return
    torch.manual_seed(1)
    with load(tmp_path, MEMORY, train=True, adapter=lora(name), cache=cache) as model:
        assert equal(steps(model.train(), batches), expected)
        assert trained(model).keys() == trained(reference).keys()

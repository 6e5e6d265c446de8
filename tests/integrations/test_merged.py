"""`penstock convert --merge`: one weight at a time gives the bits of `merge_and_unload` of peft."""

import json
import re
import subprocess
import sys

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from penstock.integrations.merged import merge
from penstock.schedule.facts.errors import PassError, SourceError
from tests.hunt import nightly_but
from tests.integrations import models
from tests.integrations.test_saved import check_equal, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of each choice that these adapters make


def tied():
    return models.llama(tie_word_embeddings=True)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    return models.frozen(GPT2LMHeadModel(config))


def qwen():
    """A model whose layers have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return models.frozen(Qwen2ForCausalLM(Qwen2Config(**models.SIZES)))


def lora(**options):
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    )


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "lora": (models.llama, {}),
    "rslora": (models.llama, {"use_rslora": True}),
    "dora": (models.llama, {"use_dora": True}),
    "ranks of layers": (models.llama, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "fan in, fan out": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "biases": (qwen, {"lora_bias": True}),
    "a saved head": (models.llama, {"modules_to_save": ["lm_head"]}),
    "a saved head that was tied": (tied, {"modules_to_save": ["lm_head"]}),
    "a tied head": (tied, {"target_modules": ["q_proj", "lm_head"]}),
    "both of a tie": (tied, {"target_modules": ["embed_tokens", "lm_head"]}),
    "rows of an embedding": (tied, {"trainable_token_indices": [3, 5]}),
    "experts": (models.mixtral, {"target_parameters": EXPERTS}),
}


def adapt(model, config, folder):
    """Save a model, and an adapter for it with random values."""
    model.save_pretrained(folder / "model")
    torch.manual_seed(1)
    adapted = get_peft_model(type(model).from_pretrained(folder / "model"), config)
    for name, value in adapted.named_parameters():
        if value.requires_grad and "lora_" not in name:
            value.data += torch.randn_like(value) / 10
    adapted.save_pretrained(folder / "adapter")


DTYPES = [(name, dtype) for name in CASES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), nightly_but(DTYPES[::2] + DTYPES[1:2], DTYPES))
def test_the_bits_are_those_of_merge_and_unload(name, dtype, tmp_path):
    make, options = CASES[name]
    model = make().to(dtype)
    adapt(model, lora(**options), tmp_path)
    reference = type(model).from_pretrained(tmp_path / "model")
    merged = PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "expected")
    done = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    check_equal(tmp_path / "merged", tmp_path / "expected")
    assert done.files == (tmp_path / "merged" / "model.safetensors",)
    before, after = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "merged")
    assert done.tensors == len(after)
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


def test_the_command_converts_splits_and_copies_the_tokenizer(tmp_path, penstock):
    model = models.llama()
    adapt(model, lora(), tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    reference = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload().save_pretrained(
        tmp_path / "expected"
    )
    options = ["--dtype", "bfloat16", "--shard-size", "40KB", "--json"]
    places = [tmp_path / "model", "-o", tmp_path / "merged", "--merge", tmp_path / "adapter"]
    done = penstock("convert", *places, *options)
    assert (done.status, "context" in done.err) == (0, False), done.err
    check_equal(tmp_path / "merged", tmp_path / "expected")
    assert len(json.loads(done.out)["files"]) == len([*(tmp_path / "merged").glob("*.safetensors")]) > 1
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    again = penstock("convert", *places)
    assert again.status == 2
    assert "merged is a folder with files in it, which stay as they are" in re.sub(r"\s+", " ", again.err)
    refused = penstock("convert", *places, "--only", "lm_head*")
    assert refused.status == 2
    assert "--merge writes the whole of one model's folder" in re.sub(r"\s+", " ", refused.err)


def pooling():
    """A model with an attention of torch's own."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=8))


def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path):
    def refused(message, model="one/model", adapter="one/adapter"):
        with pytest.raises((SourceError, PassError), match=message):
            merge(tmp_path / model, tmp_path / adapter, tmp_path / "merged")
        assert not [path for path in tmp_path.iterdir() if "merged" in path.name]

    adapt(models.llama(), lora(), tmp_path / "one")
    adapt(models.llama(num_hidden_layers=1), lora(), tmp_path / "short")
    adapt(models.llama(hidden_size=32), lora(), tmp_path / "narrow")
    adapt(gpt2(), lora(target_modules=["c_attn"]), tmp_path / "other")
    adapt(models.llama(), LoHaConfig(target_modules=["q_proj"]), tmp_path / "loha")
    adapt(pooling(), lora(target_modules=["attention"]), tmp_path / "pooling")
    refused("has no adapter_config.json: give the folder", adapter="one/model")
    refused(r"is for another model than .*, which has no place for .*layers\.1.* \(4 in all\)", "short/model")
    refused(
        r"for another model than .*, which also needs .*layers\.1.* \(4 in all\)", adapter="short/adapter"
    )
    refused(
        r"cannot be put on .*size mismatch.*: is it whole, and for this model\?", adapter="narrow/adapter"
    )
    refused(r"cannot be put on .*c_attn.*: is it whole, and for this model\?", adapter="other/adapter")
    refused("an adapter of kind LOHA, and only LoRA is merged here", adapter="loha/adapter")
    refused(r"\(MultiheadAttention\) cannot be merged by itself", "pooling/model", "pooling/adapter")
    file = tmp_path / "one" / "adapter" / "adapter_config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"layer_replication": [[0, 2], [0, 2]]}))
    refused("replicates layers, which peft cannot merge")
    file.write_text("{oops")
    refused(r"adapter_config\.json cannot be read")


_MERGE = """
import sys
from pathlib import Path
from penstock.integrations import load, merged
from tests.resident import peak_above

import peft, transformers.core_model_loading, transformers.modeling_utils
small, big, adapter, *targets = map(Path, sys.argv[1:])
merged.merge(str(small), small.parent / "adapter", targets[0])  # what is imported on the way
print(peak_above(lambda: merged.merge(str(big), adapter, targets[1])))
"""


@pytest.mark.nightly  # test_saved.py has the sample
def test_a_few_weights_are_in_memory_at_a_time(tmp_path):
    adapt(models.llama(), lora(), tmp_path / "small")
    big = models.llama(hidden_size=1024, intermediate_size=1024, num_hidden_layers=6, vocab_size=1024)
    big.save_pretrained(tmp_path / "big")
    adapter = tmp_path / "big-adapter"
    get_peft_model(big, lora(use_dora=True)).save_pretrained(adapter)
    for file in adapter.glob("*.safetensors"):
        save_file({name: value + 0.1 for name, value in load_file(file).items()}, file)
    nbytes = sum(value.nbytes for name, value in big.named_parameters() if "lora_" not in name)
    places = [tmp_path / "small" / "model", tmp_path / "big", adapter, tmp_path / "one", tmp_path / "two"]
    command = [sys.executable, "-c", _MERGE, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < nbytes // 4
    reference = type(big).from_pretrained(tmp_path / "big")
    PeftModel.from_pretrained(reference, adapter).merge_and_unload().save_pretrained(tmp_path / "expected")
    check_equal(tmp_path / "two", tmp_path / "expected")

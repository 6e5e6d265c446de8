"""Models of transformers configurations: what they take, what their caches hold, what is refused."""

import json

import pytest

from penstock.models.configuration import cache_bytes_per_token, notes_of, read_config
from penstock.models.preflight import read_model
from penstock.schedule.facts.errors import SourceError

HEADS = {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
LLAMA = HEADS | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96}
SIDES = {
    f"{side}_{what}": count
    for side in ("encoder", "decoder")
    for what, count in {"layers": 1, "attention_heads": 4, "ffn_dim": 128}.items()
}
MODELS = {
    "mixtral": HEADS
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 96}
    | {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4, "dtype": "bfloat16"},
    "vit": HEADS
    | {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    | {"num_hidden_layers": 2, "image_size": 32, "patch_size": 16},
    "whisper": SIDES
    | {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    | {"vocab_size": 96, "d_model": 64, "max_source_positions": 50}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 96}
    | {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 3}
    | {"decoder_start_token_id": 0},
}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("mixtral", 2 * 2 * 2 * 16 * 2),
        ("vit", 0),
        ("whisper", 2 * 1 * 4 * 16 * 2),
        ("t5", 2 * 3 * 4 * 32 * 2),
    ],
)
def test_models_of_many_kinds_are_exported_for_a_gpu(tmp_path, model, cache):
    read = read_model(str(write(tmp_path, MODELS[model])), context=10, dtype="bfloat16")
    assert read.weight_bytes > 0
    assert "bfloat16" in read.dtypes
    assert read.cache_bytes == 10 * cache
    assert 0 < read.floor_bytes < read.weight_bytes


def test_what_of_a_configuration_is_not_modelled_is_said(tmp_path):
    quantised = read_config(
        write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert "(gptq) is not applied" in notes_of(quantised)[0]
    assert not notes_of(read_config(write(tmp_path, LLAMA)))


def test_keys_that_are_fewer_than_queries_count_as_they_are(tmp_path):
    config = read_config(write(tmp_path, LLAMA | {"num_key_value_heads": 2, "num_hidden_layers": 3}))
    assert cache_bytes_per_token(config, "a model", "float32") == 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"hidden_size": "many"}, "expected int, got str"),
        (LLAMA | {"architectures": None}, "names no architectures: add them"),
        (LLAMA | {"architectures": ["Nothing"]}, "names the architectures ['Nothing']"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}, "it needs code of its own: give a function"),
        (None, "holds no config.json"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said_in_full(tmp_path, config, message):
    if config is not None:
        write(tmp_path, config)
    with pytest.raises(SourceError) as caught:
        read_model(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

"""Preflight: what is said of a model that was never built, and of configurations of transformers."""

import json
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from penstock.models.configuration import cache_bytes_per_token, notes_of, read_config
from penstock.models.preflight import read_model
from penstock.passes.building import fake_export
from penstock.passes.graph import propagation
from penstock.schedule.facts.errors import SourceError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "dtype": "bfloat16",
}

FACTORY = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]), (torch.zeros(1, 512),)

def huge():
    return nn.Linear(1 << 21, 1 << 21, bias=False), (torch.zeros(1, 1 << 21),)

def wrong():
    return nn.Linear(4, 4)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "factories_of_a_test.py").write_text(FACTORY)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("factories_of_a_test", None)


@pytest.fixture
def facts(penstock):
    def ask(*arguments):
        done = penstock("preflight", *arguments, "--json")
        assert done.status in (0, 1), done.err
        found = json.loads(done.out)
        return found

    return ask


def test_a_configuration_is_planned_for_each_hardware_and_budget(folder, facts):
    from transformers import AutoConfig, LlamaForCausalLM

    sizes = ("--budget", "25%", "--budget", "100%")
    found = facts(str(folder), "--hardware", "t4", "--hardware", "h200", *sizes, "--context", "100")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    parameters = sum(p.numel() for p in model.parameters())
    assert found["weight_bytes"] == pytest.approx(2 * parameters, rel=0.01)  # the rotary table is computed
    assert found["cache_bytes"] == 2 * 3 * 2 * 16 * 2 * 100
    findings = found["findings"]
    assert [one["hardware"] for one in findings] == ["t4", "t4", "h200", "h200"]
    assert all(one["runs"] and one["lower_bound_seconds"] <= one["seconds_per_pass"] for one in findings)
    assert [one["streamed_bytes_per_pass"] > 0 for one in findings] == [True, False, True, False]


def test_what_an_export_is_spared_changes_no_figure(folder, facts, monkeypatch):
    asked = (str(folder), "--hardware", "h200", "--budget", "25%", "--context", "100")
    found = facts(*asked)
    monkeypatch.setattr(fake_export, "_lazy", nullcontext)
    monkeypatch.setattr(propagation, "facts_of", lambda value: object())  # nothing counts as seen
    assert facts(*asked) == found


def test_a_function_is_exported_without_building_what_it_returns(folder, facts, penstock):
    found = facts("factories_of_a_test:huge", "--hardware", "h200")
    assert found["weight_bytes"] == 4 << 42
    assert not found["findings"][0]["runs"]
    assert "below the floor" in found["findings"][0]["verdict"][0]
    page = folder / "plan.html"
    options = ("--hardware", "l4", "--budget", "50%", "--host-memory", "1MiB", "--report", str(page))
    found = facts("factories_of_a_test:build", *options)["findings"][0]
    assert 0 < found["host_bytes"] <= 1 << 20
    assert found["disk_bytes_per_pass"] > 0
    assert found["confidence"]["level"] == "assumed"
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    assert "overwrite it with --force" in penstock("preflight", "factories_of_a_test:build", *options).err
    assert page.read_text() == "mine"
    assert penstock("preflight", "factories_of_a_test:build", *options, "--force").status == 0
    assert page.read_text().startswith("<!doctype html>")


def test_more_than_the_memory_of_the_device_is_said(folder, penstock):
    config = TINY | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    done = penstock("preflight", str(folder / "config.json"), "--hardware", "rtx4090", "--budget", "30GB")
    assert done.status == 0
    assert "It does not fit into rtx4090" in done.out
    assert "The link limits it" in done.out


def test_a_model_is_found_by_its_name_in_the_local_cache(folder, facts, monkeypatch):
    cached = folder / "hub" / "models--me--tiny"
    (cached / "snapshots" / "1").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    (folder / "config.json").rename(cached / "snapshots" / "1" / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    assert facts("me/tiny", "--hardware", "h200")["findings"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing.json", "nothing.json is neither a file that exists nor module:function"),
        ("no_such_module:build", "no_such_module:build cannot be imported"),
        ("factories_of_a_test:number", "is int, expected a function"),
        ("factories_of_a_test:wrong", "returns Linear, expected a module and example inputs"),
        ("{folder}/factories_of_a_test.py", "is not a config.json"),
        ("{folder}/other", "names the architectures ['NoSuchModel']"),
        ("{folder}/empty", "is no configuration that transformers knows"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(folder, penstock, model, message):
    for name, config in (("other", TINY | {"architectures": ["NoSuchModel"]}), ("empty", {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    done = penstock("preflight", model.format(folder=folder), "--hardware", "h200")
    assert done.status == 2
    said = done.err.splitlines()[-1]  # torch may log before
    assert said.startswith("penstock: ")
    assert message in said
    assert "Traceback" not in done.err


def test_the_device_of_a_preset_holds_weights_of_a_real_module():
    """What preflight counts is what the module has."""
    from penstock.passes.annotate import annotate
    from penstock.passes.building.fake_export import fake_export

    build = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    payload = annotate(fake_export(build, (torch.zeros(1, 8),), "cuda"))
    assert sum(s.nbytes for s in payload.storages) == sum(p.nbytes for p in build().parameters())


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
        (
            {"model_type": "x", "auto_map": {"AutoConfig": "x.X"}},
            "it needs code of its own: load it with that",
        ),
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

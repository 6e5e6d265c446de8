"""Folders that `load` cannot use, and what it says of them."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

import penstock
from penstock.integrations import folders, load
from penstock.integrations.folders import Stored, open_model
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.sizes import format_size
from tests.integrations import models


@pytest.fixture
def folder(tmp_path):
    """One with a model."""
    models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_adapter_without_its_model_is_refused_by_name(tmp_path):
    model = models.llama(num_hidden_layers=1)
    model.save_pretrained(tmp_path / "peft")  # beside its model it is not ignored
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]), "any")
    model.save_pretrained(tmp_path / "peft")
    (tmp_path / "diffusers").mkdir()
    save_file({"unet.x": torch.ones(1)}, tmp_path / "diffusers" / "pytorch_lora_weights.safetensors")
    for name, file in {"peft": "adapter_config.json", "diffusers": "pytorch_lora_weights"}.items():
        with pytest.raises(
            SourceError, match=rf"{name} holds an adapter \({file}.*: `penstock convert MODEL --merge "
        ):
            load(tmp_path / name, "1MB")


@pytest.mark.parametrize(
    ("where", "look"),
    [(Path, "is_dir"), (Path, "iterdir"), (folders, "read_bounded"), (GenerationConfig, "from_pretrained")],
)
def test_a_folder_that_the_system_does_not_read_is_named(where, look, folder, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(where, look, refuse)
        with pytest.raises(SourceError, match=r"model cannot be read \(Input/output error\)"):
            load(folder, "1MB", cache=tmp_path / "cache")
    load(folder, "1MB", cache=tmp_path / "cache").penstock_applied.close()


def test_a_file_in_place_of_its_folder_is_told_so(folder, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path, words in {
        folder / "config.json": "is a file: give the folder that it is in",
        tmp_path / "model.gguf": "is a file: load GGUF with transformers",
        tmp_path: "has its weights in model.gguf: load GGUF with transformers",
        Path(__file__): "is a file: give a model's folder, with its config.json",
    }.items():
        with pytest.raises(SourceError, match=f"{path.name} {words}"):
            load(path, memory="1MB")


def test_a_copy_has_the_class_of_the_library_and_a_pickle_is_refused(folder, tmp_path):
    with load(folder, "1MB", cache=tmp_path) as model:
        assert type(copy.copy(model)) is type(models.llama())
        with pytest.raises(StreamError, match="not in memory: call the model itself"):
            pickle.dumps(model)


def test_the_log_says_where_weights_are_and_how_they_stream(folder, tmp_path, caplog):
    with caplog.at_level("INFO"), load(folder, "60MB", cache=tmp_path / "cache") as model:
        for _ in range(3):
            model(torch.tensor([[3, 4, 5]]))
    time, size = r"[\d.]+ m?s", r"[\d.,]+ \w+"
    observed, streams = [one for one in caplog.messages if one.startswith("LlamaForCausalLM ")]
    words = rf"ran a call of a new kind one module at a time in {time}; it takes {size} beside weights$"
    assert re.search(words, observed)
    assert re.search(rf"streams within {size} of 60 MB \({size}\), planned in {time}: ", streams)


def test_of_several_variants_the_one_that_its_library_reads_is_read(folder):
    file = folder / "model.safetensors"
    save_file(load_file(file), folder / "model.fp16.safetensors")
    assert open_model(folder).files == (file,)
    file.unlink()
    assert open_model(folder).files == (folder / "model.fp16.safetensors",)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_a_variant_that_is_asked_for_is_read_in_its_dtype(folder, shards, tmp_path):
    models.llama(num_hidden_layers=1).half().save_pretrained(tmp_path / "half", variant="fp16", **shards)
    for file in (tmp_path / "half").glob("model*"):
        file.rename(folder / file.name)
    model = load(folder, "1MB", variant="fp16", cache=tmp_path / "cache")
    reference = type(model).from_pretrained(folder, variant="fp16", dtype=torch.float16)
    ids = torch.tensor([[5, 17, 99]])
    assert model.dtype == torch.float16
    assert torch.equal(model(ids).logits, models.frozen(reference)(ids).logits)
    with pytest.raises(SourceError, match="has no variant 'fp8' of its weights: it has fp16"):
        load(folder, "1MB", variant="fp8")


def test_what_is_loaded_says_that_it_streams_and_what_to_do_with_a_change(folder, tmp_path):
    model = load(folder, "1MiB", device=torch.device("cpu"), cache=tmp_path / "cache")
    nbytes = sum(value.nbytes for value in model.parameters())
    assert f"\n  {format_size(nbytes)} of parameters streamed by penstock\n" in str(model)
    with pytest.raises(StreamError, match="call the model itself, or load it with its library instead"):
        model.double()


def test_pickled_weights_are_refused_with_what_to_do(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    torch.save({}, folder / "optimizer.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        SourceError, match=r"in pytorch_model\.bin and in no safetensors file: `penstock convert .* beside it"
    ):
        load(folder, "1MB")


def test_a_missing_tensor_is_named_as_the_model_names_it(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file)
    name = re.escape(f"{folder} does not hold model.layers.0.self_attn.q_proj.weight (1 in all) of the Llama")
    with pytest.raises(SourceError, match=rf"^{name}ForCausalLM: get its other files, or if its library"):
        load(folder, "1MB")


def test_a_configuration_of_another_model_is_refused_and_so_are_numbers_that_no_library_converts(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(SourceError, match=r"gate_proj\.weight as \[128, 64\] in its files and \[64, 64\] by"):
        load(folder, "1MB")
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file({name: value.to(torch.int8) for name, value in load_file(file).items()}, file)
    with pytest.raises(
        SourceError, match=r"embed_tokens\.weight as int8 in its files and float32 by its con"
    ):
        load(folder, "1MB")


class Stacked(Stored):
    """What transformers would say of experts whose biases are buffers."""

    def names(self, module):
        return {"bias": ("experts.0", "experts.1"), "absent": ("experts.1", "experts.2")}


def test_a_buffer_that_several_tensors_make_is_all_of_them(tmp_path):
    def build():
        module = nn.Module()
        module.register_buffer("bias", torch.zeros(2, 3))
        module.register_buffer("absent", torch.full((2, 3), 7.0))
        return module

    file = tmp_path / "model.safetensors"
    save_file({"experts.0": torch.zeros(3) + 1, "experts.1": torch.zeros(3) + 2}, file)
    module, _ = Stacked("stacked", tmp_path, build, (file,)).make()
    assert torch.equal(module.bias, torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert torch.equal(module.absent, torch.full((2, 3), 7.0))  # not all of it is there


def test_a_component_of_several_folders_is_refused_and_not_taken_for_the_first(tmp_path):
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    UNet2DModel(**blocks, block_out_channels=(8,), norm_num_groups=4).save_pretrained(tmp_path / "unet")
    index = {"_class_name": "DDPMPipeline", "unet": ["diffusers", "MultiControlNetModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"holds a UNet2DModel, and .* says MultiControlNetModel"):
        load(tmp_path, "1MB")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "expected a model's folder or its name, got None: what is in memory is for penstock.integr"),
        ("", "expected a model's folder or its name, got ''"),
        (nn.Linear(2, 2), "got a Linear: what is in memory is for penstock.integrations.apply"),
    ],
)
def test_what_is_no_name_of_a_folder_is_refused(source, words):
    with pytest.raises(SourceError, match=re.escape(words)):
        load(source, "16MB")


def test_options_of_from_pretrained_are_refused_with_what_stands_for_them(folder):
    with pytest.raises(TypeError, match="load has no device_map=: memory=, device= and dtype= say how"):
        load(folder, device_map="auto")


def test_an_artifact_is_not_a_model(tmp_path):
    (tmp_path / "payload.json").write_text("{}")
    with pytest.raises(SourceError, match=r"is an artifact of penstock: penstock\.open opens it"):
        load(tmp_path, "16MB")
    with pytest.raises(SourceError, match="expected the folder of an artifact, got NoneType"):
        penstock.open(None)

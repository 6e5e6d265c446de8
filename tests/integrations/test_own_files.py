"""Weights stay in the files that their library loaded them from, or are written once to the cache."""

import copy
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, MixtralForCausalLM, T5ForConditionalGeneration

from penstock.integrations import apply, load
from penstock.runtime.cache import Cache, list_entries, prune
from penstock.runtime.files.safetensors_file import read_header
from penstock.schedule.facts.errors import SourceError
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 3]])
ONE = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in three shards; its embedding and its head are tied."""
    path = tmp_path_factory.mktemp("own") / "llama"
    models.llama(**ONE, tie_word_embeddings=True).save_pretrained(path, max_shard_size="70KB")
    return path


def loaded(folder, kind=LlamaForCausalLM, **options):
    return models.frozen(kind.from_pretrained(folder, **options))


def written(cache):
    """The names of the tensors that were written to a cache."""
    return {
        name
        for file in Cache(cache).weights.glob("*/*.safetensors")
        for name in read_header(file).entries
        if not name.startswith("__penstock")
    }


def values_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_stay_in_the_files_that_hold_them_and_come_back_from_there(folder, tmp_path, said):
    model = loaded(folder)
    before, expected = values_of(model), model(IDS).logits
    with apply(model, "1MB", cache=tmp_path) as applied:
        files = applied.components["LlamaForCausalLM"].weights
        assert sorted(files) == sorted(folder.glob("*.safetensors"))
        assert len(files) == 3
        assert torch.equal(model(IDS).logits, expected)
    assert f"11 of 11 tensors of LlamaForCausalLM of {folder} stay where they are, in {folder}" in (
        all_said := said()
    )
    assert "bytes of weights of" not in all_said
    assert not written(tmp_path)
    assert unchanged(model, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not list_entries(tmp_path)


def test_what_has_changed_or_was_added_since_is_written_and_nothing_else(folder, tmp_path, said):
    model = loaded(folder)
    model.model.norm.weight.add_(1)
    model.model.register_buffer("added", torch.ones(3))
    before, expected = values_of(model), model(IDS).logits
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model(IDS).logits, expected)
    assert "10 of 12 tensors" in (all_said := said())
    assert "model.norm.weight, model.added are not in those files as they are in memory" in all_said
    assert written(tmp_path) == {"penstock: model.norm.weight", "model.added"}
    assert unchanged(model, before)


@pytest.mark.parametrize("case", ["converted", "moved", "not of a folder"])
def test_what_no_file_holds_as_it_is_in_memory_is_written(folder, tmp_path, case):
    if case == "moved":
        shutil.copytree(folder, tmp_path / "model")
        model = loaded(tmp_path / "model")
        shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    else:
        model = loaded(folder).bfloat16() if case == "converted" else models.llama(**ONE)
    before, expected = values_of(model), models.twin(model)(IDS).logits
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model(IDS).logits, expected)
    assert len(written(tmp_path)) == len([*model.parameters()])
    assert unchanged(model, before)


def test_an_adapter_is_written_and_what_it_wraps_stays(folder, tmp_path):
    model = loaded(folder)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), "any")
    models.frozen(model)
    before, expected = values_of(model), model(IDS).logits
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model(IDS).logits, expected)
    assert len(found := written(tmp_path)) == 2
    assert all("lora_" in name for name in found)
    assert unchanged(model, before)


def test_experts_that_the_library_stacks_stay_one_by_one(tmp_path):
    models.mixtral().save_pretrained(tmp_path / "model")
    model = loaded(tmp_path / "model", MixtralForCausalLM)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(tmp_path / "model/model.safetensors")
    before, expected = values_of(model), models.twin(model)(IDS).logits
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model(IDS).logits, expected)
    assert not written(tmp_path)
    assert unchanged(model, before)


class Computing(nn.Module):
    """A linear, a buffer and a constant that no checkpoint holds today, and a head that is tied."""

    def __init__(self, folder):
        super().__init__()
        self.config = SimpleNamespace(_name_or_path=folder)
        self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("scale", torch.full((16,), 3.0), persistent=False)
        self.shift = torch.full((16,), 5.0)

    def forward(self, x):
        return self.head(self.up(x) * self.scale + self.shift)


def test_values_that_files_hold_for_what_is_no_weight_are_not_taken(tmp_path):
    model = models.frozen(Computing(tmp_path))
    wrong = {name: torch.zeros(16) for name in ("scale", "shift")} | {"head.weight": torch.zeros(16, 16)}
    save_file(
        {name: value.clone() for name, value in model.up.named_parameters("up")} | wrong,
        tmp_path / "a.safetensors",
    )
    x = torch.ones(2, 16)
    expected = model(x)
    with apply(model, "1MB", cache=tmp_path / "cache"):
        assert torch.equal(model(x), expected)
    assert not written(tmp_path / "cache")
    assert torch.equal(model(x), expected)


def test_a_file_that_changes_meanwhile_is_found_at_the_restore(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    model = loaded(tmp_path / "model")
    before, expected = values_of(model), model(IDS).logits
    applied = apply(model, "1MB", cache=tmp_path)
    file = applied.components["LlamaForCausalLM"].weights[0]
    whole, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(file, ns=times)  # as if the bytes had rotted
    with pytest.raises(SourceError, match=f"{file} has been changed since .* put the file back"):
        applied.restore()
    assert applied.freed_bytes
    file.unlink()
    with pytest.raises(SourceError, match=rf"{file} is gone, and it held the weights of LlamaForCausalLM"):
        applied.restore()
    file.write_bytes(whole)
    os.utime(file, ns=times)
    assert torch.equal(model(IDS).logits, expected)
    applied.restore()
    assert unchanged(model, before)


def test_components_of_diffusers_and_encoder_decoder_models_stay_too(tmp_path):
    models.t5().save_pretrained(tmp_path / "t5")
    pipeline = models.pipeline(tmp_path)
    pipeline.save_pretrained(tmp_path / "pipeline")
    for kind, place in (
        (T5ForConditionalGeneration, "t5"),
        (UNet2DConditionModel, "pipeline/unet"),
        (AutoencoderKL, "pipeline/vae"),
    ):
        model = loaded(tmp_path / place, kind)
        before = values_of(model)
        encoded = model.encoder(IDS)[0] if place == "t5" else None
        with apply(model, "5MB", cache=tmp_path / "cache") as applied:
            (component,) = applied.components.values()
            assert {file.parent for file in component.weights} == {tmp_path / place}
            if encoded is not None:  # its embedding has other names there than in the whole model
                assert torch.equal(model.get_encoder()(IDS)[0], encoded)
        assert not written(tmp_path / "cache")
        assert unchanged(model, before)


def test_of_the_variants_the_one_that_fits_is_used(tmp_path):
    model = models.llama(**ONE)
    model.save_pretrained(tmp_path / "model")
    model.half().save_pretrained(tmp_path / "model", variant="fp16")
    model = loaded(tmp_path / "model", variant="fp16", dtype=torch.float16)
    with apply(model, "1MB", cache=tmp_path / "cache") as applied:
        (file,) = applied.components["LlamaForCausalLM"].weights
        assert file.name == "model.fp16.safetensors"


def test_a_module_without_a_folder_or_weights_is_applied(tmp_path):
    with apply(models.frozen(nn.Sequential(nn.ReLU())), "1MB", cache=tmp_path):
        assert not written(tmp_path)


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def linear(seed, width=8):
    torch.manual_seed(seed)
    return nn.Linear(8, width).eval().requires_grad_(False)


def test_what_a_model_runs_on_is_in_use_until_it_is_restored(tmp_path, said):
    model, cache = nn.Sequential(linear(1)), Cache(tmp_path)
    expected = model(X)
    applied = apply(model, "1MB", cache=tmp_path)
    (weights,) = cache.weights.iterdir()
    assert f"writing 288 bytes of weights of Sequential to {weights}" in said()
    assert {one.made_for for one in list_entries(tmp_path)} == {"Sequential"}
    applied.close()  # what is not loaded is needed too, as it is nowhere else
    assert [one.kind for one in prune(tmp_path, before=math.inf).in_use] == ["weights"]
    assert torch.equal(model(X), expected)
    applied.restore()
    assert len(prune(tmp_path, before=math.inf).removed) == 1
    with apply(model, "1MB", cache=tmp_path):  # written again
        assert torch.equal(model(X), expected)


@pytest.fixture(scope="module")
def phased(tmp_path_factory):
    """A model in shards whose tensors begin at 8, 24 or 40 modulo 64."""
    path = tmp_path_factory.mktemp("phases") / "llama"
    models.llama(num_hidden_layers=1).save_pretrained(path, max_shard_size="100KB")
    for number, file in enumerate(sorted(path.glob("*.safetensors"))):
        shifted(file, (8, 24, 40)[number])
    return path


def shifted(file, phase):
    """Lengthen the header of a file by blanks, so that its tensors begin at `phase` modulo 64."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end] + b" " * ((phase - end) % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def library_model(phased):
    return models.frozen(LlamaForCausalLM.from_pretrained(phased))


def answer_of(model):
    """The logits of two tokens behind a prompt: each is one row."""
    made = model.generate(
        IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.cat(made.logits)


def test_a_model_has_the_bits_of_the_one_that_its_library_maps(phased, tmp_path):
    expected = answer_of(library_model(phased))
    for memory in ("1.2MB", "60MB"):
        with load(phased, memory, cache=tmp_path) as model:
            assert torch.equal(answer_of(model), expected)
        model = library_model(phased)
        with apply(model, memory, cache=tmp_path):
            assert torch.equal(answer_of(model), expected)
        assert torch.equal(answer_of(model), expected)  # restored


def test_a_copy_of_a_model_keeps_its_own_bits(phased, tmp_path):
    model = copy.deepcopy(library_model(phased))
    expected = answer_of(model)
    with apply(model, "60MB", cache=tmp_path) as applied:
        assert set(applied.components["LlamaForCausalLM"].weights) == set(phased.glob("*.safetensors"))
        assert torch.equal(answer_of(model), expected)

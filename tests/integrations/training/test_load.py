"""Adapters on models that were never in memory: peft draws them, and steps give the bits of plain ones."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torchao.quantization import Int8WeightOnlyConfig
from transformers import LlamaForCausalLM, TorchAoConfig

from penstock.integrations import load
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.hunt import nightly_but, sampled
from tests.integrations import models
from tests.integrations.training.adapted import MEMORY, batch, equal, steps, trained

BATCHES = [batch(16, padded=True), batch(40, padded=True)]
"""Of one kind, which is exported once for each model."""


LAYERS = {"num_hidden_layers": 1}


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.1, **options)


def wrapped(model):
    return get_peft_model(model, lora(init_lora_weights=False))


def added(model):
    model.add_adapter(lora(init_lora_weights=False))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Llama in several files, one that transformers quantised, and an adapter."""
    folder = tmp_path_factory.mktemp("llama")
    models.llama(**LAYERS).save_pretrained(folder / "plain", max_shard_size="100KB")
    config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    quantised = LlamaForCausalLM.from_pretrained(folder / "plain", quantization_config=config)
    quantised.save_pretrained(folder / "int8")
    torch.manual_seed(7)
    wrapped(models.llama(**LAYERS)).save_pretrained(folder / "adapter")
    return folder


def read(model, folder):
    model.load_adapter(str(folder), is_trainable=True)
    return model


def adapter_of(kind, folders):
    """What `load` takes, and what the library does to a model in memory."""
    return {
        "config": (lora(init_lora_weights=False), added),
        "function": (wrapped, wrapped),
        "folder": (folders / "adapter", lambda model: read(model, folders / "adapter")),
    }[kind]


def in_memory(folder, adapt, **options):
    model = LlamaForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(1)
    return adapt(model).train()


def streamed(folder, adapter, cache, **options):
    torch.manual_seed(1)
    return load(folder, MEMORY, train=True, adapter=adapter, cache=cache, **options).train()


@pytest.mark.random
@pytest.mark.parametrize("kind", sampled(["config", "function", "folder"], 2))
def test_an_adapter_begins_and_learns_as_on_the_model_in_memory(kind, folders, cache, tmp_path):
    adapter, adapt = adapter_of(kind, folders)
    reference = in_memory(folders / "plain", adapt)
    state = torch.get_rng_state()
    with streamed(folders / "plain", adapter, cache) as model:
        assert type(model).__name__ == type(reference).__name__
        assert torch.equal(torch.get_rng_state(), state)
        own, drawn = (trained(one) for one in (reference, model))
        assert own.keys() == drawn.keys()
        assert equal([*drawn.values()], [*own.values()])
        assert equal(steps(model, BATCHES), steps(reference, BATCHES))
        (component,) = model.penstock_applied.components.values()
        assert component.stats.misses == 0
        assert component.stats.bytes_moved > 0
        model.save_pretrained(tmp_path / "streamed")
    reference.save_pretrained(tmp_path / "memory")
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("memory", "streamed")]
    assert saved[0].keys() == saved[1].keys()
    assert equal([*saved[0].values()], [*saved[1].values()])
    again = PeftModel.from_pretrained(models.llama(**LAYERS), tmp_path / "streamed")
    assert len(again.peft_config) == 1


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")  # and cannot merge
@pytest.mark.parametrize("how", nightly_but(["converted"], ["converted", "quantised"]))
def test_weights_in_another_form(how, folders, cache):
    options = {"dtype": torch.bfloat16} if how == "converted" else {}
    folder = folders / ("plain" if how == "converted" else "int8")
    expected = steps(in_memory(folder, wrapped, **options), BATCHES)
    with streamed(folder, wrapped, cache, **options) as model:
        assert equal(steps(model, BATCHES), expected)


def test_what_cannot_be_made_beside_files_is_refused(folders, cache, tmp_path):
    def made_of(adapter, match, kind=PassError):
        with pytest.raises(kind, match=match):
            streamed(folders / "plain", adapter, cache)

    made_of(None, "train=True needs an adapter")
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}):
        made_of(lora(**options), "not in memory: load makes adapters beside weights", StreamError)
    made_of(lambda _: wrapped(models.llama(**LAYERS)), "returned a PeftModel")
    made_of(
        lambda model: model.add_adapter(lora()),
        "returned a NoneType and not the LlamaForCausalLM with an adapter: have it",
    )
    made_of(lambda model: model.requires_grad_(True), r"embed_tokens\.weight requires grad and is in files")
    with pytest.raises(PassError, match="train=True: give both, or add the adapter to"):
        load(folders / "plain", MEMORY, adapter=lora(), cache=cache)
    wrapped(models.llama()).save_pretrained(tmp_path / "deep")
    wrapped(models.llama(**LAYERS, hidden_size=32)).save_pretrained(tmp_path / "narrow")
    made_of(tmp_path, "has no adapter_config.json: give the folder", SourceError)
    made_of(tmp_path / "deep", r"another model than .*, which has no place for .*layers\.1", SourceError)
    made_of(tmp_path / "narrow", r"narrow cannot be put on .* \(.*\): is it whole", SourceError)
    made_of(LoraConfig(target_modules=["nothere"]), "adapter= cannot be put on .*nothere", SourceError)

"""Quantised models through `apply` and `load`: what they say is what they say in memory, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from penstock import LoadOptions, fake_export
from penstock.integrations import apply, load
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.files.safetensors_file import read_header
from penstock.schedule.facts.errors import BudgetError, PassError, SourceError
from tests import quantised_models
from tests.hunt import nightly_but
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])
X = torch.linspace(-1, 1, 256).reshape(2, 128)

INT8 = Int8WeightOnlyConfig(set_inductor_config=False)
TORCHAO = {
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "int4 packed": PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False),
    "float8": Float8WeightOnlyConfig(set_inductor_config=False),
}


def parts_of(module):
    """The tensors that hold a module's bytes, by name."""
    return {k: v for name, p in module.named_parameters() for k, v in plain_tensors(name, p).items()}


def layers():
    torch.manual_seed(0)
    return models.frozen(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)))


def check_streamed(model, cache):
    """Calls that stream give the outputs of before, from no memory; what was there comes back."""
    expected, before = model(X), {name: value.clone() for name, value in parts_of(model).items()}
    for options in (LoadOptions(), LoadOptions(arena="contiguous", poison=True)):
        with apply(model, "1KB", cache=cache, options=options) as applied:
            assert applied.freed_bytes == sum(value.nbytes for value in before.values())
            assert all(value.untyped_storage().nbytes() == 0 for value in parts_of(model).values())
            called_at_the_floor(applied, lambda: model(X))
            for _ in range(3):
                assert torch.equal(model(X), expected)
            assert applied.components["Sequential"].stats.bytes_moved > 0
            applied.memory = "4MB"
            assert torch.equal(model(X), expected)
        assert all(torch.equal(value, before[name]) for name, value in parts_of(model).items())
        assert torch.equal(model(X), expected)


def called_at_the_floor(applied, call):
    """Give an applied model the memory that its errors name, and more, until it streams."""
    (component,) = applied.components.values()
    for _ in range(40):
        try:
            call()
            call()
        except BudgetError as error:
            applied.memory = error.floor_bytes
        else:
            if component.stats is not None:
                return
            applied.memory = applied.memory * 5 // 4  # one module is in memory at a time
    pytest.fail("each error names a number that is too small")


@pytest.mark.parametrize("kind", nightly_but(["int4 packed"], TORCHAO))
def test_a_module_that_torchao_quantised_streams_its_parts(kind, tmp_path):
    model = layers()
    quantize_(model, TORCHAO[kind])
    assert len(parts_of(model)) > 4
    check_streamed(model, tmp_path)


KINDS = [quantised_models.Shown, quantised_models.Hidden]


@pytest.mark.parametrize("kind", nightly_but(KINDS[1:], KINDS))
def test_any_class_that_says_what_it_is_made_of_streams(kind, tmp_path):
    nested = kind is quantised_models.Shown
    check_streamed(quantised_models.quantise(layers(), kind, nested=nested), tmp_path)


def test_a_constructor_that_quantises_is_refused_with_its_line():
    def build():
        model = layers()
        quantize_(model, INT8)  # here
        return model

    with pytest.raises(PassError, match=r"test_quantised_models\.py.*# here: it makes a Int8Tensor"):
        fake_export(build, (X,))


def test_a_part_that_changes_counts(tmp_path):
    model, reference = layers(), layers()
    for one in (model, reference):
        quantize_(one, INT8)
    with apply(model, "1MB", cache=tmp_path):
        model(X)
        for one in (model, reference):
            one[0].weight.scale.mul_(2)
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), reference(X))


KINDS_OF_GGUF = ("Q8_0", "Q4_0", "Q6_K")


@pytest.mark.parametrize("kind", nightly_but(["Q4_0"], KINDS_OF_GGUF))
def test_weights_of_a_gguf_file_stream_as_they_are(kind, tmp_path):
    check_streamed(gguf_layers(kind), tmp_path)


def gguf_layers(kind):
    """Make layers as diffusers has them for a GGUF file."""
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    chosen = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[chosen]
    width = max(128, block)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, width), nn.GELU())
    for _ in range(2):
        layer = GGUFLinear(width, width, True, compute_dtype=torch.float32)
        data = torch.randint(0, 40, (width, width // block * nbytes), dtype=torch.uint8)
        layer.weight = GGUFParameter(data, quant_type=chosen)
        model.append(layer)
    return models.frozen(model)


def test_a_large_packed_buffer_streams(tmp_path):
    class Packed(nn.Module):
        """Holds its weight as bytes in a buffer, as in-place formats do."""

        def __init__(self):
            super().__init__()
            self.register_buffer("packed", torch.randint(-7, 8, (1024, 1024), dtype=torch.int8))
            self.scale = nn.Parameter(torch.rand(1024))

        def forward(self, x):
            return x @ self.packed.to(x.dtype) * self.scale

    torch.manual_seed(0)
    model = models.frozen(nn.Sequential(Packed(), Packed(), Packed()))
    x = torch.linspace(-1, 1, 1024)[None]
    expected = model(x)
    with apply(model, "1KB", cache=tmp_path) as applied:
        called_at_the_floor(applied, lambda: model(x))
        assert torch.equal(model(x), expected)
        assert applied.components["Sequential"].plan.streamed_bytes > 2 << 20
    assert torch.equal(model(x), expected)


# Models of transformers.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Llama that transformers loaded with int8 weights, and the folder that it saved it to."""
    from transformers import LlamaForCausalLM, TorchAoConfig

    folder = tmp_path_factory.mktemp("llama")
    models.llama(num_hidden_layers=1).save_pretrained(folder / "plain")
    model = LlamaForCausalLM.from_pretrained(folder / "plain", quantization_config=TorchAoConfig(INT8))
    model.save_pretrained(folder / "int8", max_shard_size="40KB")
    return models.twin(models.frozen(model)), folder / "int8"


def test_a_quantised_model_generates_what_it_generates_in_memory(saved, tmp_path):
    reference, _ = saved
    model = models.twin(reference)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with apply(model, "130KB", cache=tmp_path) as applied:
        called_at_the_floor(applied, lambda: model.generate(IDS, **options))
        got, want = model.generate(IDS, **options), reference.generate(IDS, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        assert applied.components["LlamaForCausalLM"].stats.bytes_moved > 0


def test_a_folder_of_quantised_weights_is_never_in_memory(saved, tmp_path):
    reference, folder = saved
    assert len(list(folder.glob("*.safetensors"))) == 3
    model = load(folder, "130KB", cache=tmp_path)
    assert type(model.model.layers[0].mlp.up_proj.weight) is type(
        reference.model.layers[0].mlp.up_proj.weight
    )
    assert all(value.untyped_storage().nbytes() == 0 for value in parts_of(model).values())
    called_at_the_floor(model.penstock_applied, lambda: model(IDS))
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert model.penstock_applied.components["LlamaForCausalLM"].stats.bytes_moved > 0
    model.penstock_applied.close()


@pytest.mark.parametrize("written", nightly_but(["lm_head"], ["model.embed_tokens", "lm_head"]))
def test_a_quantised_embedding_that_is_the_head_too_is_loaded_from_either(written, tmp_path):
    from transformers import LlamaForCausalLM, TorchAoConfig

    models.llama(num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(FqnToConfig({"model.embed_tokens": INT8}), include_input_output_embeddings=True)
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    reference.save_pretrained(tmp_path / "tied")  # writes it twice, and cannot read that itself
    file = tmp_path / "tied" / "model.safetensors"
    metadata = read_header(file).metadata
    names = (written, "model.layers", "model.norm")
    save_file({k: v for k, v in load_file(file).items() if k.startswith(names)}, file, metadata)
    model = load(tmp_path / "tied", "190KB", cache=tmp_path)
    assert torch.equal(model(IDS).logits, models.frozen(reference)(IDS).logits)
    model.penstock_applied.close()


def test_a_folder_that_does_not_say_which_tensors_are_parts_is_refused(tmp_path):
    models.llama().save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(SourceError, match="does not say which"):
        load(tmp_path, "1MB", cache=tmp_path / "cache")

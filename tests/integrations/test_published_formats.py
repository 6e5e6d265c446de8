"""Folders as quantised models are published: read in place, converted, or refused by the format's name."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from penstock.integrations import apply, load
from penstock.integrations.formats import compressed, packed
from penstock.schedule.facts.errors import PassError, SourceError
from tests.hunt import nightly_but
from tests.integrations import models
from tests.integrations.test_quantised_models import called_at_the_floor

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[5, 17, 99, 23, 42]])


def publish(model, folder, quantise, facts):
    """Write a model as its publisher would, and return the tensors in its file."""
    model.bfloat16().save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {k: v for name, value in load_file(file).items() for k, v in quantise(name, value).items()}
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": facts}))
    return tensors


def fp8(rows, columns=0):
    """FP8 of linear layers with a scale for each weight, or for each block."""

    def quantise(name, value):
        if not name.endswith("proj.weight"):
            return {name: value}
        height, width = (rows, columns) if rows else value.shape
        blocks = value.float().unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        data = (blocks / scale).to(torch.float8_e4m3fn).reshape(value.shape)
        scale = scale[:, 0, :, 0]
        if rows:
            return {name: data, f"{name}_scale_inv": scale}
        unused = {f"{name.removesuffix('weight')}activation_scale": torch.tensor(1.0)}
        return {name: data, f"{name}_scale_inv": scale.reshape(()).bfloat16()} | unused

    return quantise


def mxfp4(name, value):
    """MXFP4 of the experts of gpt-oss, with random values."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: value}
    experts, inputs, outputs = value.shape
    generator = torch.Generator().manual_seed(len(name))
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return models.frozen(GptOssForCausalLM(GptOssConfig(**models.SIZES | experts)))


FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
IN_PLACE = {
    "FP8 per tensor": (
        models.llama,
        fp8(None),
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
    ),
    "FP8 by blocks": (
        models.llama,
        fp8(16, 32),
        FP8 | {"activation_scheme": "dynamic", "weight_block_size": [16, 32]},
    ),
    "MXFP4": (gpt_oss, mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}),
}


@pytest.mark.parametrize("name", nightly_but(["FP8 by blocks", "MXFP4"], IN_PLACE))
def test_a_folder_streams_from_its_own_bytes(name, tmp_path):
    make, quantise, facts = IN_PLACE[name]
    publish(make(), tmp_path / "model", quantise, facts)
    check_streamed(models.frozen(type(make()).from_pretrained(tmp_path / "model")), tmp_path)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("packs_anew", [True, False])
@pytest.mark.parametrize(
    "facts", [{}, {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}]
)
def test_a_folder_of_bitsandbytes_streams_from_its_own_bytes(facts, packs_anew, tmp_path, monkeypatch):
    if not packs_anew:  # for processors with bfloat16 in AVX-512
        monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: False)
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    models.llama(attention_bias=True).bfloat16().save_pretrained(tmp_path / "plain")
    quantised = LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=BitsAndBytesConfig(**NF4 | facts)
    )
    quantised.save_pretrained(tmp_path / "model")
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    check_streamed(models.frozen(reference), tmp_path)


PARTS = {"": (2048, 1), ".absmax": (64,), ".quant_map": (16,), ".quant_state.bitsandbytes__nf4": (8,)}


def publish_nf4(folder, sizes):
    """A model of which the query's weights have parts of these sizes, of zeros."""

    def quantise(name, value):
        if not name.endswith("q_proj.weight"):
            return {name: value}
        dtypes = dict.fromkeys((".absmax", ".quant_map"), torch.float32)
        return {
            name + end: torch.zeros(size, dtype=dtypes.get(end, torch.uint8)) for end, size in sizes.items()
        }

    facts = NF4 | {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float32"}
    publish(models.llama(), folder, quantise, facts)


@pytest.mark.parametrize("wrong", [{"": (2047, 1)}, {".absmax": (3,)}, {".absmax": (256,)}])
def test_sizes_that_would_have_bitsandbytes_read_beyond_its_parts_are_refused(wrong, tmp_path):
    publish_nf4(tmp_path, PARTS | wrong)
    with pytest.raises(SourceError, match=r"q_proj\.weight .* of which nf4 makes no weight of \[64, 64\]"):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


def test_what_bitsandbytes_cannot_read_of_a_weight_is_an_error_of_the_files(tmp_path):
    publish_nf4(tmp_path, PARTS)
    model = load(tmp_path, "1MB", cache=tmp_path / "cache")
    with pytest.raises(SourceError, match=r"bitsandbytes__nf4 of a weight cannot be read \(\w+Error: "):
        model(torch.zeros(1, 3, dtype=torch.long))
    model.penstock_applied.close()


def check_streamed(reference, folder):
    """A loaded model says what the reference says, from the bytes in its files."""
    file = folder / "model" / "model.safetensors"
    used = {k: v for k, v in load_file(file).items() if not k.endswith(("activation_scale", "weight_shape"))}
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = reference.generate(IDS, **options)
    model = load(folder / "model", "100KB", cache=folder / "cache")
    applied = model.penstock_applied
    (component,) = applied.components.values()
    assert component.facts.nbytes == sum(value.nbytes for value in used.values())
    assert [one.path for one in component.facts.files] == [str(file)]
    called_at_the_floor(applied, lambda: model(IDS))
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert component.stats.bytes_moved > 0
    applied.memory = "8MB"
    got = model.generate(IDS, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
    assert not [*(folder / "cache").rglob("*.safetensors")]
    with pytest.raises(PassError, match="is quantised, and is not saved while it streams: copy its folder"):
        applied.save_pretrained(folder / "saved")
    applied.close()


@pytest.mark.parametrize("name", ["FP8 per tensor", "FP8 by blocks"])
def test_large_weights_are_unpacked_in_pieces(name, tmp_path, monkeypatch):
    make, quantise, facts = IN_PLACE[name]
    monkeypatch.setattr(packed, "_AT_ONCE", 1000)
    publish(make(), tmp_path / "model", quantise, facts)
    reference = models.frozen(type(make()).from_pretrained(tmp_path / "model"))
    with load(tmp_path / "model", "8MB", cache=tmp_path / "cache") as model:
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


# The tests do not have compressed-tensors: data/make_compressed_tensors.py has written what it gives.

GOLDEN = Path(__file__).parents[1] / "data" / "compressed_tensors.safetensors"

DYNAMIC = {"num_bits": 8, "symmetric": True, "dynamic": True}
COMPRESSED = {
    "int4 by groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}, None),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "int8 with int8 inputs": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        DYNAMIC | {"type": "int", "strategy": "token"},
    ),
    "FP8 with FP8 inputs": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        DYNAMIC | {"type": "float", "strategy": "tensor"},
    ),
}


def compressed_facts(kind, weights, inputs, **others):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    facts = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return facts | {"ignore": ["lm_head"]} | others


def whole_numbers(weights, value):
    """Numbers that a format has for a weight, and their scales."""
    size = {"group": 16, "channel": value.shape[1]}.get(weights["strategy"])
    if weights.get("type") == "float":
        scale = (value.float().abs().max() / 448).bfloat16().reshape(1)
        return (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    grouped = value.float().unflatten(1, (-1, size))
    most = 2 ** (weights["num_bits"] - 1) - 1
    scale = (grouped.abs().amax(2) / most).bfloat16()
    return (grouped / scale[..., None]).round().clamp(-most - 1, most).flatten(1).to(torch.int8), scale


@pytest.mark.parametrize("name", nightly_but(["int4 by groups", "FP8 with FP8 inputs"], COMPRESSED))
def test_a_folder_of_compressed_tensors_streams_from_its_own_bytes(name, tmp_path):
    kind, weights, inputs = COMPRESSED[name]
    dense = {}

    def quantise(name, value):
        if not name.endswith("proj.weight"):
            return {name: value}
        numbers, scale = whole_numbers(weights, value)
        groups = numbers.bfloat16().unflatten(1, (scale[0:1].numel(), -1))
        dense[name] = (groups * scale.reshape(*scale.shape[:1], -1, 1)).flatten(1)
        if kind != "pack-quantized":
            return {name: numbers, f"{name}_scale": scale}
        bits = weights["num_bits"]
        places = (numbers.long() + 2 ** (bits - 1)).unflatten(1, (-1, 32 // bits))
        words = (places << torch.arange(0, 32, bits)).sum(2)
        shape = torch.tensor(value.shape)
        return {f"{name}_packed": words.int(), f"{name}_scale": scale, f"{name}_shape": shape}

    made = models.llama()
    publish(made, tmp_path / "model", quantise, compressed_facts(kind, weights, inputs))
    made.save_pretrained(tmp_path / "plain")
    model = type(made).from_pretrained(tmp_path / "plain")
    model.load_state_dict(dense, strict=False, assign=True)
    if inputs:
        rounding = compressed.Activations(inputs["strategy"] == "token", inputs["type"] == "float")
        for fqn, layer in model.named_modules():
            if fqn.endswith("proj"):
                layer.register_forward_pre_hook(rounding)
    check_streamed(models.frozen(model), tmp_path)


@pytest.mark.parametrize("at_once", [1 << 22, 100])
@pytest.mark.parametrize("name", ["int4", "int8", "w8", "fp8", "fp8rows"])
def test_weights_are_what_compressed_tensors_unpacks(name, at_once, monkeypatch):
    monkeypatch.setattr(compressed, "_AT_ONCE", at_once)
    golden = load_file(GOLDEN)
    parts = {
        part: golden[f"{name}.{part}"] for part in ("packed", "qdata", "scale") if f"{name}.{part}" in golden
    }
    values = golden[f"{name}.values"]
    out = torch.empty_like(values)
    compressed.unpack(parts, out)
    assert torch.equal(out.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["2d", "3d"])
@pytest.mark.parametrize("strategy", ["token", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_inputs_are_rounded_as_compressed_tensors_does(kind, strategy, shape, dtype):
    golden, key = load_file(GOLDEN), f"{kind}.{strategy}.{shape}.{dtype}"
    got = compressed.Activations(strategy == "token", kind == "float").rounded(golden[f"{key}.input"])
    want, bits = golden[f"{key}.rounded"], torch.int16 if dtype == "bfloat16" else torch.int32
    assert torch.equal(got.view(bits), want.view(bits))
    assert compressed.Activations(by_token=True, is_float=False).rounded(got[:0]).shape[0] == 0


NOT_COMPUTED = {
    "several schemes": {"config_groups": {"a": {}, "b": {}}},
    "weights of 2 bits by group": compressed_facts(
        "pack-quantized", {"num_bits": 2, "strategy": "group"}, None
    ),
    "zero points": compressed_facts(
        "pack-quantized", {"num_bits": 4, "strategy": "group", "symmetric": False}, None
    ),
    "groups of columns": compressed_facts(
        "pack-quantized", {"num_bits": 4, "strategy": "group", "actorder": "group"}, None
    ),
    "a rounded cache": compressed_facts(
        "int-quantized", {"num_bits": 8, "strategy": "channel"}, None, kv_cache_scheme={"num_bits": 8}
    ),
    "inputs rounded by stored scales": compressed_facts(
        "float-quantized",
        {"num_bits": 8, "strategy": "tensor"},
        DYNAMIC | {"type": "float", "strategy": "tensor", "dynamic": False},
    ),
}


@pytest.mark.parametrize("said", NOT_COMPUTED)
def test_schemes_that_are_not_computed_are_refused_by_what_they_have(said, tmp_path):
    facts = {"quant_method": "compressed-tensors", "format": "pack-quantized"} | NOT_COMPUTED[said]
    publish(models.llama(), tmp_path, lambda name, value: {name: value}, facts)
    with pytest.raises(SourceError, match=rf"with compressed-tensors \([\w-]+\) and has {said}.*: give the"):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "packed_part",
    [torch.zeros(8, 8, dtype=torch.int32), torch.zeros(64, 16), torch.zeros(64, 16, dtype=torch.int16)],
)
def test_parts_that_make_no_weight_are_refused(packed_part, tmp_path):
    def quantise(name, value):
        if not name.endswith("q_proj.weight"):
            return {name: value}
        return {f"{name}_packed": packed_part.clone(), f"{name}_scale": torch.ones(64, 1)}

    publish(models.llama(), tmp_path, quantise, compressed_facts(*COMPRESSED["int8 packed"]))
    with pytest.raises(
        SourceError, match=r"has parts of .*proj\.weight of the shapes .*: get its files again"
    ):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


@pytest.mark.parametrize("name", nightly_but(["FP8 per tensor"], IN_PLACE))
def test_a_model_that_its_library_has_unpacked_streams_from_the_cache(name, tmp_path):
    make, quantise, facts = IN_PLACE[name]
    publish(make(), tmp_path / "model", quantise, facts)
    reference, model = (models.frozen(type(make()).from_pretrained(tmp_path / "model")) for _ in range(2))
    with apply(model, "8MB", cache=tmp_path / "cache"):
        for _ in range(2):
            assert torch.equal(model(IDS).logits, reference(IDS).logits)
        assert [*(tmp_path / "cache").rglob("*.safetensors")]


def test_adapters_are_trained_over_packed_weights(tmp_path):
    make, quantise, facts = IN_PLACE["FP8 by blocks"]
    publish(make(), tmp_path / "model", quantise, facts)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    reference = type(make()).from_pretrained(tmp_path / "model")
    torch.manual_seed(3)
    reference.add_adapter(lora)
    torch.manual_seed(3)
    model = load(tmp_path / "model", "8MB", cache=tmp_path / "cache", train=True, adapter=lora)
    for _ in range(2):
        for one in (model, reference):
            one.zero_grad()
            one(IDS, labels=IDS).loss.backward()
        grads = {name: value.grad for name, value in reference.named_parameters() if value.requires_grad}
        assert len(grads) == 8
        got = dict(model.named_parameters())
        assert all(torch.equal(got[name].grad, grad) for name, grad in grads.items())
    model.penstock_applied.close()


def test_a_folder_without_a_part_is_refused_by_the_name_of_that(tmp_path):
    tensors = publish(models.llama(), tmp_path, fp8(16, 32), FP8)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != lost}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=rf"does not hold {lost}, a part of {lost}: get its other files"):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


def test_experts_that_are_packed_one_by_one_are_refused(tmp_path):
    def quantise(name, value):
        return fp8(None)(f"{name}", value) if ".experts." not in name else expert(name, value)

    def expert(name, value):
        return {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor(1.0)}

    publish(models.mixtral(), tmp_path, quantise, FP8)
    with pytest.raises(SourceError, match=r"experts\.0\.\w+\.weight packed as fp8, .* a part of a stack"):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


REFUSED = {
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "NVFP4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "NVFP4 of modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors (marlin-24)": {"quant_method": "compressed-tensors", "format": "marlin-24"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "a method that it does not name": {"bits": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_name_with_a_way(name, tmp_path):
    def quantise(fqn, value):
        if not fqn.endswith("proj.weight"):
            return {fqn: value}
        return {f"{fqn.removesuffix('weight')}qweight": torch.zeros(8, 8)}

    publish(models.llama(), tmp_path, quantise, REFUSED[name])
    said = re.escape(name.removesuffix(" of modelopt"))
    with pytest.raises(
        SourceError, match=rf"was quantised with {said}, which penstock does not read: give the"
    ):
        load(tmp_path, "1MB", cache=tmp_path / "cache")
    assert not [*tmp_path.glob("cache/**/*.safetensors")]

"""Adapters of quantised models: packed weights stream in both directions, and are unpacked in both."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
)
from torchao.quantization.granularity import PerGroup
from transformers import LlamaForCausalLM, TorchAoConfig

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError
from tests.hunt import sampled
from tests.integrations import models
from tests.integrations.training.adapted import MEMORY, batch, equal, gradients, steps

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient.checkpointing.*")

INT8 = Int8WeightOnlyConfig(set_inductor_config=False)
OTHERS = {
    "float8": Float8WeightOnlyConfig(set_inductor_config=False),
    "int4 in bytes": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}
KINDS = [
    *((INT8, dtype, checkpointing) for dtype in (torch.float32, torch.bfloat16) for checkpointing in (0, 1)),
    *((one, torch.float32, False) for one in OTHERS.values()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    models.llama(num_hidden_layers=1).save_pretrained(folder)
    return folder


def quantised(folder, config, dtype=torch.float32, checkpointing=False):
    """A Llama that transformers quantised and peft prepared, as for QLoRA."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=TorchAoConfig(config))
    model = prepare_model_for_kbit_training(
        model, bool(checkpointing), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_proj"]
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    return get_peft_model(model, lora).train()


def kept_bytes(model, given):
    """The bytes of the largest value that autograd keeps from forward to backward."""
    kept = []

    def pack(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**given).loss.backward()
    return max(kept)


@pytest.mark.random
@pytest.mark.parametrize(("config", "dtype", "checkpointing"), sampled(KINDS, 3))
def test_gradients_are_those_of_the_quantised_model_in_memory(config, dtype, checkpointing, folder, cache):
    batches = [batch(length, padded=True) for length in (16, 40, 16)]
    expected = steps(quantised(folder, config, dtype, checkpointing), batches)
    model = quantised(folder, config, dtype, checkpointing)
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        assert equal(steps(model, batches), expected)
        (component,) = applied.components.values()
        assert component.stats.misses == 0
        assert component.stats.bytes_moved > 0
    after = gradients(model, batch(16))
    assert equal(after, gradients(model, batch(16)))


def test_packed_weights_are_read_in_both_directions_and_never_kept_unpacked(tmp_path, cache):
    models.llama().save_pretrained(tmp_path)
    model, given = quantised(tmp_path, INT8), batch(4)
    unpacked = model.get_base_model().model.layers[0].mlp.up_proj.weight.numel() * 4
    assert kept_bytes(model, given) == unpacked  # in memory, autograd keeps what a product unpacks
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        assert kept_bytes(model, given) < unpacked / 4
        (component,) = applied.components.values()
        payload = component._program.payload
    names = payload.storage_names()
    forward, backward = (
        [
            name
            for name, _ in itertools.groupby(names[read] for read in reads if names[read].endswith(".qdata"))
        ]
        for reads in (
            [read for step in trace.steps for read in step.reads]
            for trace in sorted(payload.traces, key=lambda trace: trace.method.endswith("_backward"))
        )
    )
    assert len(forward) == len(set(forward)) == 2 * 7
    # Nothing in front of these is trained.
    unread = {f"model.layers.0.self_attn.{name}_proj.weight.qdata" for name in "qkv"}
    left_out = set(forward) - set(backward)
    assert {name.removeprefix("model.").replace(".base_layer", "") for name in left_out} == unread
    assert backward == [name for name in reversed(forward) if name in backward]


def test_what_torch_cannot_differentiate_is_refused(folder, cache):
    dynamic = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    with pytest.raises(
        PassError, match=r"q_proj\.base_layer\.weight is a Int8Tensor whose products round activations"
    ):
        apply(quantised(folder, dynamic), MEMORY, train=True, cache=cache)
    int4 = PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)
    model = quantised(folder, int4)
    said = "derivative for aten::_weight_int4pack_mm_for_cpu is not implemented"
    with apply(model, MEMORY, train=True, cache=cache), pytest.raises(PassError, match=said):
        model(**batch(16))
    with pytest.raises(RuntimeError, match=said):
        gradients(model, batch(16))

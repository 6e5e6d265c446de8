"""Adapters of quantised models, whose packed weights stream."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from transformers import LlamaForCausalLM, TorchAoConfig

from penstock.integrations import apply
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

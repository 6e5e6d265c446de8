"""What peft can train beside LoRA, and over quantised weights, learns the same values as in memory."""

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from transformers import LlamaForCausalLM, TorchAoConfig

from penstock import LoadOptions
from penstock.integrations import apply
from tests.hunt import nightly_but, sampled
from tests.integrations import models
from tests.integrations.training.adapted import MEMORY, batch, check_streamed, equal, gradients, steps

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

QV = {"target_modules": ["q_proj", "v_proj"]}
PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

KINDS = {
    "DoRA": peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **QV),
    "AdaLoRA": peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=2, total_step=10, init_lora_weights=False, **QV
    ),
    "IA3": peft.IA3Config(
        target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "LoHa": peft.LoHaConfig(r=4, init_weights=False, **QV),
    "LoKr": peft.LoKrConfig(r=4, init_weights=False, **QV),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, init_weights=False, **QV),
    "BOFT": peft.BOFTConfig(boft_block_size=4, init_weights=False, **QV),
    "VeRA": peft.VeraConfig(r=4, init_weights=False, target_modules=["q_proj", "o_proj"]),
    "layer norms": peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
    "prefixes": peft.PrefixTuningConfig(**PROMPTS),
    "prompts": peft.PromptTuningConfig(**PROMPTS),
    "encoded prompts": peft.PromptEncoderConfig(encoder_hidden_size=32, **PROMPTS),
}


def with_adapter(kind):
    model = models.llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]).train()


@pytest.mark.parametrize("kind", nightly_but(["DoRA", "AdaLoRA", "OFT", "VeRA", "prefixes"], KINDS))
def test_what_peft_trains_learns_as_in_memory(kind, plans, cache):
    plans["now"] = 0.2
    batches = [batch(16), batch(40, padded=True), batch(16)]
    expected = steps(with_adapter(kind), batches)
    model = with_adapter(kind)
    options = LoadOptions(arena="contiguous", poison=True)
    with apply(model, MEMORY, train=True, cache=cache, options=options) as applied:
        assert equal(steps(model, batches), expected)
        check_streamed(applied)


class Attentions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.last = torch.nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.last(x + self.second(x, x, x)[0])


@pytest.mark.parametrize("train", [True, False])
def test_lora_on_the_attention_of_torch_computes_as_in_memory(train, plans, cache):
    plans["now"] = 0.0
    config = peft.LoraConfig(r=4, target_modules=["first", "second", "last"], init_lora_weights=False)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(peft.get_peft_model(Attentions(), config).train(train))
    reference, model = found
    x = torch.randn(2, 6, 32)

    def results(one):
        if not train:
            with torch.no_grad():
                return [one(x)]
        one.zero_grad()
        one(x).square().mean().backward()
        return [value.grad for value in one.parameters() if value.requires_grad]

    options = LoadOptions(arena="contiguous", poison=True)
    with apply(model, MEMORY, train=train, cache=cache, options=options):
        for _ in range(3):
            assert equal(results(model), results(reference))


INT8 = Int8WeightOnlyConfig(set_inductor_config=False)
OTHERS = {
    "float8": Float8WeightOnlyConfig(set_inductor_config=False),
    "int4 in bytes": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}
QUANTISED = [
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
@pytest.mark.parametrize(("config", "dtype", "checkpointing"), sampled(QUANTISED, 3))
def test_gradients_are_those_of_the_quantised_model_in_memory(config, dtype, checkpointing, folder, cache):
    batches = [batch(length, padded=True) for length in (16, 40, 16)]
    expected = steps(quantised(folder, config, dtype, checkpointing), batches)
    model = quantised(folder, config, dtype, checkpointing)
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        assert equal(steps(model, batches), expected)
        check_streamed(applied)
    after = gradients(model, batch(16))
    assert equal(after, gradients(model, batch(16)))

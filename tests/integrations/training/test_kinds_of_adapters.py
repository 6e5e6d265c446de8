"""What peft can train beside LoRA learns the same values as in memory."""

import peft
import pytest
import torch

from penstock import LoadOptions
from penstock.integrations import apply
from tests.hunt import nightly_but
from tests.integrations import models
from tests.integrations.training.adapted import MEMORY, batch, equal, steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

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
        (component,) = applied.components.values()
        assert component.stats.misses == 0
        assert component.stats.bytes_moved > 0


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

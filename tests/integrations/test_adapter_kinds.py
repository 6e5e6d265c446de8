"""Adapters of other kinds than LoRA, and adapters whose parameters are tied, below a model that streams."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    GraloraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    get_peft_model,
)
from torch import nn

from penstock.integrations import apply
from tests.hunt import nightly_but
from tests.integrations import models

WIDTH = 64
X = torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
SIZES = {"r": 4, "target_modules": ["a", "b"]}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def drawn(model, seed):
    """Give what an adapter would train other values."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) / 4
    return models.frozen(model)


def adapted(config, seed, *, tied=False):
    """Make one model with an adapter, whose values are of the seed."""
    torch.manual_seed(0)
    model = drawn(get_peft_model(TwoLayers(), config), seed)
    if tied:
        model.b.lora_A["default"].weight = model.a.lora_A["default"].weight
    return model


def attached(inner, config):
    torch.manual_seed(1)
    return drawn(get_peft_model(inner, config), 2)


KINDS = {
    "lora": LoraConfig(**SIZES),
    "adalora": AdaLoraConfig(init_r=4, total_step=9, target_modules=["a", "b"]),
    "gralora": GraloraConfig(**SIZES, gralora_k=2),
    "hra": HRAConfig(**SIZES),
    "ia3": IA3Config(target_modules=["a", "b"], feedforward_modules=["b"]),
    "loha": LoHaConfig(**SIZES),
    "lokr": LoKrConfig(**SIZES),
    "oft": OFTConfig(target_modules=["a", "b"], oft_block_size=4),
}
CASES = [(kind, memory) for kind in KINDS for memory in ("100KB", "1MB")]


@pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate:UserWarning")
@pytest.mark.parametrize(("kind", "memory"), nightly_but([(kind, "100KB") for kind in KINDS], CASES))
def test_it_computes_what_it_computes_in_memory(kind, memory, tmp_path):
    model, reference = (adapted(copy.deepcopy(KINDS[kind]), 1) for _ in range(2))
    with torch.no_grad(), apply(model, memory, cache=tmp_path):
        for step in (lambda _: None, lambda one: one.merge_adapter(), lambda one: one.unmerge_adapter()):
            step(model)
            step(reference)
            for _ in range(2):
                assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), reference(X))


@pytest.mark.parametrize("kind", nightly_but(["adalora", "loha", "oft"], KINDS))
def test_it_is_attached_while_its_model_streams(kind, tmp_path):
    torch.manual_seed(0)
    inner = models.frozen(TwoLayers())
    plain = copy.deepcopy(inner)
    with torch.no_grad(), apply(inner, "100KB", cache=tmp_path):
        inner(X)
        model, reference = (attached(one, copy.deepcopy(KINDS[kind])) for one in (inner, plain))
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), reference(X))


def test_tied_parameters_of_an_adapter_stay_tied(tmp_path):
    model, reference = (adapted(LoraConfig(**SIZES), 1, tied=True) for _ in range(2))
    with torch.no_grad(), apply(model, "100KB", cache=tmp_path):
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
    assert model.b.lora_A["default"].weight is model.a.lora_A["default"].weight

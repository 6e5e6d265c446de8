"""Adapters whose parameters are tied, of other kinds than LoRA, and in files that are damaged."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from penstock.integrations import apply
from penstock.schedule.errors import StreamError
from tests.integrations import models

X = torch.linspace(-1, 1, 16).reshape(1, 16)
SIZES = {"r": 4, "target_modules": ["a", "b"]}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def adapted(config, seed, *, tied=False):
    """One model with an adapter, whose values are of the seed."""
    torch.manual_seed(0)
    model = get_peft_model(TwoLayers(), config)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) / 4
    if tied:
        model.b.lora_A["default"].weight = model.a.lora_A["default"].weight
    return models.frozen(model)


def test_tied_parameters_of_an_adapter_are_swapped_together(tmp_path):
    model, other = (adapted(LoraConfig(**SIZES), seed, tied=True) for seed in (1, 2))
    other.save_pretrained(tmp_path / "tied")
    adapted(LoraConfig(**SIZES), 3).save_pretrained(tmp_path / "untied")
    with apply(model, "1MB", cache=tmp_path) as applied:
        before = model(X)
        with pytest.raises(StreamError, match=r"a\.lora_A\.weight and b\.lora_A\.weight are tied in the mod"):
            applied.swap_adapter(tmp_path / "untied")
        assert torch.equal(model(X), before)
        applied.swap_adapter(tmp_path / "tied")
        assert torch.equal(model(X), other(X))
    assert torch.equal(model(X), other(X))


@pytest.mark.parametrize("other", [{}, {"use_rslora": True}], ids=["fits", "scales otherwise"])
def test_dora_is_swapped_where_only_values_differ(other, tmp_path):
    config = {"init_lora_weights": False, "use_dora": True}
    model = adapted(LoraConfig(**SIZES, **config), 1)
    reference = adapted(LoraConfig(**SIZES, **config, **other), 2)
    reference.save_pretrained(tmp_path / "other")
    with apply(model, "1MB", cache=tmp_path) as applied:
        before = model(X)
        if other:
            with pytest.raises(StreamError, match="use_rslora of adapter 'default' is False in the model"):
                applied.swap_adapter(tmp_path / "other")
        else:
            applied.swap_adapter(tmp_path / "other")
        assert torch.equal(model(X), before if other else reference(X))
        assert not torch.equal(before, reference(X))

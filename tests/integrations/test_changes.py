"""What a program cannot know: changes of the module after it was exported, and by its own calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.errors import StreamError
from tests.integrations import models

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Processor:
    """As the attention processors of diffusers are: part of what is computed, and no module."""

    factor = 2.0


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.scale, self.processor, self.factors = 1.0, Processor(), {"all": [1.0]}
        self.register_buffer("kept", torch.ones(8))
        self.register_buffer("computed", torch.ones(8), persistent=False)

    def forward(self, x):
        factor = self.scale * self.processor.factor * self.factors["all"][0]
        return self.linear(x) * factor * self.kept + self.computed


def tiny(kind: type = Tiny):
    return models.frozen(kind())


def changed(model, name: str) -> None:
    match name:
        case "scale":
            model.scale = 2.0
        case "processor":
            model.processor = Processor()
        case "processor.factor":
            model.processor.factor = 3.0
        case "factors.all.0":
            model.factors["all"][0] = 3.0
        case "kept" | "computed":
            getattr(model, name).mul_(3)
        case "linear._forward_hooks":
            model.linear.register_forward_hook(lambda module, given, output: output * 2)
        case "linear.weight":
            model.linear.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        case "linear.bias":
            model.linear.bias.data = torch.zeros(8)


NAMES = (
    "scale", "processor", "processor.factor", "factors.all.0", "kept", "computed", "linear._forward_hooks",
    "linear.weight", "linear.bias",
)  # fmt: skip


def test_whatever_changes_in_a_module_is_refused_by_name(tmp_path):
    for name in NAMES:
        model = tiny()
        applied = apply(model, "1MB", cache=tmp_path)
        changed(model, name)
        with pytest.raises(StreamError, match=rf"any more: {name}(\.\d+)?(, |  *changed)"):
            model(X)
        applied.close()


def test_a_hook_of_the_module_itself_runs_as_ever(tmp_path):
    model = tiny()
    expected = model(X)
    with apply(model, "1MB", cache=tmp_path):
        model.register_forward_hook(lambda module, given, output: output + 1)
        assert torch.equal(model(X), expected + 1)


def test_a_configuration_within_the_configuration_is_watched(tmp_path):
    model = models.llama()
    with apply(model, "400KB", cache=tmp_path):
        model.config.rope_parameters["rope_theta"] = 7.0
        with pytest.raises(StreamError, match=r"config\.rope_parameters\.rope_theta changed"):
            model(torch.tensor([[3, 4, 5]]))

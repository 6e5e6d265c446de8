"""Tiny parts of pipelines of diffusers, each class with every number made small, and its first inputs."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.configs import LARGEST, small_list, small_number

_OPTIONAL = ("img_ids", "txt_ids", "pooled_projections", "encoder_attention_mask")
_STATES = ("encoder_hidden_states", "encoder_hidden_states_t5", "prompt_embeds", "caption")
_WIDTHS = (
    "cross_attention_dim", "joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels",
    "cross_attention_input_dim", "caption_projection_dim", "encoder_hid_dim",
)  # fmt: skip
"""Settings that say how wide what comes from a text is."""


def parts() -> list[str]:
    """The models that the installed diffusers has, by class."""
    import diffusers

    found = []
    for name in dir(diffusers):
        if name.endswith("Model") or name.startswith("Autoencoder") or "Transformer" in name:
            made = getattr(diffusers, name)
            if inspect.isclass(made) and issubclass(made, diffusers.ModelMixin):
                found.append(name)
    return found


def tiny_part(kind: str) -> nn.Module:
    """A tiny model of a class with random weights. Raises whatever its library does where there is none."""
    import diffusers

    made = getattr(diffusers, kind)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made.__init__).parameters.items():
        value = parameter.default
        if type(value) is int:
            given[name] = small_number(name, value)
        elif isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            given[name] = type(value)(small_list(name, list(value)))
    if "norm_num_groups" in given:
        given["norm_num_groups"] = 8
    with torch.device("meta"):
        if sum(one.numel() for one in made(**given).parameters()) > LARGEST:
            raise ValueError("its parameters are not tiny")
    torch.manual_seed(0)
    model: nn.Module = made(**given)
    return model.eval().requires_grad_(False)


def part_inputs(model: Any) -> dict[str, torch.Tensor]:
    """The first inputs with which a model runs. Raises the last error where it runs with none."""
    taken = inspect.signature(model.forward).parameters.values()
    names = [one.name for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    needed = list(dict.fromkeys([*names, *(one.name for one in taken if one.name in _STATES + _OPTIONAL)]))
    widths = [next((model.config[name] for name in _WIDTHS if isinstance(model.config.get(name), int)), 32)]
    failed: Exception = LookupError("it takes nothing")
    for width in widths:
        for given in _guesses(model.config, needed, width):
            try:
                with torch.no_grad():
                    model(**given)
            except Exception as error:
                failed = error
                if (asked := _MISMATCH.search(str(error))) and len(widths) < 4:
                    widths.append(int(asked[1]))
            else:
                return given
    raise failed


_MISMATCH = re.compile(r"shapes cannot be multiplied \(\d+x\d+ and (\d+)x\d+\)")
"""What torch says of a product that expects another width."""


def _guesses(config: Any, names: list[str], width: int) -> Iterator[dict[str, torch.Tensor]]:
    channels = config.get("in_channels") or config.get("num_channels") or 3
    shapes = [(1, channels, 16, 16), (1, channels, 5, 16, 16), (1, 16, channels), (1, channels, 64)]
    times = [torch.tensor([7]), torch.tensor([0.5])]
    for shape, time in itertools.product(shapes, times):
        yield {name: _guess(config, name, shape, time, width) for name in names}


def _guess(config: Any, name: str, shape: tuple[int, ...], time: torch.Tensor, width: int) -> torch.Tensor:
    if "time" in name or name == "t":
        return time
    if "mask" in name:
        return torch.ones(1, 5)
    if "pooled" in name:
        return torch.zeros(1, config.get("pooled_projection_dim") or width)
    if name in ("img_ids", "txt_ids"):
        return torch.zeros(shape[1] if name == "img_ids" else 5, 3)
    if name in _STATES or "text" in name or "encoder" in name:
        return torch.zeros(1, 5, width)
    return torch.zeros(shape)

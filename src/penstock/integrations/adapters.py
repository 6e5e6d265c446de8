"""Adapters of peft: the weights of each, and how its layers unmerge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.integrations.emptied.absent import value_of


def by_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a module's tensors by the file that each goes to: the module's own, and those of each adapter."""
    base = dict(tensors)
    groups = [
        {fqn: base.pop(fqn) for fqn in _names(module, adapter) if fqn in base}
        for adapter in getattr(module, "peft_config", ())
    ]
    return [base, *filter(None, groups)]


def _names(module: nn.Module, adapter: str) -> Iterator[str]:
    for path, layer in module.named_modules():
        kinds = {*getattr(layer, "adapter_layer_names", ()), *getattr(layer, "other_param_names", ())}
        for name, _ in layer.named_parameters() if kinds else ():
            kind, *names = name.split(".")
            if kind in kinds and names[:1] == [adapter]:
                yield f"{path}.{name}"


def state_of_adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return the state dict of a model of which the adapters are saved: what is saved of them has values."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    saved = {
        id(value)
        for adapter in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values()
    }
    return {
        name: value_of(value).detach().clone() if id(value) in saved else value
        for name, value in state.items()
    }


def adapted_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of peft that can merge adapters into a weight."""
    return [layer for layer in module.modules() if hasattr(layer, "merged_adapters")]


def unmerge_disabled(layers: Sequence[Any]) -> bool:
    """Unmerge disabled adapters, as peft does within the next call of their layers; return if any was."""
    unmerged = [layer for layer in layers if layer.merged_adapters and layer.disable_adapters]
    for layer in unmerged:
        layer.unmerge()
    return bool(unmerged)

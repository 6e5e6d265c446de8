"""Folders of quantised models, in whose files transformers wrote the classes of torchao's weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES, read_header
from penstock.schedule.facts.errors import SourceError

_ONLY = "torchao"


def with_quantised_weights(
    build: Callable[[], nn.Module], facts: Mapping[str, Any], files: tuple[Path, ...], folder: Path
) -> Callable[[], nn.Module]:
    """Let a module be built with the quantised weights that its configuration and its files describe.

    `facts` is the configuration. Returns `build` itself where nothing is quantised. Raises SourceError for
    methods other than torchao's.
    """
    quantised = facts.get("quantization_config")
    if not quantised:
        return build
    method = quantised.get("quant_method")
    if method != _ONLY:
        raise SourceError(
            f"{folder} was saved quantised with {method}, and penstock reads torchao's folders: load one in "
            "full dtype, or one that transformers saved with TorchAoConfig (docs/quantised.md)"
        )
    stored = open_checkpoint(files).tensors
    weights = _weights(files, stored, folder)

    def build_quantised() -> nn.Module:
        module = build()
        _put(weights, module, stored)
        return module

    return build_quantised


def _put(weights: Mapping[str, nn.Parameter], module: nn.Module, stored: Container[str]) -> None:
    """Give a module its weights; a tied one that is not stored gets the weight of its other name."""
    tied: dict[int, list[str]] = {}
    for fqn, value in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(value), []).append(fqn)
    for fqns in tied.values():
        for fqn in fqns:
            weight = next((weights[name] for name in (fqn, *fqns) if name in weights), None)
            if weight is not None and fqn not in stored:
                owner, _, key = fqn.rpartition(".")
                module.get_submodule(owner)._parameters[key] = weight


def _weights(
    files: tuple[Path, ...], stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, nn.Parameter]:
    """Return the weights that are stored in parts, by FQN, as torchao's tensors on the meta device."""
    facts: dict[str, str] = {}
    for file in files:
        facts |= read_header(file).metadata
    parts = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, TORCH_NAMES[tensor.dtype]), device="meta")
        for name, tensor in stored.items()
    }
    try:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        whole, _ = unflatten_tensor_state_dict(parts, facts)
    except ImportError as error:
        raise SourceError(
            f"{folder} was saved quantised with torchao: pip install torchao ({error})"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{folder} does not say which of its tensors are parts of which weight ({error}): save it "
            "again with save_pretrained of transformers, which writes that into the files"
        ) from error
    return {name: nn.Parameter(v, requires_grad=False) for name, v in whole.items() if name not in stored}

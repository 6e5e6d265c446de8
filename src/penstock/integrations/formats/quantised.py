"""Folders of quantised models: weights of torchao's classes, and weights that their library unpacks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock._extras import require
from penstock.integrations.formats import compressed
from penstock.integrations.formats.packed import FORMATS, put_packed, refusal
from penstock.models.configuration import DTYPES
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES, read_header
from penstock.schedule.facts.errors import SourceError

_TORCHAO, _BITSANDBYTES = "torchao", "bitsandbytes"


def quantised_weights(
    facts: Mapping[str, Any], files: tuple[Path, ...], folder: Path
) -> Callable[[nn.Module], None]:
    """Return what gives a module without memory the quantised weights that its files hold.

    `facts` is the configuration. It does nothing where that says nothing of quantisation. Raises SourceError
    for formats that are not read in place.
    """
    quantised = facts.get("quantization_config")
    if not quantised:
        return lambda module: None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    stored = open_checkpoint(files).tensors
    if method == _TORCHAO:
        return partial(_put, _weights(files, stored, folder), stored=stored)
    activations = computes_in = None
    if method == compressed.METHOD and quantised.get("format") in FORMATS:
        activations, method = compressed.activations_of(quantised, folder), quantised["format"]
    elif method == _BITSANDBYTES and quantised.get("bnb_4bit_quant_type") == "nf4":
        require(_BITSANDBYTES, purpose=f"{folder} was saved in 4 bits, and")
        if (dtype := quantised.get("bnb_4bit_compute_dtype")) in DTYPES:
            method = "nf4" + " with quantised scales" * bool(quantised.get("bnb_4bit_use_double_quant"))
            computes_in = getattr(torch, dtype)
    if method not in FORMATS:
        raise SourceError(refusal(folder, quantised))
    return partial(
        put_packed,
        stored=stored,
        method=method,
        folder=folder,
        activations=activations,
        computes_in=computes_in,
    )


def _put(weights: Mapping[str, nn.Parameter], module: nn.Module, *, stored: Container[str]) -> None:
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

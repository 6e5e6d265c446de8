"""The formats of compressed-tensors: integers and FP8 with scales, and inputs that layers round first.

The formulas are those of compressed-tensors 0.20, operator by operator, so that the bits are its own. That
library is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.schedule.facts.errors import SourceError

METHOD = "compressed-tensors"

_AT_ONCE = 1 << 22
"""Elements that are unpacked at a time."""

_STRATEGIES = ("group", "channel", "tensor")


def unpack(parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Write the values of a weight into `out`.

    `packed` has integers of 4 or 8 bits in int32, or `qdata` has them in int8, or numbers in FP8. `scale` has
    a number for the weight, for each of its rows, or for each group of neighbours in a row.
    """
    rows, columns = out.shape
    scale = parts["scale"].to(out.dtype)
    scale = scale.view(-1, 1) if scale.dim() < 2 else scale
    step = max(_AT_ONCE // columns, 1)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        values = _integers(parts["packed"][piece], columns) if "packed" in parts else parts["qdata"][piece]
        scales = scale[piece] if len(scale) > 1 else scale
        numbers = values.to(out.dtype).view(len(values), scale.shape[1], -1)
        out[piece] = (numbers * scales[:, :, None]).flatten(1)


def fits(shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Tell whether parts of these shapes can make a weight of a shape."""
    if len(shape) != 2:
        return False
    rows, columns = shape
    scale = shapes["scale"]
    scaled = prod(scale) == 1 or (
        len(scale) == 2 and scale[0] == rows and scale[1] and not columns % scale[1]
    )
    words = [(rows, -(-columns * bits // 32)) for bits in (4, 8)]
    data = shapes["packed"] in words if "packed" in shapes else shapes["qdata"] == shape
    return bool(scaled) and data


def _integers(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the signed integers in rows of int32, of which the low bits come first."""
    octets = packed.contiguous().view(torch.uint8)
    if octets.shape[1] < columns:
        octets, half = torch.stack((octets & 15, octets >> 4), -1).flatten(1), 8
    else:
        half = 128
    return (octets[:, :columns].to(torch.int16) - half).to(torch.int8)


@dataclass(frozen=True)
class Activations:
    """Rounds the input of a layer to eight bits, with one scale for each token or for all, before a call."""

    by_token: bool
    is_float: bool

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call with a rounded input."""
        return (self.rounded(args[0]), *args[1:])

    def rounded(self, value: torch.Tensor) -> torch.Tensor:
        """Return values that eight bits can hold with their scale."""
        if not value.numel():
            return value
        dims = tuple(range(2, value.dim())) if self.by_token else ()
        if dims:
            low, high = value.amin(dims, keepdim=True), value.amax(dims, keepdim=True)
        else:
            low, high = (bound.reshape(1) for bound in torch.aminmax(value))
        low, high = low.clamp(max=0), high.clamp(min=0)
        least, most = (-448.0, 448.0) if self.is_float else (-128.0, 127.0)
        width = torch.tensor(most - least).to(value.dtype)
        scale = torch.maximum(low.abs(), high.abs()) / (width / 2)
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        number = (value / scale + 0).clamp(least, most)
        number = number.to(torch.float8_e4m3fn).to(value.dtype) if self.is_float else number.round()
        return number * scale


def activations_of(quantised: Mapping[str, Any], folder: Path) -> Activations | None:
    """How layers round their inputs, or None. Raises SourceError for what is not computed here."""
    groups = quantised.get("config_groups")
    scheme: Any = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights: Any = scheme.get("weights") if isinstance(scheme, dict) else None
    if not isinstance(weights, dict):
        unknown, inputs = "several schemes for its layers", None
    else:
        unknown, inputs = _unknown(quantised, scheme, weights), scheme.get("input_activations")
    if unknown:
        raise SourceError(
            f"{folder} was quantised with {METHOD} ({quantised.get('format')}) and has {unknown}, which "
            "penstock does not compute: give the checkpoint in full dtype that it was made from "
            "(docs/quantised.md)"
        )
    if not inputs:
        return None
    return Activations(inputs["strategy"] == "token", inputs.get("type") == "float")


def _unknown(quantised: Mapping[str, Any], scheme: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """Return what a scheme has that is not computed here; empty where there is nothing."""
    inputs = scheme.get("input_activations")
    if weights.get("strategy") not in _STRATEGIES or weights.get("num_bits") not in (4, 8):
        return f"weights of {weights.get('num_bits')} bits by {weights.get('strategy')}"
    has = {
        "zero points": not weights.get("symmetric", True),
        "groups of columns that are not neighbours": weights.get("actorder") == "group",
        "rounded outputs": scheme.get("output_activations"),
        "a rounded cache": quantised.get("kv_cache_scheme"),
        "inputs rounded by stored scales, or not symmetrically": inputs and not _is_known(inputs),
    }
    return next((words for words, there in has.items() if there), "")


def _is_known(inputs: Mapping[str, Any]) -> bool:
    size = inputs.get("strategy") in ("token", "tensor") and inputs.get("num_bits") == 8
    return size and inputs.get("dynamic") is True and bool(inputs.get("symmetric", True))

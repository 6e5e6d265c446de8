"""Replaces diffusers' linears that hold GGUF blocks by modules that `torch.export` can trace.

The parameter of such a linear is of a class whose shape is not the shape of its bytes, and export confuses
the two. The replacement holds the bytes in a plain buffer, and the library's own function unpacks them in
each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock._extras import require
from penstock.schedule.facts.errors import PassError


def unpack_gguf(module: nn.Module) -> nn.Module:
    """Replace the GGUF linears of a module by linears that hold the same bytes in a plain buffer.

    The outputs are those of diffusers on a CPU, bit for bit. The buffer has the parameter's name.

    Args:
        module: A module that diffusers loaded from a GGUF file. It is changed.

    Returns:
        The module.

    Raises:
        PassError: There are no GGUF linears, or GGUF blocks in another kind of module. Nothing is replaced
            then.
        MissingExtraError: diffusers or gguf is not installed.
    """
    require("diffusers", "gguf", purpose="unpack_gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    if isinstance(module, GGUFLinear):
        raise PassError("the module is a GGUF linear itself: give the module that holds it")
    packed: list[tuple[nn.Module, str, nn.Module]] = []
    for name, owner in module.named_modules():
        for key, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, GGUFParameter) and not (
                isinstance(owner, GGUFLinear) and key == "weight"
            ):
                raise PassError(
                    f"parameter {name + '.' * bool(name) + key!r} is a {type(parameter).__name__} of a "
                    f"{type(owner).__name__}, expected them in linears only: dequantise this module first"
                )
        packed += [
            (owner, key, child)
            for key, child in owner.named_children()
            if isinstance(child, GGUFLinear) and isinstance(child.weight, GGUFParameter)
        ]
    if not packed:
        raise PassError("the module has no GGUF linears: export it as it is")
    for owner, key, child in packed:
        setattr(owner, key, _Linear(child).train(child.training))
    return module


@dataclass(frozen=True)
class _Blocks:
    """The bytes of a weight in the form that diffusers' function takes."""

    data: torch.Tensor
    quant_type: Any

    def as_tensor(self) -> torch.Tensor:
        return self.data


class _Linear(nn.Module):
    """Computes what a GGUF linear computes on a CPU; `weight` has its bytes, of shape (rows, bytes a row)."""

    weight: torch.Tensor

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.as_tensor().detach())
        self.bias = linear.bias
        self._quant_type, self._dtype = linear.weight.quant_type, linear.compute_dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        dense = dequantize_gguf_tensor(_Blocks(self.weight, self._quant_type)).to(self._dtype)
        bias = None if self.bias is None else self.bias.to(self._dtype)
        return nn.functional.linear(inputs, dense, bias)

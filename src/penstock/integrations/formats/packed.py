"""Weights that published checkpoints have packed, and transformers unpacks while it loads them on a CPU.

Such a weight stays packed, in the bytes of its file. Each operator that reads it gets the values to which the
library would have unpacked it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.formats import compressed
from penstock.models.configuration import names_in_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES
from penstock.schedule.facts.errors import SourceError

_AT_ONCE = 1 << 22
"""Elements that are unpacked at a time, which bounds what the library takes for it."""

Parts = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Format:
    """A way to pack weights.

    Attributes:
        ends: What the files add to a weight's name for each of its parts. The last part tells that a weight
            is packed.
        unpack: Writes the values of a weight with given parts into its memory.
        fits: Tells whether parts of given shapes, by name, can make a weight of a shape.
    """

    ends: Mapping[str, str]
    unpack: Callable[[Parts, torch.Tensor], None]
    fits: Callable[[Shapes, tuple[int, ...]], bool]


def _unpack_fp8(parts: Parts, out: torch.Tensor) -> None:
    """One scale for a weight, or one for each of its blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    data, scale = parts["qdata"], parts["scale"]
    blocks = scale.shape[-2] if scale.dim() > 1 else 1
    height = data.shape[-2] // blocks
    count = max(_AT_ONCE // max(height * data.shape[-1], 1), 1) if blocks > 1 else blocks
    rows = count * height if blocks > 1 else max(_AT_ONCE // max(data.shape[-1], 1), 1)
    for start in range(0, data.shape[-2], rows):
        scales = scale[start // height : start // height + count] if blocks > 1 else scale
        unpacked = Fp8Dequantize(None)._dequantize_one(data[start : start + rows], scales, out.dtype)
        out[start : start + rows] = unpacked


def _unpack_mxfp4(parts: Parts, out: torch.Tensor) -> None:
    """Experts, one after another."""
    from transformers.integrations.mxfp4 import dequantize_convertops

    for expert in range(len(out)):
        blocks, scales = (parts[name][expert : expert + 1] for name in ("blocks", "scales"))
        out[expert] = dequantize_convertops(blocks, scales, out.dtype)[0]


def _unpack_nf4(parts: Parts, out: torch.Tensor) -> None:
    """Whole, as bitsandbytes does in each call of a layer."""
    from bitsandbytes.functional import dequantize_4bit

    state = _nf4_state(parts, out.shape)
    state.dtype = out.dtype
    out.copy_(dequantize_4bit(parts["bits"], state))


def _nf4_state(parts: Parts, shape: torch.Size) -> Any:
    """Return what bitsandbytes keeps beside the bits of a weight.

    Its kernels compare nothing, so sizes are those of the parts, and not those that the file says. Raises
    SourceError for a file that says what bitsandbytes cannot read.
    """
    from bitsandbytes.functional import QuantState

    facts = dict(parts)
    try:
        state = QuantState.from_dict(facts, facts.pop("bits").device)
    except Exception as error:
        raise SourceError(
            f"{_NF4_STATE} of a weight cannot be read ({type(error).__name__}: {error}): get its files again"
        ) from error
    state.shape, state.blocksize = shape, shape.numel() // state.absmax.numel()
    if state.nested:
        state.state2.blocksize = _NF4_SCALES
    return state


def _fits_nf4(shapes: Shapes, shape: tuple[int, ...]) -> bool:
    scales, outer = prod(shapes["absmax"]), prod(shapes.get("nested_absmax", (inf,)))
    return (
        len(shape) == 2
        and prod(shapes["bits"]) * 2 == prod(shape)
        and prod(shape) in [scales << bits for bits in range(5, 13)]
        and outer * _NF4_SCALES >= scales
        and shapes.get("nested_quant_map", (256,)) == (256,)
    )


def _fits_fp8(shapes: Shapes, shape: tuple[int, ...]) -> bool:
    scale = shapes["scale"]
    divides = all(n and not size % n for n, size in zip(scale, shape, strict=False))
    scales = prod(scale) == 1 or (len(scale) == 2 and divides)
    return len(shape) == 2 and shapes["qdata"] == shape and scales


def _fits_mxfp4(shapes: Shapes, shape: tuple[int, ...]) -> bool:
    blocks = shapes["blocks"]
    unpacked = (blocks[0], prod(blocks[2:]) * 2, blocks[1]) if len(blocks) == 4 else ()
    return unpacked == shape and shapes["scales"] == blocks[:-1]


_NF4_SCALES = 256
"""The scales of a weight that one scale scales, where they are quantised too."""

_NF4_STATE = "quant_state.bitsandbytes__nf4"
"""The part in which bitsandbytes says what shape a weight has, as JSON."""

_DTYPES = {
    "qdata": ("I8", "F8_E4M3", "F8_E5M2"),
    "bits": ("U8",),
    "absmax": ("U8", "F32"),
    _NF4_STATE: ("U8",),
    "packed": ("I32",),
    "blocks": ("U8",),
    "scales": ("U8",),
    "scale": ("BF16", "F16", "F32", "F8_E8M0", "U8"),
}
"""The dtypes that files have parts in; float32 for others."""

_COMPRESSED = Format({"qdata": "", "scale": "_scale"}, compressed.unpack, compressed.fits)

_NF4 = Format(
    {"bits": "", "absmax": ".absmax", "quant_map": ".quant_map", _NF4_STATE: f".{_NF4_STATE}"},
    _unpack_nf4,
    _fits_nf4,
)
_SCALES_OF_SCALES = {name: f".{name}" for name in ("nested_absmax", "nested_quant_map")}

FORMATS = {
    "nf4": _NF4,
    "nf4 with quantised scales": replace(_NF4, ends=_SCALES_OF_SCALES | {**_NF4.ends}),
    "fp8": Format({"qdata": "", "scale": "_scale_inv"}, _unpack_fp8, _fits_fp8),
    "mxfp4": Format({"blocks": "_blocks", "scales": "_scales"}, _unpack_mxfp4, _fits_mxfp4),
    "pack-quantized": replace(_COMPRESSED, ends={"packed": "_packed", "scale": "_scale"}),
    "int-quantized": _COMPRESSED,
    "float-quantized": _COMPRESSED,
}
"""Formats by what a configuration calls them: `quant_method`, or the `format` of compressed-tensors."""


@dataclass(frozen=True)
class Packing:
    """How a weight is packed: its format, the names of its parts in the files, its shape, its dtype."""

    method: str
    names: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class PackedWeight(torch.Tensor):
    """A weight of which the memory is that of its parts. Operators get a tensor with its values."""

    @staticmethod
    def __new__(cls, parts: Parts, packing: Packing) -> PackedWeight:
        """Return a tensor of the weight's shape and dtype, without memory of its own."""
        device = next(iter(parts.values())).device
        return torch.Tensor._make_wrapper_subclass(cls, packing.shape, dtype=packing.dtype, device=device)

    def __init__(self, parts: Parts, packing: Packing) -> None:
        self.packing = packing
        for name, part in parts.items():
            setattr(self, name, part)

    def __tensor_flatten__(self) -> tuple[list[str], Packing]:
        return [name for name, _ in self.packing.names], self.packing

    @classmethod
    def __tensor_unflatten__(cls, parts: Parts, packing: Packing, size: Any, stride: Any) -> PackedWeight:
        return cls(parts, packing)

    def unpacked(self) -> torch.Tensor:
        """Return a tensor with the values of the weight."""
        parts = {name: getattr(self, name) for name, _ in self.packing.names}
        out = torch.empty(self.packing.shape, dtype=self.packing.dtype, device=self.device)
        FORMATS[self.packing.method].unpack(parts, out)
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({self.packing.method}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            parts, packing = args[0].__tensor_flatten__()
            return cls({name: func(getattr(args[0], name)) for name in parts}, packing)
        args, kwargs = pytree.tree_map_only(cls, cls.unpacked, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


class Linear4bit(nn.Linear):
    """A layer whose packed weight bitsandbytes computes with, in the dtype of the weight.

    Where nothing needs a gradient and the processor has bfloat16 in AVX-512, it packs the weight in another
    way first, and has kernels with other bits for that.
    """

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return what a layer of bitsandbytes returns that has just been loaded."""
        from bitsandbytes import functional
        from bitsandbytes import nn as layers

        weight: Any = self.weight
        bias: Any = self.bias
        bias = bias if bias is None else bias.to(weight.dtype)
        if value.requires_grad or self.training or not functional.has_avx512bf16():
            return nn.functional.linear(value.to(weight.dtype), weight, bias).to(value.dtype)
        parts = {name: getattr(weight, name) for name, _ in weight.packing.names}
        state = _nf4_state(parts, weight.shape)
        layer = layers.Linear4bit(*weight.shape[::-1], False, weight.dtype, device="meta").eval()
        bits = layers.Params4bit(weight.bits, False, state, bnb_quantized=True)
        layer._parameters.update(weight=bits, bias=bias)
        result: torch.Tensor = layer(value)
        return result


def put_packed(
    module: nn.Module,
    *,
    stored: Mapping[str, StoredTensor],
    method: str,
    folder: Path,
    activations: compressed.Activations | None = None,
    computes_in: torch.dtype | None = None,
) -> None:
    """Give a module its packed weights, without memory, and have its layers round their inputs.

    With `computes_in`, bitsandbytes computes with them in that dtype.

    Raises SourceError for weights that the module has otherwise.
    """
    format_ = FORMATS[method]
    renamed = names_in_checkpoint(module, stored)
    fqns = {names[0]: fqn for fqn, names in renamed.items() if len(names) == 1}
    stacked = {name for names in renamed.values() if len(names) > 1 for name in names}
    weights = dict(module.named_parameters(remove_duplicate=False))
    last = [*format_.ends.values()][-1]
    for base in (name.removesuffix(last) for name in stored if name.endswith(last)):
        fqn = fqns.get(base, base)
        names = {part: base + end for part, end in format_.ends.items()}
        missing = [name for name in names.values() if name not in stored]
        if missing:
            raise SourceError(f"{folder} does not hold {missing[0]}, a part of {fqn}: get its other files")
        if fqn not in weights or base in stacked:
            raise SourceError(
                f"{folder} has {base} packed as {method}, which is no weight of its own in the model, but a "
                "part of a stack: load the model with its library, and give it to penstock.integrations.apply"
            )
        owner, _, key = fqn.rpartition(".")
        layer = module.get_submodule(owner)
        shapes = {part: stored[name].shape for part, name in names.items()}
        known = all(stored[name].dtype in _DTYPES.get(part, ("F32",)) for part, name in names.items())
        known &= computes_in is None or type(layer) is nn.Linear
        if not known or not format_.fits(shapes, tuple(weights[fqn].shape)):
            dtypes = ", ".join(stored[name].dtype for name in names.values())
            raise SourceError(
                f"{folder} has parts of {fqn} of the shapes {shapes} ({dtypes}), of which {method} makes no "
                f"weight of {list(weights[fqn].shape)} for a {type(layer).__name__}: get its files again"
            )
        dtype = computes_in or weights[fqn].dtype
        packing = Packing(method, tuple(names.items()), tuple(weights[fqn].shape), dtype)
        parts = {}
        for part, name in names.items():
            part_dtype = getattr(torch, TORCH_NAMES[stored[name].dtype])
            parts[part] = torch.empty(stored[name].shape, dtype=part_dtype, device="meta")
        layer._parameters[key] = nn.Parameter(PackedWeight(parts, packing), requires_grad=False)
        if computes_in is not None:
            layer.__class__ = Linear4bit
        if activations is not None and isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(activations)


def names_of_packed(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return what files call the parts of a module's packed weights, by `FQN.PART`."""
    return {
        f"{fqn}.{part}": (name,)
        for fqn, weight in module.named_parameters(remove_duplicate=False)
        if isinstance(weight, PackedWeight)
        for part, name in weight.packing.names
    }


_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fbgemm_fp8": "FP8 of fbgemm",
    "compressed-tensors": "compressed-tensors",
}
"""What people call formats, by `quant_method`."""


def refusal(folder: Path, quantised: object) -> str:
    """Return the sentence that refuses a folder of another format, which its configuration describes."""
    facts = quantised if isinstance(quantised, dict) else {}
    method = str(facts.get("quant_method", "a method that it does not name"))
    format_ = facts.get("format") or facts.get("quant_algo") or ""
    name = "NVFP4" if "nvfp4" in f"{method} {format_}".lower() else _NAMES.get(method, method)
    detail = f" ({format_})" if format_ and name != "NVFP4" else ""
    return (
        f"{folder} was quantised with {name}{detail}, which penstock does not read: give the checkpoint in "
        "full dtype that it was made from, or one in FP8, MXFP4 or of torchao (docs/quantised.md)"
    )

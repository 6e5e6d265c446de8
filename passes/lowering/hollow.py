"""What a program is compiled with: memory that is never written as its weights, and zeros as arguments."""

from __future__ import annotations

import copy
import mmap
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from penstock.passes.calls.inputs import user_placeholders
from penstock.passes.graph.nodes import size_hint
from penstock.passes.weights.lifted import Weights, find_weights
from penstock.schedule.facts.errors import PassError

COPIED = 4096
"""Bytes of a tensor, at most, whose values the compiler is given: it copies scalars into the code."""


def without_values(exported: ExportedProgram) -> tuple[ExportedProgram, Weights]:
    """Returns a copy of the program over memory that was never written, and its weights as they were found.

    Small tensors keep their values.
    """
    weights = find_weights(exported)
    memory = [_reserve(storage.nbytes) for storage in weights.storages]
    values: dict[str, torch.Tensor] = {}
    for weight, value in zip(weights.weights, weights.tensors, strict=True):
        part = weight.parts[0]
        dtype, flat = getattr(torch, part.dtype), memory[part.storage]
        whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        empty = whole.as_strided(part.shape, part.stride, part.offset // dtype.itemsize)
        if value.numel() * value.itemsize <= COPIED and has_values(value):
            empty.copy_(value)
        values[weight.fqn] = empty
    hollow = copy.copy(exported)
    hollow._state_dict = {
        name: torch.nn.Parameter(values[name], requires_grad=False)
        if isinstance(value, torch.nn.Parameter) and name in values
        else values.get(name, value)
        for name, value in exported.state_dict.items()
    }
    hollow._constants = {name: values.get(name, value) for name, value in exported.constants.items()}
    return hollow, weights


def _reserve(nbytes: int) -> torch.Tensor:
    """Returns address space without memory behind it, however much: the system reserves none for it."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def has_values(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def example_arguments(exported: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the exported sizes, of zeros."""
    constants = {
        spec.arg.name: spec.arg.value
        for spec in exported.graph_signature.input_specs
        if isinstance(spec.arg, ConstantArgument)
    }
    leaves: list[Any] = []
    for node in user_placeholders(exported):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape = [size_hint(size) for size in value.shape]
            leaves.append(torch.zeros(shape, dtype=value.dtype))
        elif node.name in constants:
            leaves.append(constants[node.name])
        else:
            raise PassError(
                f"input {node.name!r} is a number that each call chooses, which AOTInductor does not take: "
                "export with a tensor in its place, or a fixed value"
            )
    args, kwargs = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return args, kwargs

"""The memory behind tensors as parts and storages, and copies of programs with other values or names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec

from penstock.passes.graph.nodes import dtype_name
from penstock.schedule.facts.model import Part


def storage_identity(tensor: torch.Tensor) -> tuple[str, int]:
    """Returns an identity of the memory behind a tensor: equal exactly for tensors that share memory.

    Real memory is identified by its address, because two storage objects may wrap the same bytes. Memory
    without an address (fake, meta, empty) is identified by the storage object.
    """
    storage = tensor.untyped_storage()
    if has_values(tensor) and storage.nbytes() > 0 and storage.data_ptr():
        return (str(tensor.device), storage.data_ptr())
    return ("object", int(storage._cdata))


def has_values(tensor: torch.Tensor) -> bool:
    """Tells whether there is memory behind a tensor: it is neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage behind a tensor, as a one-dimensional uint8 tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def same_bytes(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether the storages behind two tensors, which have values, hold the same bytes."""
    return torch.equal(storage_bytes(first), storage_bytes(other))


def part_of(tensor: torch.Tensor, storage: int) -> Part:
    """Returns the part for a plain tensor, whose storage has number `storage`."""
    return Part(
        name="",
        dtype=dtype_name(tensor.dtype),
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()),
        storage=storage,
        offset=int(tensor.storage_offset()) * tensor.itemsize,
    )


def tensor_in(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """Returns the tensor of a part; its storage is that of `flat`, a one-dimensional uint8 tensor."""
    # Slicing would ask the driver of a fake tensor's device, which need not exist.
    empty = torch.empty(0, dtype=getattr(torch, part.dtype), device=flat.device)
    start = int(flat.storage_offset()) + part.offset
    return empty.set_(flat.untyped_storage(), start // empty.itemsize, part.shape, part.stride)


def with_values(exported: ExportedProgram, value_of: Callable[[str, Any], Any]) -> ExportedProgram:
    """Returns a copy of the program whose weights and constants are `value_of(name, old)`.

    A tensor that replaces a parameter becomes a parameter, and one requires grad where the old one does.
    """

    def values(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: _like(value_of(name, old), old) for name, old in tensors.items()}

    copied = copy.copy(exported)
    copied._state_dict, copied._constants = values(exported.state_dict), values(exported.constants)
    return copied


def with_names(exported: ExportedProgram, names: Mapping[str, str]) -> ExportedProgram:
    """Returns a copy of the program in which weights and constants have the names that `names` gives them."""
    renamed = copy.copy(exported)
    renamed._graph_signature = copy.copy(exported.graph_signature)
    renamed._graph_signature.input_specs = [
        InputSpec(spec.kind, spec.arg, names.get(str(spec.target), spec.target), spec.persistent)
        for spec in exported.graph_signature.input_specs
    ]
    renamed._state_dict = {names.get(name, name): value for name, value in exported.state_dict.items()}
    renamed._constants = {names.get(name, name): value for name, value in exported.constants.items()}
    return renamed


def _like(value: Any, old: Any) -> Any:
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        return nn.Parameter(value, requires_grad=old.requires_grad)
    if isinstance(value, torch.Tensor) and old.requires_grad and not value.requires_grad:
        return value.detach().requires_grad_()
    return value

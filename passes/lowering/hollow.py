"""Stand-ins that a program is compiled with: memory that is never written as weights, zeros as arguments."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from penstock.passes.calls.inputs import user_placeholders
from penstock.passes.graph.nodes import size_hint
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.values import has_values, tensor_in, with_values
from penstock.schedule.facts.errors import PassError

STEP = 512
"""The alignment in bytes of stand-ins on a device, that of torch's allocators."""

COPIED = 4096
"""The most bytes of a tensor whose values the compiler gets, since it copies small values into the code."""


def shared_memory(weights: Weights, device: torch.device) -> torch.Tensor | None:
    """Returns memory of a device in which stand-ins for all weights have room, each at an address of its own.

    It is a little larger than the largest weight. On a CPU, where address space costs nothing, it is None.
    """
    if device.type == "cpu":
        return None
    largest = max((storage.nbytes for storage in weights.storages), default=0)
    return torch.empty(largest + STEP * len(weights.storages), dtype=torch.uint8, device=device)


def without_values(
    exported: ExportedProgram, weights: Weights, shared: torch.Tensor | None = None
) -> ExportedProgram:
    """Returns a copy of the program in which memory that was never written stands in for its weights.

    `weights` holds them by FQN. Tensors of up to COPIED bytes keep their values, in memory of their own. All
    others overlap in `shared` where it is given, which must be kept as long as the copy.
    """
    memory: dict[int, torch.Tensor] = {}

    def reserve(s: int) -> torch.Tensor:
        nbytes = weights.storages[s].nbytes
        if shared is None:
            return _reserve(nbytes)
        empty = torch.empty(0, dtype=torch.uint8, device=shared.device)
        if nbytes <= COPIED:
            return empty.new_empty(nbytes)
        # To Inductor, tensors of one storage and shape are one constant.
        place = shared.data_ptr() + STEP * s
        storage = torch._C._construct_storage_from_data_pointer(place, shared.device, nbytes)
        return empty.set_(storage)

    def empty(name: str, old: Any) -> Any:
        if name not in weights.held:
            return old
        part = weights.held[name].parts[0]
        if part.storage not in memory:
            memory[part.storage] = reserve(part.storage)
        value = tensor_in(memory[part.storage], part)
        if old.numel() * old.itemsize <= COPIED and has_values(old):
            value.copy_(old)
        return value

    return with_values(exported, empty)


def _reserve(nbytes: int) -> torch.Tensor:
    """Returns a tensor over address space for which the system reserves no memory, however large it is."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def example_arguments(exported: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of the exported sizes, with zeros for tensors.

    Raises PassError for an input that is a number which each call chooses.
    """
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
            leaves.append(torch.zeros(shape, dtype=value.dtype, device=value.device))
        elif node.name in constants:
            leaves.append(constants[node.name])
        else:
            raise PassError(
                f"input {node.name!r} is a number that each call chooses, which AOTInductor does not take: "
                "export with a tensor in its place, or a fixed value"
            )
    args, kwargs = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return args, kwargs

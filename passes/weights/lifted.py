"""Lifted inputs -> weights, parts and storages.

`torch.export` turns every parameter, buffer and tensor constant into a leading placeholder. Two of
them are one storage exactly when their tensors share memory, whatever their names, shapes and
strides: that holds for real, fake and meta tensors alike.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import dtype_name
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Part, Storage, Weight

_ROLES: dict[InputKind, Literal["parameter", "buffer", "constant"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)

_PIECE = 1 << 20
"""Bytes that are looked at in one go for one that is not zero."""


@dataclass(frozen=True)
class Weights:
    """The catalog of one exported program, and what ties it to torch.

    `placeholders` maps a placeholder's name to an index of `weights`, and `tensors[i]` holds the
    values of weight i. All storages are of kind `streamable` here: `usage.py` finds the others.
    """

    weights: tuple[Weight, ...]
    storages: tuple[Storage, ...]
    placeholders: dict[str, int]
    tensors: tuple[torch.Tensor, ...]

    def storage_of(self, placeholder: str) -> int:
        """Returns the storage index behind a placeholder."""
        return self.weights[self.placeholders[placeholder]].parts[0].storage


def find_weights(exported: ExportedProgram) -> Weights:
    """Finds the weights of an exported program and the storages behind them, in placeholder order.

    Raises PassError for what cannot be a weight: a tensor subclass, a sparse or quantised tensor, a
    custom object, an effect token, or a tensor that hides in the graph instead of being lifted.
    """
    _refuse_hidden_tensors(exported.graph_module)
    weights: list[Weight] = []
    tensors: list[torch.Tensor] = []
    placeholders: dict[str, int] = {}
    storages: dict[tuple[str, int], int] = {}
    sizes: dict[int, int] = {}
    nodes = {node.name: node for node in exported.graph.nodes}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        tensor = _value_of(exported, spec)
        index = storages.setdefault(storage_identity(tensor), len(storages))
        sizes[index] = max(sizes.get(index, 0), tensor.untyped_storage().nbytes())
        placeholders[spec.arg.name] = len(weights)
        # The program's own: a value that is bound to a program for a GPU lies in a file, on the CPU.
        example = nodes[spec.arg.name].meta.get("val")
        device = example.device if isinstance(example, torch.Tensor) else tensor.device
        weights.append(_weight(spec, tensor, index, str(device)))
        tensors.append(tensor)
    found = tuple(Storage(nbytes, "streamable") for nbytes in sizes.values())
    return Weights(tuple(weights), found, placeholders, tuple(tensors))


def storage_identity(tensor: torch.Tensor) -> tuple[str, int]:
    """Names the memory behind a tensor: equal for two tensors exactly when they share it.

    Real memory goes by its address, because two storages may wrap the same bytes; memory without
    one (fake, meta, empty) goes by the storage object.
    """
    storage = tensor.untyped_storage()
    real = type(tensor) is not FakeTensor and tensor.device.type != "meta"
    if real and storage.nbytes() > 0 and storage.data_ptr():
        return (str(tensor.device), storage.data_ptr())
    return ("object", int(storage._cdata))


def _value_of(exported: ExportedProgram, spec: InputSpec) -> torch.Tensor:
    """Returns the tensor behind a lifted input, refusing what is not a plain strided one."""
    name = f"{spec.kind.name.lower()} {spec.target or spec.arg.name!r}"
    if spec.kind not in _ROLES or spec.target is None:
        raise PassError(f"{name} is not a tensor and cannot be a weight: export the model without it")
    values = exported.constants if _is_constant(spec) else exported.state_dict
    tensor = values.get(spec.target)
    if not isinstance(tensor, torch.Tensor):
        raise PassError(f"{name} has no value in the exported program: export the model again")
    if type(tensor) not in _PLAIN_TYPES:
        raise PassError(
            f"{name} is a {type(tensor).__name__}, which does not say what it is made of, expected a plain "
            "tensor or a subclass with __tensor_flatten__: make it plain before the export (dequantise it)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise PassError(
            f"{name} is sparse, quantised or a lazy conjugate, expected plain strided values: "
            "make it dense (to_dense, dequantize, resolve_conj) before exporting"
        )
    return tensor


def _is_constant(spec: InputSpec) -> bool:
    """Tells whether export keeps the value outside the state dict."""
    return spec.kind is InputKind.CONSTANT_TENSOR or (spec.kind is InputKind.BUFFER and not spec.persistent)


def _weight(spec: InputSpec, tensor: torch.Tensor, storage: int, device: str) -> Weight:
    part = Part(
        name="",
        dtype=dtype_name(tensor.dtype),
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()),
        storage=storage,
        offset=int(tensor.storage_offset()) * tensor.itemsize,
    )
    return Weight(fqn=str(spec.target), role=_ROLES[spec.kind], device=device, parts=(part,))


def _refuse_hidden_tensors(graph_module: fx.GraphModule) -> None:
    """Raises PassError for a tensor that a graph, nested ones included, holds as an attribute."""
    held = [*graph_module.named_parameters(), *graph_module.named_buffers()]
    for module in graph_module.modules():
        held += [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
    if held:
        raise PassError(
            f"the graph holds the tensor {held[0][0]!r} as an attribute, expected all tensors to be inputs: "
            "register it as a buffer of the model and export again"
        )


def with_own_constants(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Returns the programs by method, with the method's name before constants that several methods have.

    Export numbers them anew in each program, so that equal names say nothing. Programs without such constants
    are returned as they are.
    """
    counted = Counter(name for exported in programs.values() for name in _constants(exported))
    repeated = {name for name, count in counted.items() if count > 1}
    return {method: _renamed(exported, repeated, method) for method, exported in programs.items()}


def _constants(exported: ExportedProgram) -> set[str]:
    specs = exported.graph_signature.input_specs
    return {str(spec.target) for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}


def _renamed(exported: ExportedProgram, repeated: set[str], method: str) -> ExportedProgram:
    names = {name: f"{method}.{name}" for name in _constants(exported) & repeated}
    if not names:
        return exported
    renamed = copy.copy(exported)
    signature = exported.graph_signature
    renamed._graph_signature = replace(
        signature,
        input_specs=[
            replace(spec, target=names.get(str(spec.target), spec.target))
            if spec.kind is InputKind.CONSTANT_TENSOR
            else spec
            for spec in signature.input_specs
        ],
    )
    renamed._constants = {names.get(name, name): value for name, value in exported.constants.items()}
    return renamed


@declare(ensures=("real values",))
def refuse_lost_values(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program; raises PassError where `torch.export.save` made zeros of the fake weights of
    fake_export.

    All its weights then begin at the start of one storage of zeros. Parameters of different shapes never do;
    where all have one shape, or there is one only, its example inputs are still fake.
    """
    values = {name: value for name, value in exported.state_dict.items() if _is_real(value)}
    lost = next(_on_top_of_one_another(values), None)
    if lost is None and values and _has_fake_inputs(exported) and all(map(_is_zero, values.values())):
        lost = next(iter(values))
    if lost is not None:
        raise PassError(
            f"the program's weights ({lost}, ...) have no values: fake_export made it, and torch.export.save "
            "does not keep fake weights; compile it where fake_export made it, or export the real model"
        )
    return exported


def _on_top_of_one_another(values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Parameters in zeros that begin where one of another shape begins; ties of one shape are none."""
    first: dict[tuple[object, ...], torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.nn.Parameter):
            other = first.setdefault((storage_identity(value), value.storage_offset()), value)
            if other.shape != value.shape and _is_zero(value):
                yield name


def _is_real(value: object) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and isinstance(value, torch.Tensor) and value.is_cpu and value.layout is torch.strided


def _has_fake_inputs(exported: ExportedProgram) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(exported.example_inputs))


def _is_zero(value: torch.Tensor) -> bool:
    """Whether the whole storage is, read no further than to the first byte that is not."""
    raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    return not any(bool(raw[start : start + _PIECE].any()) for start in range(0, len(raw), _PIECE))

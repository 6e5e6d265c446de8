"""The catalog of a program's weights: turns lifted inputs into weights, parts and storages.

`torch.export` turns every parameter, buffer and tensor constant into a leading placeholder. Two of
them are in one storage exactly when their tensors share memory, whatever their names, shapes and
strides are. This holds for real, fake and meta tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils import _pytree as pytree

from penstock.passes.pipeline import declare
from penstock.passes.weights.values import part_of, same_bytes, storage_bytes, storage_identity, with_names
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Storage, Weight

_ROLES: dict[InputKind, Literal["parameter", "buffer", "constant", "value"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)

KEPT = "penstock_kept"
"""The key in a graph module's `meta` of the FQNs that stand for values which a forward keeps."""

_PIECE = 1 << 20
"""The bytes of a storage that are compared with zero at a time."""


@dataclass(frozen=True)
class Weights:
    """Weights by the names of the nodes that hold them, and all storages of their catalog."""

    held: Mapping[str, Weight]
    storages: tuple[Storage, ...]

    def storage_of(self, name: str) -> int:
        """Returns the number of the storage behind a node."""
        return self.held[name].parts[0].storage


class Catalog:
    """The weights of programs by FQN, and the storages behind them, numbered in the order of the weights.

    `values[s]` is a tensor whose untyped storage is storage s. `joined` has the name of a weight for each
    storage that is a single storage in one program, and two storages with equal bytes in another.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}
        self.values: list[torch.Tensor] = []
        self.joined: dict[int, str] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages, all of which have the kind streamable here; `usage.py` finds their real kinds."""
        return tuple(Storage(value.untyped_storage().nbytes(), "streamable") for value in self.values)

    def add(self, exported: ExportedProgram) -> dict[str, Weight]:
        """Adds the weights of a program, and returns them by the names of their placeholders, in order.

        Raises PassError for an input that cannot be a weight: a tensor subclass, a sparse or quantised
        tensor, a custom object or an effect token. Also raises it for a tensor that the graph holds as an
        attribute instead of an input, and for a weight that differs from the weight of that name in another
        program.
        """
        _refuse_hidden_tensors(exported.graph_module)
        nodes = {node.name: node for node in exported.graph.nodes}
        weights: dict[str, Weight] = {}
        identities: dict[int, tuple[str, int]] = {}
        for spec in exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                continue
            fqn, tensor = str(spec.target), _value_of(exported, spec)
            number = self.number(tensor, fqn)
            if identities.setdefault(number, storage_identity(tensor)) != storage_identity(tensor):
                self.joined.setdefault(number, fqn)
            # The device of the placeholder: the value of a weight for a GPU may lie in a file, on the CPU.
            example = nodes[spec.arg.name].meta.get("val")
            device = example.device if isinstance(example, torch.Tensor) else tensor.device
            is_kept = fqn in exported.graph_module.meta.get(KEPT, ())
            role = "value" if is_kept else _ROLES[spec.kind]
            weight = Weight(fqn, role, str(device), (part_of(tensor, number),))
            weights[spec.arg.name] = weight
            if self.weights.setdefault(fqn, weight) != weight:
                raise PassError(
                    f"two methods have weights called {fqn!r} that differ: export them "
                    "from one model, or give the weights different names"
                )
        return weights

    def number(self, tensor: torch.Tensor, fqn: str) -> int:
        """Returns the number of the storage behind the tensor of a weight."""
        identity, known = storage_identity(tensor), self.weights.get(fqn)
        if identity not in self._numbers and known is not None:
            # Programs that were saved and loaded separately hold copies of one weight, or of one cache.
            number = known.parts[0].storage
            if _are_copies(self.values[number], tensor):
                self._numbers[identity] = number
        number = self._numbers.setdefault(identity, len(self.values))
        if number == len(self.values):
            self.values.append(tensor)
        elif tensor.untyped_storage().nbytes() > self.values[number].untyped_storage().nbytes():
            self.values[number] = tensor
        return number


def _are_copies(first: torch.Tensor, other: torch.Tensor) -> bool:
    known = first.device == other.device and first.device.type != "meta" and type(first) is type(other)
    return known and same_bytes(first, other)


def _value_of(exported: ExportedProgram, spec: InputSpec) -> torch.Tensor:
    """Returns the tensor behind a lifted input; raises PassError unless it is a plain strided tensor."""
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
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise PassError(
            f"{name} is a value inside of torch.func.grad or vmap, which export has left in the program: "
            "compute what the function does by torch.autograd.grad or by hand"
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


def _refuse_hidden_tensors(graph_module: fx.GraphModule) -> None:
    """Raises PassError for a tensor that a graph, nested ones included, holds as an attribute."""
    tensors = [*graph_module.named_parameters(), *graph_module.named_buffers()]
    for module in graph_module.modules():
        tensors += [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
    if tensors:
        raise PassError(
            f"the graph holds the tensor {tensors[0][0]!r} as an attribute, expected all tensors to be "
            "inputs: register it as a buffer of the model and export again"
        )


def with_own_constants(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Returns the programs by method, in which no constant has the name of another method's constant.

    Constants whose name several methods have get the method's name in front. Export numbers constants anew in
    each program, so constants of equal names need not be equal. Programs without such constants are returned
    as they are.
    """
    counted = Counter(name for exported in programs.values() for name in _constants(exported))
    repeated = {name for name, count in counted.items() if count > 1}
    return {method: _renamed(exported, repeated, method) for method, exported in programs.items()}


def with_named_constants(exported: ExportedProgram, method: str) -> ExportedProgram:
    """Returns the program with the method's name before all of its constants."""
    return _renamed(exported, _constants(exported), method)


def _constants(exported: ExportedProgram) -> set[str]:
    specs = exported.graph_signature.input_specs
    return {str(spec.target) for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}


def _renamed(exported: ExportedProgram, repeated: set[str], method: str) -> ExportedProgram:
    names = {name: f"{method}.{name}" for name in _constants(exported) & repeated}
    return with_names(exported, names) if names else exported


@declare(ensures=("real values",))
def refuse_lost_values(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program; raises PassError if it lost its weights when it was saved.

    `torch.export.save` turns the fake weights of fake_export into zeros, all of which begin at the start of
    one storage. Real parameters of different shapes never do. If all parameters have one shape, or there is
    only one, such a program is recognised by its example inputs, which are still fake.
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
    """Yields parameters in zeros that begin where a parameter of another shape begins."""
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
    """Tells whether all bytes of a storage are zero; reads no further than the first piece that is not."""
    raw = storage_bytes(value)
    return not any(bool(raw[start : start + _PIECE].any()) for start in range(0, len(raw), _PIECE))

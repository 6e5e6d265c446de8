"""The catalog of a program's weights: lifted inputs as weights, parts and storages, and their names."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import dtype_name, placeholders_of
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError, PayloadError
from penstock.schedule.facts.model import Part, Storage, Weight

if TYPE_CHECKING:
    from penstock.schedule.payload.codec import Payload


FACTS = "penstock"
"""The key of penstock's facts in `node.meta["custom"]`, which torch hands on where it retraces a program."""


def facts_of(node: fx.Node) -> dict[str, Any]:
    """Returns the facts of a node: plain values by name, and empty if it has none."""
    return dict(node.meta.get("custom", {}).get(FACTS, {}))


def add_facts(node: fx.Node, **facts: object) -> None:
    """Gives a node more facts. Neighbours that share its meta with it do not get them."""
    custom = node.meta.get("custom", {})
    node.meta = {**node.meta, "custom": {**custom, FACTS: {**custom.get(FACTS, {}), **facts}}}


def weights_among(graph_module: fx.GraphModule, payload: Payload, method: str) -> dict[str, Weight]:
    """Returns the weights of a method by the names of the inputs of its graph that hold them.

    Raises PassError if a weight that the method reads is not among them, and PayloadError if an input holds
    a weight that the payload does not have.
    """
    by_fqn = {weight.fqn: weight for weight in payload.tensors}
    inputs = {leaf.name for called in payload.methods if called.name == method for leaf in called.inputs}
    labels = _labels(by_fqn, method)
    weights: dict[str, Weight] = {}
    for node in placeholders_of(graph_module.graph):
        fqn = facts_of(node).get("weight")
        if fqn is None and inputs.isdisjoint((node.name, node.target)):
            fqn = labels.get(node.name)
        if fqn is not None:
            weights[node.name] = _checked(node, fqn, by_fqn)
    _refuse_lost(graph_module, payload, method, weights)
    return weights


def _labels(by_fqn: Mapping[str, Weight], method: str) -> dict[str, str]:
    """FQNs by the names that torch.export gives to their inputs: equal ones are numbered, as it does."""
    labels: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for fqn, weight in by_fqn.items():
        # Constants that several methods number alike have the method before their name in a payload.
        short = fqn.removeprefix(f"{method}.") if weight.role == "constant" else fqn
        base = label = f"{weight.role[0]}_" + re.sub(r"[^a-z0-9]", "_", short.lower())
        if label in labels:
            label = f"{base}_{numbers[base] + 1}"
        if match := re.fullmatch(r"(.*)_(\d+)", label):
            numbers[match[1]] = max(numbers[match[1]], int(match[2]))
        labels[label] = fqn
    return labels


def _checked(node: fx.Node, fqn: str, by_fqn: Mapping[str, Weight]) -> Weight:
    value = node.meta.get("val")
    if fqn not in by_fqn:
        raise PayloadError(
            f"the graph reads the weight {fqn!r}, which the payload does not have: this payload is of "
            "another model; load the one that was written with this graph"
        )
    part = by_fqn[fqn].parts[0]
    if isinstance(value, torch.Tensor):
        got = (dtype_name(value.dtype), tuple(value.shape))
        if got != (part.dtype, part.shape):
            raise PayloadError(
                f"the graph's weight {fqn!r} is {_described(got)}, and the payload's is "
                f"{_described((part.dtype, part.shape))}: this payload is of another model; load the one "
                "that was written with this graph"
            )
    return by_fqn[fqn]


def _refuse_lost(
    graph_module: fx.GraphModule, payload: Payload, method: str, weights: Mapping[str, Weight]
) -> None:
    there = {weight.parts[0].storage for weight in weights.values()}
    read = {s for t in payload.traces if t.method == method for step in t.steps for s in step.reads}
    if read <= there:
        return
    names, inputs = payload.storage_names(), [n.name for n in placeholders_of(graph_module.graph)]
    lost = next(names[s] for s in sorted(read - there))
    raise PassError(
        f"no input of the graph is the weight {lost!r} that method {method!r} reads (the inputs are "
        f"{', '.join(inputs[:3]) or 'none'}{', ...' * (len(inputs) > 3)}): a pass has renamed its inputs, or "
        "folded its weights into constants; annotate the graph before that pass, and inputs keep their names"
    )


def _described(dtype_and_shape: tuple[str, tuple[int, ...]]) -> str:
    return f"{dtype_and_shape[0]} of shape {list(dtype_and_shape[1])}"


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
        identity, weight = storage_identity(tensor), self.weights.get(fqn)
        if identity not in self._numbers and weight is not None:
            # Programs that were saved and loaded separately hold copies of one weight, or of one cache.
            number = weight.parts[0].storage
            if _are_copies(self.values[number], tensor):
                self._numbers[identity] = number
        number = self._numbers.setdefault(identity, len(self.values))
        if number == len(self.values):
            self.values.append(tensor)
        elif tensor.untyped_storage().nbytes() > self.values[number].untyped_storage().nbytes():
            self.values[number] = tensor
        return number


def _are_copies(first: torch.Tensor, other: torch.Tensor) -> bool:
    alike = first.device == other.device and first.device.type != "meta" and type(first) is type(other)
    return alike and same_bytes(first, other)


def _value_of(exported: ExportedProgram, spec: InputSpec) -> torch.Tensor:
    """Returns the tensor behind a lifted input; raises PassError unless it is a plain strided tensor."""
    name = f"{spec.kind.name.lower()} {spec.target or spec.arg.name!r}"
    if spec.kind not in _ROLES or spec.target is None:
        raise PassError(f"{name} is not a tensor and cannot be a weight: export the model without it")
    not_saved = spec.kind is InputKind.BUFFER and not spec.persistent
    is_constant = spec.kind is InputKind.CONSTANT_TENSOR or not_saved
    values = exported.constants if is_constant else exported.state_dict
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
    inputs = pytree.tree_leaves(exported.example_inputs)
    is_fake = any(isinstance(leaf, FakeTensor) for leaf in inputs)
    if lost is None and values and is_fake and all(map(_is_zero, values.values())):
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


def _is_zero(value: torch.Tensor) -> bool:
    """Tells whether all bytes of a storage are zero; reads no further than the first piece that is not."""
    raw = storage_bytes(value)
    return not any(bool(raw[start : start + _PIECE].any()) for start in range(0, len(raw), _PIECE))

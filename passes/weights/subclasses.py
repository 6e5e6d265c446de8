"""Replaces weights that are tensor subclasses by their parts, each of which is a plain weight of the program.

A quantised weight is one tensor for its module, but consists of several: data, scale, zero point.
`torch.export` keeps it whole in the state dict, and where the subclass computes on its parts, the graph asks
for the parts by name. Here each part becomes an input of its own, called `FQN.PART`, and the graph computes
what it computed before. If the graph does not show the operators of a subclass, the program is decomposed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import copy_graph_module
from penstock.passes.graph.propagation import fake_mode_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.pipeline import declare
from penstock.passes.weights.lifted import with_names, with_values
from penstock.schedule.facts.errors import PassError

PARTS = "penstock.parts"
"""The key in `graph_module.meta` that maps `FQN.PART`, for weights replaced here, to the pair (FQN, PART)."""

_ACCESS = "export::access_subclass_inner_tensor"


def has_parts(value: object) -> bool:
    """Tells whether a tensor is of a subclass that consists of several tensors, and names them."""
    return is_traceable_wrapper_subclass(value)


def flattened(value: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors of a subclass, in the order in which torch takes it apart."""
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        part: torch.Tensor = getattr(value, name)
        if has_parts(part):
            yield from flattened(part, f"{prefix}{name}.")
        else:
            yield prefix + name, part


def plain_tensors(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors that hold a tensor's bytes: itself under its name, or its parts as `NAME.PART`."""
    return (
        {f"{name}.{part}": tensor for part, tensor in flattened(value)} if has_parts(value) else {name: value}
    )


def each_part(value: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns `other(value)`; for a subclass, a tensor of that class with `other(part)` for each part."""
    if not has_parts(value):
        return other(value)
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: each_part(getattr(value, name), other) for name in names}
    kind: Any = type(value)
    joined: torch.Tensor = kind.__tensor_unflatten__(parts, context, value.shape, value.stride())
    return nn.Parameter(joined, value.requires_grad) if isinstance(value, nn.Parameter) else joined


@declare(requires=("real values", "computed buffers"), ensures=("plain parts",))
def with_plain_parts(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program with each tensor subclass among its weights replaced by its parts.

    A program without subclasses is returned as it is. Raises PassError, which names the weight and its class,
    if the graph does not show the parts and cannot be decomposed.
    """
    subclasses = _subclasses(exported)
    if not subclasses:
        return exported
    hidden = [name for name, subclass in subclasses.items() if not _is_open(subclass.node, subclass.parts)]
    return _decomposed(exported, subclasses, hidden[0]) if hidden else _opened(exported, subclasses)


def parts_of(exported: ExportedProgram) -> Mapping[str, tuple[str, str]]:
    """Returns the FQN and the part's name by the name that the part has in the program."""
    parts: Mapping[str, tuple[str, str]] = exported.graph_module.meta.get(PARTS, {})
    return parts


@dataclass(frozen=True)
class _Subclass:
    """A weight that is a tensor subclass: its input, and its parts by their names."""

    spec: InputSpec
    node: fx.Node
    value: torch.Tensor
    parts: Mapping[str, torch.Tensor]


def _subclasses(exported: ExportedProgram) -> dict[str, _Subclass]:
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    subclasses: dict[str, _Subclass] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or not isinstance(spec.target, str):
            continue
        value = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
        if has_parts(value):
            parts = dict(flattened(value))
            subclasses[spec.target] = _Subclass(spec, nodes[spec.arg.name], value, parts)
    return subclasses


def _is_open(node: fx.Node, parts: Container[str], path: str = "") -> bool:
    """Tells whether the graph uses a subclass only to ask for its parts, nested parts included."""
    for user in node.users:
        if not _is_access(user):
            return False
        name = f"{path}{user.args[1]}"
        if name not in parts and not _is_open(user, parts, f"{name}."):
            return False
    return True


def _is_access(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.name == _ACCESS


def _opened(exported: ExportedProgram, subclasses: Mapping[str, _Subclass]) -> ExportedProgram:
    """Returns the program whose graph has an input for each part, in place of nodes that ask for the part."""
    graph_module = copy_graph_module(exported.graph_module)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    specs: list[InputSpec] = []
    for spec in exported.graph_signature.input_specs:
        subclass = subclasses.get(str(spec.target)) if spec.kind is not InputKind.USER_INPUT else None
        if subclass is None:
            specs.append(spec)
            continue
        whole = nodes[subclass.node.name]
        inputs = {}
        for part, tensor in subclass.parts.items():
            with graph_module.graph.inserting_before(whole):
                inputs[part] = graph_module.graph.placeholder(f"{whole.name}_{part.replace('.', '_')}")
            inputs[part].meta["val"] = _fake(whole.meta["val"], tensor)
            name = f"{spec.target}.{part}"
            specs.append(InputSpec(spec.kind, TensorArgument(inputs[part].name), name, spec.persistent))
        _replace_accesses(whole, "", inputs)
        graph_module.graph.erase_node(whole)
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.meta[PARTS] = {
        f"{fqn}.{part}": (fqn, part) for fqn, subclass in subclasses.items() for part in subclass.parts
    }
    result = copy.copy(exported)
    result._graph_module = graph_module
    result._graph_signature = copy.copy(exported.graph_signature)
    result._graph_signature.input_specs = specs
    result._state_dict = _with_parts(exported.state_dict, subclasses)
    result._constants = _with_parts(exported.constants, subclasses)
    return result


def _replace_accesses(node: fx.Node, path: str, inputs: Mapping[str, fx.Node]) -> None:
    for user in list(node.users):
        name = f"{path}{user.args[1]}"
        if name in inputs:
            user.replace_all_uses_with(inputs[name])
        else:
            _replace_accesses(user, f"{name}.", inputs)
        user.graph.erase_node(user)


def _fake(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor for a part on the device of the whole, which is plain in a stored program."""
    with fake_mode_of([whole, *_inner(whole)]):
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=whole.device)


def _inner(whole: torch.Tensor) -> list[torch.Tensor]:
    return [part for _, part in flattened(whole)] if has_parts(whole) else []


def _with_parts(values: Mapping[str, Any], subclasses: Mapping[str, _Subclass]) -> dict[str, Any]:
    """Returns the values, each subclass replaced by its parts, which share its memory."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name in subclasses:
            wrap = isinstance(value, nn.Parameter)
            result |= {
                f"{name}.{part}": _plain(tensor, wrap) for part, tensor in subclasses[name].parts.items()
            }
        elif not has_parts(value):
            result[name] = value  # a subclass that is no input is another name of an input, and left out
    return result


def _plain(tensor: torch.Tensor, wrap: bool) -> torch.Tensor:
    if not wrap or isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)


@kept_torch_state()
def _decomposed(
    exported: ExportedProgram, subclasses: Mapping[str, _Subclass], hidden: str
) -> ExportedProgram:
    """The decomposed program, whose parts torch has named in the order of `flattened`."""
    name, kind = hidden, type(subclasses[hidden].value).__name__
    role = subclasses[hidden].spec.kind.name.lower()
    refusal = f"{role} {name!r} is a {kind}, whose parts the graph does not show"
    if exported.verifier.dialect != "TRAINING":
        raise PassError(f"{refusal}: give the program as torch.export.export returned it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # copying tree specs warns on some versions of torch
        try:
            opened = _with_plain_memory(exported, subclasses).run_decompositions({})
        except Exception as error:
            raise PassError(
                f"{refusal}, and torch cannot decompose the program "
                f"({type(error).__name__}: {sentence(error)}): dequantise this weight before the export"
            ) from error
    names = {}
    for fqn, subclass in subclasses.items():
        module, _, attribute = fqn.rpartition(".")
        stem = f"{module}{'.' * bool(module)}parametrizations.{attribute}.original"
        for number, (part, tensor) in enumerate(subclass.parts.items()):
            parametrized = f"{stem}{number}"
            value = opened.state_dict.get(parametrized)
            if value is None or (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
                raise PassError(f"{refusal}: dequantise this weight before the export")
            names[parametrized] = (fqn, part)
            opened.state_dict[parametrized] = _plain(tensor, isinstance(value, nn.Parameter))
    result = with_names(opened, {parametrized: ".".join(pair) for parametrized, pair in names.items()})
    result.graph_module.meta[PARTS] = {".".join(pair): pair for pair in names.values()}
    result._guards_code = getattr(exported, "_guards_code", [])  # decomposing forgets what export assumed
    return result


def _with_plain_memory(exported: ExportedProgram, subclasses: Mapping[str, _Subclass]) -> ExportedProgram:
    """Put untouched memory in place of fake parts, of which torch takes no subclass apart."""
    return with_values(exported, lambda fqn, old: each_part(old, _plain_memory) if fqn in subclasses else old)


def _plain_memory(part: torch.Tensor) -> torch.Tensor:
    if not isinstance(part, FakeTensor):
        return part
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)

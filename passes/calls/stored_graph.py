"""An FX graph as JSON, and back: the operators and arguments that are run, and nothing else.

`torch.export.load` takes about half a second for a thousand nodes, since it rebuilds all that export knew
of each node. A program that only runs needs operators and their arguments. `encode_graph` refuses every value
that has no form in JSON, so that a decoded graph equals the encoded one, and has the same names.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import ConstantLeaf, Dimension, NumberLeaf, TensorLeaf
from penstock.passes.graph import in_place
from penstock.passes.graph.retarget import TRANSFER, is_transfer
from penstock.schedule.facts.errors import PassError

_MODULES = {"builtins": builtins, "math": math, "_operator": operator, "torch": torch}
"""The modules from which functions that are no operators may come, by the functions' `__module__`."""

Bodies = dict[str, fx.GraphModule]
"""The bodies of control flow, by the names that the graph's `get_attr` nodes give them."""

_Nodes = Mapping[str, fx.Node]


def encode_graph(graph_module: fx.GraphModule) -> dict[str, Any]:
    """The graph of a module, the bodies of its control flow included, in plain JSON values.

    Raises PassError for a node or value that `decode_graph` could not make again.
    """
    if type(graph_module.graph._codegen) is not CodeGen:
        raise PassError("a graph that flattens its own arguments has no JSON")
    used = [str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"]
    bodies: Bodies = {}
    for name in used:
        body = getattr(graph_module, name, None)
        if not isinstance(body, fx.GraphModule):
            raise PassError(f"{name} is no body of control flow but a {type(body).__name__}: it has no JSON")
        bodies[name] = body
    return {
        "nodes": [_encode_node(node) for node in graph_module.graph.nodes],
        "bodies": {name: encode_graph(body) for name, body in bodies.items()},
    }


def check_operators(stored: Mapping[str, Any]) -> None:
    """Raises PassError where an operator of the stored graph is not registered in this process."""
    for name in _called(stored):
        _decode_target(name)
    for body in stored["bodies"].values():
        check_operators(body)


def decode_graph(stored: Mapping[str, Any]) -> tuple[fx.Graph, Bodies]:
    """A new graph, which no module owns yet, and the bodies that its `get_attr` nodes name.

    Raises PassError where an operator is not registered: the library that registers it must be imported
    first.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    functions = {name: _decode_target(name) for name in _called(stored)}
    for op, name, target, args, kwargs, *transfer in stored["nodes"]:
        made = graph.create_node(
            op,
            functions[target] if op == "call_function" else target,
            tuple(decode_value(arg, nodes) for arg in args),
            {key: decode_value(value, nodes) for key, value in kwargs.items()},
            name,
        )
        if name in nodes:
            raise PassError(f"the graph has two nodes {name!r}")
        made.name = name  # export may name a node like a builtin of Python, which FX itself would not
        if transfer:
            made.meta[TRANSFER] = True
        nodes[name] = made
    bodies = {name: decode_graph(body) for name, body in stored["bodies"].items()}
    return graph, {name: fx.GraphModule(inner, body) for name, (body, inner) in bodies.items()}


def _called(stored: Mapping[str, Any]) -> set[str]:
    return {target for op, _, target, *_ in stored["nodes"] if op == "call_function"}


def _encode_node(node: fx.Node) -> list[Any]:
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise PassError(f"node {node.name} is a {node.op}: it has no JSON")
    target = _encode_target(node.target) if node.op == "call_function" else str(node.target)
    kwargs = {name: encode_value(value) for name, value in node.kwargs.items()}
    encoded = [node.op, node.name, target, [encode_value(arg) for arg in node.args], kwargs]
    return [*encoded, True] if is_transfer(node) else encoded


def _encode_target(target: Any) -> str:
    """The stored name of an operator: its name under `torch.ops`, or `MODULE:NAME` of another function."""
    if isinstance(target, OpOverload):
        name = f"{target.namespace}.{target._opname}.{target._overloadname}"
    elif isinstance(target, HigherOrderOperator):
        name = f"higher_order.{target.__name__}"
    else:
        name = f"{getattr(target, '__module__', '')}:{getattr(target, '__name__', '')}"
    try:
        found = _decode_target(name)
    except PassError:
        found = None
    if found is not target:
        raise PassError(f"{target} is no operator that has a name: it has no JSON")
    return name


def _decode_target(name: str) -> Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    found: Any = _MODULES.get(module) if colon else torch.ops
    namespace, *rest = name.split(".")
    if namespace == in_place.NAMESPACE and len(rest) == 2:
        in_place.named(*rest)  # declared when it is first asked for
    try:
        for part in attribute.split(".") if colon else name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError) as error:
        raise PassError(f"there is no operator {name}: import what registers it first") from error
    function: Callable[..., Any] = found
    return function


def encode_value(value: Any) -> Any:
    """A value as JSON: the value itself, a list, or an object with one key, which names the kind of value.

    Raises PassError for a value of a kind that is not in `_KINDS`.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [encode_value(one) for one in value]
    for name, kind in _KINDS.items():
        if isinstance(value, kind.type):
            return {name: kind.encode(value)}
    raise PassError(f"{value!r} of type {type(value).__name__} has no JSON")


def decode_value(value: Any, nodes: _Nodes = MappingProxyType({})) -> Any:
    """The value that `encode_value` was given; `nodes` has the nodes that are named in it."""
    if isinstance(value, list):
        return [decode_value(one, nodes) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    return _KINDS[name].decode(content, nodes)


@dataclass(frozen=True)
class _Kind:
    """The functions that turn values of a type into JSON, and back."""

    type: type | tuple[type, ...]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, _Nodes], Any]


def _encode_items(value: dict[Any, Any]) -> list[Any]:
    return [[encode_value(key), encode_value(one)] for key, one in value.items()]


def _decode_items(content: Any, nodes: _Nodes) -> dict[Any, Any]:
    return {decode_value(key, nodes): decode_value(one, nodes) for key, one in content}


def _encode_slice(value: slice) -> list[Any]:
    return [encode_value(one) for one in (value.start, value.stop, value.step)]


def _named(kind: type) -> _Kind:
    """The kind of a type whose values are attributes of torch, such as dtypes."""
    return _Kind(kind, lambda v: str(v).removeprefix("torch."), lambda name, _: getattr(torch, name))


def _record(kind: type) -> _Kind:
    """The kind of a dataclass, which is stored as the values of its fields in order."""
    names = [field.name for field in fields(kind)]
    return _Kind(
        kind,
        lambda record: [encode_value(getattr(record, name)) for name in names],
        lambda content, nodes: kind(*(decode_value(one, nodes) for one in content)),
    )


_KINDS = {
    "node": _Kind(fx.Node, lambda node: node.name, lambda name, nodes: nodes[name]),
    "float": _Kind(float, repr, lambda text, _: float(text)),
    "tuple": _Kind(tuple, lambda v: list(map(encode_value, v)), lambda v, n: tuple(decode_value(v, n))),
    "slice": _Kind(slice, _encode_slice, lambda v, n: slice(*decode_value(v, n))),
    "dict": _Kind(dict, _encode_items, _decode_items),
    "operator": _Kind(
        (OpOverload, HigherOrderOperator, type), _encode_target, lambda name, _: _decode_target(name)
    ),
    "device": _Kind(torch.device, str, lambda text, _: torch.device(text)),
    "dtype": _named(torch.dtype),
    "layout": _named(torch.layout),
    "memory_format": _named(torch.memory_format),
    "tree": _Kind(pytree.TreeSpec, pytree.treespec_dumps, lambda text, _: pytree.treespec_loads(text)),
    **{one.__name__: _record(one) for one in (Dimension, TensorLeaf, NumberLeaf, ConstantLeaf)},
}
"""The kinds of values by their keys in JSON. Subclasses of tuple and dict come back as tuple and dict."""

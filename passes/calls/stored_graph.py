"""An FX graph as JSON, and back: the operators and arguments that are run, and nothing else.

`torch.export.load` takes about half a second for a thousand nodes, since it rebuilds all that export knew
of each node. A program that only runs needs operators and their arguments. `encode_graph` refuses every value
that has no form in JSON, so that a decoded graph equals the encoded one, and has the same names.

JSON may be a stranger's, and is a language of its own: FX writes names of nodes and arguments into Python
code that it runs, so they are identifiers here; operators come from a list (`operators.py`), structures of
values from classes that are registered (`trees.py`), and constants are decoded by their types.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import ConstantLeaf, Dimension, NumberLeaf, TensorLeaf
from penstock.passes.calls.operators import name_of, operator_of
from penstock.passes.calls.records import checked, refuse
from penstock.passes.calls.trees import decode_tree, encode_tree
from penstock.passes.graph.retarget import TRANSFER, is_transfer
from penstock.schedule.facts.errors import PassError
from penstock.schedule.payload.text import short

Bodies = dict[str, fx.GraphModule]
"""The bodies of control flow, by the names that the graph's `get_attr` nodes give them."""


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


def check_operators(stored: Any, *, trust: bool) -> None:
    """Raises PassError for a stored graph with an operator that is not registered, or not for everybody.

    `operators.operator_of` says which are.
    """
    for name in operators_in(stored):
        operator_of(name, trust=trust)


def operators_in(stored: Any) -> set[str]:
    """The names of the operators of a stored graph and its bodies. Raises PassError for JSON that is none."""
    called = _called(_checked_nodes(stored))
    return called.union(*(operators_in(body) for body in stored["bodies"].values()))


def decode_graph(stored: Any, *, trust: bool = False) -> tuple[fx.Graph, Bodies]:
    """A new graph, which no module owns yet, and the bodies that its `get_attr` nodes name.

    Raises PassError for JSON that is no graph, and for an operator that is not registered, as the library
    that registers it must be imported first, or that not everybody may call: only a graph of somebody whom
    its reader trusts may have any.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    rows = _checked_nodes(stored)
    functions = {name: operator_of(name, trust=trust) for name in _called(rows)}
    values = Values(nodes, trust)
    for op, name, target, args, kwargs, *transfer in rows:
        if name in nodes:
            raise PassError(f"the graph has two nodes {name!r}")
        if op == "get_attr" and target not in stored["bodies"]:
            raise PassError(f"node {name} is the body {target}, which the graph does not have: compile again")
        node = graph.create_node(
            op,
            functions[target] if op == "call_function" else target,
            tuple(decode_value(arg, values) for arg in args),
            {key: decode_value(value, values) for key, value in kwargs.items()},
            name,
        )
        node.name = name  # export may name a node like a builtin of Python, which FX itself would not
        if transfer:
            node.meta[TRANSFER] = True
        nodes[name] = node
    bodies = {name: decode_graph(body, trust=trust) for name, body in stored["bodies"].items()}
    return graph, {name: fx.GraphModule(inner, body) for name, (body, inner) in bodies.items()}


_RESERVED = frozenset((*keyword.kwlist, "self", "torch"))
"""Names that mean something else in the code that FX writes."""


def _checked_nodes(stored: Any) -> list[list[Any]]:
    """The nodes of a stored graph. Raises PassError where they could not be written as they are as Python."""
    if not isinstance(stored, dict) or stored.keys() != {"nodes", "bodies"}:
        refuse(stored, "graph")
    rows, bodies = stored["nodes"], stored["bodies"]
    if not isinstance(rows, list) or not isinstance(bodies, dict):
        refuse(stored, "graph")
    _check_names(bodies)
    behind = "placeholder"
    for row in rows:
        if not isinstance(row, list) or len(row) not in (5, 6) or not isinstance(row[2], str):
            refuse(row, "node of a graph")
        op, name, target, args, kwargs, *transfer = row
        if not isinstance(args, list) or not isinstance(kwargs, dict) or transfer not in ([], [True]):
            refuse(row, "node of a graph")
        _check_names((name, *(() if op == "call_function" else (target,))))
        _check_names(kwargs.keys() - {"self"})
        if op not in _OPS or _OPS[op] < _OPS[behind] or (op != "call_function" and (args[1:] or kwargs)):
            raise PassError(f"node {name} is a {short(op)} behind a {behind}: compile again")
        if (op == "placeholder" and args) or (op == "output") != (row is rows[-1]):
            raise PassError(f"node {name} is a {op}, which cannot be where it is: compile again")
        behind = op
    inputs = [row[2] for row in rows if row[0] == "placeholder"]
    if behind != "output" or len(set(inputs)) < len(inputs):
        raise PassError("the graph has no output, or an input twice: compile again")
    return rows


_OPS = {"placeholder": 0, "get_attr": 1, "call_function": 1, "output": 2}
"""The kinds of nodes, and in which part of a graph they stand."""


def _check_names(names: Collection[Any]) -> None:
    """Raises PassError unless each is a name that Python code can have for a value."""
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or name in _RESERVED:
            refuse(name, "name of a value")


def _called(rows: list[list[Any]]) -> set[str]:
    return {target for op, _, target, *_ in rows if op == "call_function"}


def _encode_node(node: fx.Node) -> list[Any]:
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise PassError(f"node {node.name} is a {node.op}: it has no JSON")
    target = name_of(node.target) if node.op == "call_function" else str(node.target)
    kwargs = {name: encode_value(value) for name, value in node.kwargs.items()}
    encoded = [node.op, node.name, target, [encode_value(arg) for arg in node.args], kwargs]
    return [*encoded, True] if is_transfer(node) else encoded


def encode_value(value: Any) -> Any:
    """A value as JSON: the value itself, a list, or an object with one key, which names the kind of value.

    Raises PassError for a value of a kind that is not in `_KINDS`.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [encode_value(element) for element in value]
    for name, kind in _KINDS.items():
        if isinstance(value, kind.type):
            return {name: kind.encode(value)}
    raise PassError(f"{value!r} of type {type(value).__name__} has no JSON")


@dataclass(frozen=True)
class Values:
    """What decoded values may name: nodes, and any operator of this process if who stored them is trusted.

    Those in a graph have the nodes before them; None stands for values elsewhere.
    """

    nodes: Mapping[str, fx.Node] | None
    trust: bool

    def node(self, name: object) -> fx.Node:
        """A node by name. Raises PassError where there is none before this one."""
        node = self.nodes.get(name) if self.nodes and isinstance(name, str) else None
        if node is None:
            refuse(name, "node before this one")
        return node


_NOTHING = Values(None, trust=False)


def decode_value(value: Any, values: Values = _NOTHING) -> Any:
    """The value that `encode_value` was given. Raises PassError for JSON that is none."""
    if isinstance(value, list):
        return [decode_value(element, values) for element in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or name not in (_KINDS if values.nodes is None else _IN_GRAPHS):
        refuse(value, "value")
    try:
        return _KINDS[name].decode(content, values)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PassError(f"{short(content)} is no {name} ({short(str(error))}): compile again") from None


@dataclass(frozen=True)
class _Kind:
    """The functions that turn values of a type into JSON, and back."""

    type: type | tuple[type, ...]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Values], Any]


def _encode_items(value: dict[Any, Any]) -> list[Any]:
    return [[encode_value(key), encode_value(element)] for key, element in value.items()]


def _decode_items(content: Any, values: Values) -> dict[Any, Any]:
    if not all(isinstance(key, str | int | None) for key, _ in content):
        refuse(content, "dictionary of names or numbers")
    return {key: decode_value(element, values) for key, element in content}


def _encode_slice(value: slice) -> list[Any]:
    return [encode_value(part) for part in (value.start, value.stop, value.step)]


def _decode_slice(content: Any, values: Values) -> slice:
    start, stop, step = decode_value(content, values)
    return slice(start, stop, step)


def _named(kind: type) -> _Kind:
    """The kind of a type whose values are attributes of torch, such as dtypes."""

    def decode(name: Any, _: Values) -> Any:
        value = vars(torch).get(name)
        if not isinstance(value, kind):
            refuse(name, f"{kind.__name__} of torch")
        return value

    return _Kind(kind, lambda value: str(value).removeprefix("torch."), decode)


def _record(kind: type) -> _Kind:
    """The kind of a dataclass, which is stored as the values of its fields in order."""
    names = [field.name for field in fields(kind)]

    def decode(content: Any, values: Values) -> Any:
        decoded = [decode_value(element, values) for element in content]
        return checked(kind(*decoded))

    return _Kind(kind, lambda record: [encode_value(getattr(record, name)) for name in names], decode)


_KINDS = {
    "node": _Kind(fx.Node, lambda node: node.name, lambda name, values: values.node(name)),
    "float": _Kind(float, repr, lambda text, _: float(text)),
    "tuple": _Kind(tuple, lambda v: list(map(encode_value, v)), lambda v, n: tuple(decode_value(v, n))),
    "slice": _Kind(slice, _encode_slice, _decode_slice),
    "dict": _Kind(dict, _encode_items, _decode_items),
    "operator": _Kind(
        (OpOverload, HigherOrderOperator, type),
        name_of,
        lambda name, values: operator_of(name, trust=values.trust),
    ),
    "device": _Kind(torch.device, str, lambda text, _: torch.device(str(text))),
    "dtype": _named(torch.dtype),
    "layout": _named(torch.layout),
    "memory_format": _named(torch.memory_format),
    "tree": _Kind(pytree.TreeSpec, encode_tree, lambda text, values: decode_tree(text, trust=values.trust)),
    **{kind.__name__: _record(kind) for kind in (Dimension, TensorLeaf, NumberLeaf, ConstantLeaf)},
}
"""The kinds of values by their keys in JSON. Subclasses of tuple and dict come back as tuple and dict."""

_IN_GRAPHS = (
    _KINDS.keys() - {kind.__name__ for kind in (Dimension, TensorLeaf, NumberLeaf, ConstantLeaf)} - {"tree"}
)
"""The kinds of values that operators take: FX writes all of them as Python."""

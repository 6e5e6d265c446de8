"""The use of storages: which nodes of a program read which storage, through any chain of aliases.

A node *reads* a storage if one of its inputs aliases the storage and the node is more than a view.
A storage is *mutable* if the program writes to it, and *returned* if an output may alias it; neither
may be streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import (
    CALLS,
    called,
    is_opaque,
    passed_by_name,
    placeholders_of,
    subgraphs_of,
    tensors_of,
    written_values,
)
from penstock.passes.graph.propagation import WRITTEN, fake_inputs, propagate, storages_of
from penstock.passes.weights.lifted import Weights
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Kind

aten = torch.ops.aten

METADATA_ONLY = frozenset(
    getattr(packet, overload)
    for name in (
        "_assert_tensor_metadata",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    )
    if (packet := getattr(aten, name, None)) is not None  # not all are in every version of torch
    for overload in packet.overloads()
)
"""Operators that use a tensor's sizes and never its values."""

_FUNCTIONAL = (
    "auto_functionalized",
    "auto_functionalized_v2",
    "executorch_call_delegate",
    "inline_asm_elementwise",
    "out_dtype",
    "print",
    "triton_kernel_wrapper_functional",
)
"""The operators of higher order without bodies that write nothing."""


@dataclass(frozen=True)
class Usage:
    """The use that a program makes of its weights.

    `graph_module` is the program's graph, propagated: a copy, or itself. `reads[name]` are the storages that
    the node `name` reads, in ascending order. `kinds[s]` is the kind of storage s.
    """

    graph_module: fx.GraphModule
    reads: dict[str, tuple[int, ...]]
    kinds: tuple[Kind, ...]


def find_usage(exported: ExportedProgram, weights: Weights, *, propagated: bool = False) -> Usage:
    """Follows every weight through the raw graph of an exported program.

    A graph that is `propagated` has the values that `propagate` would give it, and is not copied.

    Mutable storages are those passed, through any alias, to an argument that a schema says is written; and,
    in a decomposed program, those that its signature says it writes back. Raises PassError for a weight that
    a function without a schema takes, which may write it.
    """
    written_back = _written_back(exported, weights)
    return usage_of(exported.graph_module, weights, written_back, propagated=propagated)


def usage_of(
    graph_module: fx.GraphModule,
    weights: Weights,
    written_back: Collection[int] = (),
    *,
    propagated: bool = False,
) -> Usage:
    """Does what `find_usage` does for a graph by itself; `written_back` are mutable, whatever the graph does.

    Nodes may call graph modules, such as regions that a partitioner has fused.
    """
    graph_module, flow = follow_weights(graph_module, weights, propagated=propagated)
    mutable = flow.written.union(written_back)
    _refuse_unknown({s: node for s, node in flow.unknown.items() if s not in written_back}, weights)
    kinds: list[Kind] = []
    for index in range(len(weights.storages)):
        kinds.append(
            "mutable" if index in mutable else "returned" if index in flow.escaping else "streamable"
        )
    return Usage(graph_module, flow.reads, tuple(kinds))


def follow_weights(
    graph_module: fx.GraphModule, weights: Weights, *, propagated: bool = False
) -> tuple[fx.GraphModule, Flow]:
    """A propagated copy of a graph (itself if it is `propagated`), and the flow of its weights."""
    propagated_graph = (
        graph_module if propagated else propagate(graph_module, fake_inputs(graph_module, weights))
    )
    aliases = {
        storages_of(node.meta["val"])[0]: weights.storage_of(before.name)
        for before, node in zip(
            placeholders_of(graph_module.graph), placeholders_of(propagated_graph.graph), strict=True
        )
        if before.name in weights.held
    }
    return propagated_graph, follow(propagated_graph.graph, aliases)


@dataclass(frozen=True)
class Flow:
    """The followed storages: those that each node reads, those written, and those an output may alias.

    `unknown` has the storages that are not written for certain, and that a callable takes of which nothing
    says what it writes; each with the first node that calls one. If it is an operator, they count as written.
    """

    reads: dict[str, tuple[int, ...]]
    written: frozenset[int]
    escaping: frozenset[int]
    unknown: Mapping[int, fx.Node]


Run = Callable[[fx.GraphModule, Sequence[object]], fx.GraphModule]
"""A function that runs a graph module on fake inputs, as `propagate` does, and returns it with its values."""


def follow(graph: fx.Graph, aliases: dict[int, int], run: Run = propagate) -> Flow:
    """Follow storages, numbered by `aliases`, through a propagated graph; `run` propagates bodies."""
    aliases = dict(aliases)
    reads: dict[str, tuple[int, ...]] = {}
    written: set[int] = set()
    escaping: set[int] = set()
    unknown: dict[int, fx.Node] = {}
    certain: set[int] = set()
    for node in graph.nodes:
        touched = _touched(node.all_input_nodes, aliases)
        if not touched or node.op == "get_attr":
            continue
        if node.op == "output":
            escaping |= touched
        elif is_opaque(node):
            reads[node.name] = tuple(sorted(touched))
            unknown = dict.fromkeys(touched, node) | unknown
        elif isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            reads[node.name] = tuple(sorted(touched))
            inner = _follow_operands(node, aliases, run)
            written |= inner.written
            certain |= inner.written.difference(inner.unknown)
            unknown = {**inner.unknown, **unknown}
            # What a called graph module returns was seen when it ran on fakes.
            escaping |= inner.escaping if node.op == "call_function" else frozenset()
        elif not is_view(node):
            reads[node.name] = tuple(sorted(touched))
            certain |= _written_by(node, aliases)
            hidden = _touched(_possibly_returned(node), aliases)
            escaping |= hidden if len(hidden) > 1 else set()
            for storage in storages_of(node.meta.get("val")) if hidden else ():
                aliases.setdefault(storage, min(hidden))
    unknown = {s: node for s, node in unknown.items() if s not in certain}
    return Flow(reads, frozenset(written | certain), frozenset(escaping), unknown)


def is_view(node: fx.Node) -> bool:
    """Tells whether a node of a propagated graph computes nothing: its outputs alias its inputs."""
    if node.op == "call_module":
        return False
    if node.op not in CALLS or node.target in METADATA_ONLY:
        return True
    if isinstance(node.target, HigherOrderOperator) or node.meta.get(WRITTEN) or any(_written_nodes(node)):
        return False
    value = node.meta.get("val")
    outputs = storages_of(value)
    if not outputs:
        return not any(storages_of(operand.meta.get("val")) for operand in node.all_input_nodes)
    inputs = {name for operand in node.all_input_nodes for name in storages_of(operand.meta.get("val"))}
    return inputs.issuperset(outputs)


def _touched(arguments: Iterable[object], aliases: dict[int, int]) -> set[int]:
    """Returns the numbers of the followed storages that the values of the nodes among arguments alias."""
    nodes = (argument for argument in arguments if isinstance(argument, fx.Node))
    names = (name for node in nodes for name in storages_of(node.meta.get("val")))
    return {aliases[name] for name in names if name in aliases}


def _written_by(node: fx.Node, aliases: dict[int, int]) -> set[int]:
    observed = (aliases[name] for name in node.meta.get(WRITTEN, ()) if name in aliases)
    return _touched(_written_nodes(node), aliases).union(observed)


def _written_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes passed to arguments that the operator writes by its schema."""
    if isinstance(node.target, OpOverload):
        values = written_values(node.target, node.args, node.kwargs)
        yield from (value for value in values if isinstance(value, fx.Node))


def outs_of(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes passed to arguments that the operator only fills: `out=`."""
    if not isinstance(node.target, OpOverload):
        return set()
    passed = passed_by_name(node.target, node.args, node.kwargs)
    outs = [passed.get(argument.name) for argument in node.target._schema.arguments if argument.is_out]
    return {value for value in pytree.tree_leaves(outs) if isinstance(value, fx.Node)}


def _refuse_unknown(unknown: Mapping[int, fx.Node], weights: Weights) -> None:
    """Raises PassError for weights of which nothing says whether a callable writes them."""
    if not unknown:
        return
    node = next(iter(unknown.values()))
    taken = (weight.fqn for weight in weights.held.values() if unknown.get(weight.parts[0].storage) is node)
    raise PassError(
        f"node {node.name!r} passes {', '.join(map(repr, sorted(taken)))} to {called(node)}, which has no "
        "schema that says whether it writes a weight: register it as an operator "
        "(torch.library.custom_op), or replace it by operators of torch before the program is annotated"
    )


def _possibly_returned(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes with which the result may share memory by its schema, if fake tensors cannot tell.

    The fake of a custom operator need not have the operator's aliases, and whether `contiguous` copies may
    depend on a size that only a run knows. For all other operators the fakes are right, and the schema
    names more aliases than there are.
    """
    if not isinstance(node.target, OpOverload):
        return
    schema, passed = node.target._schema, passed_by_name(node.target, node.args, node.kwargs)
    has_unknown_size = any(map(free_unbacked_symbols, tensors_of(node.meta.get("val"))))
    if node.target.namespace == "aten" and not has_unknown_size:
        return
    returned = {name for value in schema.returns if value.alias_info for name in value.alias_info.before_set}
    for argument in schema.arguments:
        if argument.alias_info is not None and not returned.isdisjoint(argument.alias_info.before_set):
            yield from (n for n in pytree.tree_leaves(passed.get(argument.name)) if isinstance(n, fx.Node))


def _follow_operands(node: fx.Node, aliases: dict[int, int], run: Run) -> Flow:
    """Follows operands into the bodies of control flow, or into a graph module that the node calls.

    Operands stand in the order of a body's inputs, behind the arguments of the operator itself. In doubt,
    storages count as written and escaping.
    """
    bodies = subgraphs_of(node)
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if not (isinstance(leaf, fx.Node) and leaf.op == "get_attr")]
    everything = frozenset(_touched(operands, aliases))
    unknown = Flow({}, everything, everything, dict.fromkeys(everything, node))
    if not bodies and (values := _written_through(node)) is not None:
        return Flow({}, frozenset(_touched(values, aliases)), frozenset(), {})
    if not bodies:
        return unknown
    written: set[int] = set()
    unsure: dict[int, fx.Node] = {}
    # A loop that runs no round returns the operands that it carries.
    escaping = _touched(pytree.tree_leaves(_carried(node)), aliases)
    for body in bodies:
        inputs = placeholders_of(body.graph)
        values = [placeholder.meta.get("val") for placeholder in inputs]
        if len(inputs) > len(operands) or any(value is None for value in values):
            return unknown
        inner_aliases: dict[int, int] = {}
        by_number: dict[int, set[int]] = {}
        fakes = fake_inputs(body)
        for number, (operand, fake) in enumerate(
            zip(operands[len(operands) - len(inputs) :], fakes, strict=True)
        ):
            by_number[number] = _touched([operand], aliases)
            inner_aliases |= dict.fromkeys(storages_of(fake), number)
        inner = follow(run(body, fakes).graph, inner_aliases, run)
        written.update(*(by_number[number] for number in inner.written))
        escaping.update(*(by_number[number] for number in inner.escaping))
        unsure |= {s: source for number, source in inner.unknown.items() for s in by_number[number]}
    return Flow({}, frozenset(written), frozenset(escaping), unsure)


def _written_through(node: fx.Node) -> list[object] | None:
    """What an operator without a body writes; None if nothing says it."""
    if str(getattr(node.target, "__name__", "")) in _FUNCTIONAL:
        return []
    for position, argument in enumerate(node.args):
        if isinstance(argument, OpOverload):
            return list(written_values(argument, node.args[position + 1 :], node.kwargs))
    return None


def _carried(node: fx.Node) -> object:
    """Returns the operands that a loop carries from round to round."""
    if node.target is torch.ops.higher_order.while_loop:
        return node.args[2]
    if node.target is torch.ops.higher_order.scan:
        return node.args[1]
    return ()


def _written_back(exported: ExportedProgram, weights: Weights) -> set[int]:
    """Returns the storages that a decomposed program writes back when it ends, which its signature lists."""
    signature = exported.graph_signature
    parameters = getattr(signature, "parameters_to_mutate", {})  # not in every version of torch
    names = {*signature.buffers_to_mutate.values(), *parameters.values()}
    return {weight.parts[0].storage for weight in weights.held.values() if weight.fqn in names}

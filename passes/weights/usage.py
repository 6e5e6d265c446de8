"""Which nodes of a program read which storage, through any chain of aliases.

A node *reads* a storage when one of its inputs aliases it and the node is more than a view.
A storage is *mutable* when the program writes to it, *returned* when an output may alias it; neither
may be streamed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import placeholders_of, subgraphs_of, tensors_of
from penstock.passes.graph.propagation import fake_inputs, fake_mode_of, propagate, storages_of
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.values import with_values
from penstock.schedule.facts.model import Kind

aten = torch.ops.aten
_log = logging.getLogger(__name__)

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
"""Operators that look at a tensor's sizes and never at its values."""


@dataclass(frozen=True)
class Usage:
    """What a program does with its weights.

    `graph_module` is a copy of the program's graph, propagated. `reads[node name]` are the storages
    that the node reads, ascending. `kinds[s]` is the kind of storage s.
    """

    graph_module: fx.GraphModule
    reads: dict[str, tuple[int, ...]]
    kinds: tuple[Kind, ...]


def find_usage(exported: ExportedProgram, weights: Weights) -> Usage:
    """Follows every weight through the raw graph of an exported program.

    Mutable storages are those that the decomposed program writes back, and those passed, through
    any alias, to an argument that a schema says is written.
    """
    graph_module, flow = follow_weights(exported.graph_module, weights)
    mutable = flow.written | _written_back(exported, weights)
    kinds: list[Kind] = []
    for index in range(len(weights.storages)):
        kinds.append(
            "mutable" if index in mutable else "returned" if index in flow.escaping else "streamable"
        )
    return Usage(graph_module, flow.reads, tuple(kinds))


def follow_weights(graph_module: fx.GraphModule, weights: Weights) -> tuple[fx.GraphModule, Flow]:
    """Returns a propagated copy of a graph, and what becomes in it of the weights among its inputs."""
    inputs = fake_inputs(graph_module, weights)
    aliases = {
        storages_of(value)[0]: weights.storage_of(node.name)
        for node, value in zip(placeholders_of(graph_module.graph), inputs, strict=True)
        if node.name in weights.held
    }
    propagated = propagate(graph_module, inputs)
    return propagated, follow(propagated, aliases)


@dataclass(frozen=True)
class Flow:
    """Of the followed storages: who reads them, which are written, which an output may alias."""

    reads: dict[str, tuple[int, ...]]
    written: frozenset[int]
    escaping: frozenset[int]


def follow(graph_module: fx.GraphModule, aliases: dict[int, int]) -> Flow:
    """Follows storages through a propagated graph; `aliases` maps a fake storage to its number."""
    aliases = dict(aliases)
    reads: dict[str, tuple[int, ...]] = {}
    written: set[int] = set()
    escaping: set[int] = set()
    for node in graph_module.graph.nodes:
        touched = _touched(node.all_input_nodes, aliases)
        if not touched or node.op == "get_attr":
            continue
        if node.op == "output":
            escaping |= touched
        elif isinstance(node.target, HigherOrderOperator):
            reads[node.name] = tuple(sorted(touched))
            inner = _follow_operands(node, aliases)
            written |= inner.written
            escaping |= inner.escaping
        elif not is_view(node):
            reads[node.name] = tuple(sorted(touched))
            written |= _touched(_written_arguments(node), aliases)
            hidden = _touched(_possibly_returned(node), aliases)
            escaping |= hidden if len(hidden) > 1 else set()
            for storage in storages_of(node.meta.get("val")) if hidden else ():
                aliases.setdefault(storage, min(hidden))
    return Flow(reads, frozenset(written), frozenset(escaping))


def is_view(node: fx.Node) -> bool:
    """Tells whether a node of a propagated graph computes nothing: its outputs alias its inputs."""
    if node.op != "call_function" or node.target in METADATA_ONLY:
        return True
    if isinstance(node.target, HigherOrderOperator) or any(_written_arguments(node)):
        return False
    value = node.meta.get("val")
    outputs = storages_of(value)
    if not outputs:
        return not any(storages_of(operand.meta.get("val")) for operand in node.all_input_nodes)
    inputs = {name for operand in node.all_input_nodes for name in storages_of(operand.meta.get("val"))}
    return inputs.issuperset(outputs)


def _touched(arguments: Iterable[object], aliases: dict[int, int]) -> set[int]:
    """Returns the numbers of the followed storages that the values of the nodes among arguments alias."""
    nodes = (one for one in arguments if isinstance(one, fx.Node))
    names = (name for node in nodes for name in storages_of(node.meta.get("val")))
    return {aliases[name] for name in names if name in aliases}


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes passed to arguments that the operator writes.

    Those that its schema marks; and running statistics, which batch and instance norm write in
    training without saying so.
    """
    if not isinstance(node.target, OpOverload):
        return
    arguments, passed = node.target._schema.arguments, _passed(node, node.target)
    trains = passed.get("training", passed.get("train", passed.get("use_input_stats"))) is True
    for argument in arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (trains and argument.name in {"running_mean", "running_var"}):
            yield from (n for n in pytree.tree_leaves(passed.get(argument.name)) if isinstance(n, fx.Node))


def _possibly_returned(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that a schema says the result may share memory with, where fakes cannot tell.

    A custom operator's fake need not alias what the operator does; and whether `contiguous` copies may
    hang on a size that only a run knows. For all others the fakes are right, and the schema is too wide.
    """
    if not isinstance(node.target, OpOverload):
        return
    schema, passed = node.target._schema, _passed(node, node.target)
    if node.target.namespace == "aten" and not _has_unknown_size(node.meta.get("val")):
        return
    returned = {name for value in schema.returns if value.alias_info for name in value.alias_info.before_set}
    for argument in schema.arguments:
        if argument.alias_info is not None and not returned.isdisjoint(argument.alias_info.before_set):
            yield from (n for n in pytree.tree_leaves(passed.get(argument.name)) if isinstance(n, fx.Node))


def _has_unknown_size(value: object) -> bool:
    return any(free_unbacked_symbols(tensor) for tensor in tensors_of(value))


def _passed(node: fx.Node, operator: OpOverload) -> dict[str, Any]:
    """Returns what a node passes to each argument."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _follow_operands(node: fx.Node, aliases: dict[int, int]) -> Flow:
    """Follows what control flow is given into its bodies, erring towards "written" and "escaping".

    Operands stand in the order of a body's inputs, behind what belongs to the operator itself.
    """
    bodies = subgraphs_of(node)
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if not (isinstance(leaf, fx.Node) and leaf.op == "get_attr")]
    everything = frozenset(_touched(operands, aliases))
    if not bodies:  # nothing to look into: a kernel of its own may do anything
        return Flow({}, everything, everything)
    written: set[int] = set()
    # A loop that runs no round hands back what it was given to carry.
    escaping = _touched(pytree.tree_leaves(_carried(node)), aliases)
    for body in bodies:
        inputs = placeholders_of(body.graph)
        values = [entry.meta.get("val") for entry in inputs]
        if len(inputs) > len(operands) or any(value is None for value in values):
            return Flow({}, everything, everything)
        inner_aliases: dict[int, int] = {}
        by_number: dict[int, set[int]] = {}
        fakes = fake_inputs(body)
        for number, (operand, fake) in enumerate(
            zip(operands[len(operands) - len(inputs) :], fakes, strict=True)
        ):
            by_number[number] = _touched([operand], aliases)
            inner_aliases |= dict.fromkeys(storages_of(fake), number)
        inner = follow(propagate(body, fakes), inner_aliases)
        written.update(*(by_number[number] for number in inner.written))
        escaping.update(*(by_number[number] for number in inner.escaping))
    return Flow({}, frozenset(written), frozenset(escaping))


def _carried(node: fx.Node) -> object:
    """Returns the operands that a loop carries from round to round."""
    if node.target is torch.ops.higher_order.while_loop:
        return node.args[2]
    if node.target is torch.ops.higher_order.scan:
        return node.args[1]
    return ()


def _written_back(exported: ExportedProgram, weights: Weights) -> set[int]:
    """Returns the storages that the decomposed program writes back; the raw program does not list them.

    A program that torch cannot decompose may write every weight that it takes. Its weights then always stay
    in memory, and the log says why, at level INFO.
    """
    if exported.verifier.dialect == "TRAINING":
        if not _may_write(exported.graph_module):
            return set()  # decomposing takes longer than all the rest
        with warnings.catch_warnings():
            # Copying tree specs warns on some versions of torch, whoever does it.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                exported = _over_fakes(exported, weights).run_decompositions({})
            except Exception as error:
                _log.info(
                    "torch cannot decompose a program that may write to its weights (%s: %s), so all of them "
                    "count as mutable and stay in memory",
                    type(error).__name__,
                    error,
                )
                return {weight.parts[0].storage for weight in weights.held.values()}
    signature = exported.graph_signature
    parameters = getattr(signature, "parameters_to_mutate", {})  # not in every version of torch
    names = {*signature.buffers_to_mutate.values(), *parameters.values()}
    return {weight.parts[0].storage for weight in weights.held.values() if weight.fqn in names}


def _over_fakes(exported: ExportedProgram, weights: Weights) -> ExportedProgram:
    """Returns the program over a fake tensor of its own for each weight, on the device it was exported for.

    torch cannot decompose a program that writes to one of several tensors of a storage, nor one whose values
    lie on another device.
    """
    devices = {weight.fqn: weight.device for weight in weights.held.values()}

    def fake(name: str, old: Any) -> Any:
        if name not in devices:
            return old
        return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=devices[name])

    with fake_mode_of([node.meta.get("val") for node in placeholders_of(exported.graph)]):
        return with_values(exported, fake)


def _may_write(graph_module: fx.GraphModule) -> bool:
    """Tells whether a graph has more than arithmetic of sizes, operators whose schemas say that they write
    nothing, and control flow whose bodies have no more than that."""
    for node in graph_module.graph.nodes:
        target = node.target
        if node.op != "call_function" or target is aten.detach_.default:
            continue
        if isinstance(target, HigherOrderOperator):
            bodies = subgraphs_of(node)
            if not bodies or any(map(_may_write, bodies)):
                return True
        elif isinstance(target, OpOverload):
            if target._schema.is_mutable:
                return True
        elif getattr(target, "__module__", "") != "_operator":
            return True
    return False

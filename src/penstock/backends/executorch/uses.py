"""Gives each use of a weight values of its own, before ExecuTorch decomposes and partitions a program.

- A parameter gets an input for each node that reads it: ExecuTorch copies a weight that nodes of several
  delegates read, value and all. All these inputs share the memory.
- A copy that is computed from weights alone, such as a transposed one, is computed for each node that reads
  it: otherwise the delegate of the first would hand it to the others, in memory that no budget counts.
- A buffer gets its new value from a node of its own, and not from an input or from what is returned as well:
  a delegate can own no other.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._export.verifier import SpecViolationError
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from penstock.passes.graph.nodes import copy_graph_module, needed, placeholders_of, tensors_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.schedule.facts.errors import PassError

_USE = "_penstock_use_"


def with_own_uses(exported: ExportedProgram, least: int) -> ExportedProgram:
    """Returns the program without operators that write, in which each use has values of its own.

    Copies of fewer than `least` bytes are computed once, and passed on.
    """
    if any(_writes(node) for node in exported.graph.nodes):
        exported = _without_writes(exported)
    result = copy.copy(exported)
    result._graph_module = copy_graph_module(exported.graph_module)
    result._graph_signature = copy.copy(exported.graph_signature)
    _give_own_updates(result)
    _give_own_copies(result, least)
    _give_own_inputs(result)
    result.graph_module.recompile()
    return result


def takes_part(node: fx.Node) -> bool:
    """Tells whether a node can be in a region: it computes tensors from tensors, always alike."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        return False
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    values = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)]
    return all(_is_tensors(value) for value in values)


def _is_tensors(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(one is None or isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


@kept_torch_state()
def _without_writes(exported: ExportedProgram) -> ExportedProgram:
    """What ExecuTorch does next. Raises PassError where torch cannot."""
    try:
        functional: ExportedProgram = exported.run_decompositions({})
    except SpecViolationError as error:
        raise PassError(
            f"torch cannot write this program without operators that write ({str(error).splitlines()[0]}): "
            "where a program writes one value to two buffers, or returns it too, give each a clone() of it"
        ) from error
    return functional


def _give_own_updates(exported: ExportedProgram) -> None:
    """Copies the new value of a buffer where it is an input, or an output for something else as well."""
    graph = exported.graph
    output = graph.output_node()
    values, specs = list(output.args[0]), list(exported.graph_signature.output_specs)
    for position, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if spec.kind is OutputKind.BUFFER_MUTATION and (value.op == "placeholder" or values.count(value) > 1):
            with graph.inserting_before(output):
                own = graph.call_function(torch.ops.aten.clone.default, (value,))
            own.meta = dict(value.meta)
            values[position] = own
            specs[position] = OutputSpec(spec.kind, TensorArgument(name=own.name), spec.target)
    output.args = (tuple(values),)
    exported.graph_signature.output_specs = specs


def _give_own_copies(exported: ExportedProgram, least: int) -> None:
    """Computes what is computed from weights alone anew for each node that reads `least` bytes of it."""
    signature = exported.graph_signature
    written = set(signature.buffers_to_mutate.values())
    kept = {spec.arg.name for spec in signature.input_specs if spec.target and spec.target not in written}
    computed = {node for node in placeholders_of(exported.graph) if node.name in kept}
    owned: set[fx.Node] = set()
    for node in list(exported.graph.nodes):
        inputs = node.all_input_nodes
        if not inputs or not takes_part(node):
            continue
        if computed.issuperset(inputs):
            computed.add(node)
            continue
        copies = [one for one in inputs if one in computed and one.op != "placeholder"]
        if sum(tensor.nbytes for one in copies for tensor in tensors_of(one.meta["val"])) < least:
            continue
        computing = needed(copies, lambda one: one.op != "placeholder")
        if owned.isdisjoint(computing):
            owned.update(computing)
            continue
        _compute_again(exported.graph, computing, node)
    for node in reversed(list(exported.graph.nodes)):
        if node in computed and node.op != "placeholder" and not node.users:
            exported.graph.erase_node(node)


def _compute_again(graph: fx.Graph, nodes: set[fx.Node], reader: fx.Node) -> None:
    """Copies nodes for one that reads some of them."""
    own: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(reader):
        for node in [node for node in graph.nodes if node in nodes]:
            own[node] = graph.node_copy(node, lambda one: own.get(one, one))
    for node in set(reader.all_input_nodes) & nodes:
        reader.replace_input_with(node, own[node])


def _give_own_inputs(exported: ExportedProgram) -> None:
    """Gives each operator that reads a parameter an input of its own."""
    graph = exported.graph
    nodes = {node.name: node for node in placeholders_of(graph)}
    specs: list[InputSpec] = []
    values: dict[str, Any] = dict(exported.state_dict)
    for spec in exported.graph_signature.input_specs:
        specs.append(spec)
        if spec.kind is not InputKind.PARAMETER or spec.target not in values:
            continue
        node = nodes[spec.arg.name]
        for number, user in enumerate(list(node.users)[1:], 1):
            if not isinstance(user.target, OpOverload):
                continue
            name = f"{spec.target}{_USE}{number}"
            with graph.inserting_after(node):
                own = graph.placeholder(f"{node.name}{_USE}{number}")
            own.meta = {**node.meta, "val": _shared(node.meta["val"])}
            user.replace_input_with(node, own)
            values[name] = _shared(values[spec.target])
            specs.append(InputSpec(spec.kind, TensorArgument(name=own.name), name, spec.persistent))
    _sort_inputs(graph, {spec.arg.name: position for position, spec in enumerate(specs)})
    exported.graph_signature.input_specs = specs
    exported._state_dict = values


def named_without_use(name: str) -> str:
    """The FQN of the parameter that an input is for."""
    return name.partition(_USE)[0]


def _shared(value: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory."""
    with torch.no_grad():
        shared = value.detach()
    return nn.Parameter(shared, requires_grad=False) if isinstance(value, nn.Parameter) else shared


def _sort_inputs(graph: fx.Graph, order: Mapping[str, int]) -> None:
    """Moves the graph's inputs to the order of the signature."""
    inputs = sorted((node for node in graph.nodes if node.op == "placeholder"), key=lambda n: order[n.name])
    for before, node in pairwise(inputs):
        before.append(node)

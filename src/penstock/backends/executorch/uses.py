"""Gives each use of a parameter an input of its own.

ExecuTorch copies a weight that nodes of several delegates read, value and all. With an input for each node
that reads it, no weight is read by two, and all inputs share the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from penstock.backends.executorch.plain import copied_graph

_USE = "_penstock_use_"


def with_own_uses(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program, in which no parameter has two users, as far as operators read it."""
    graph_module = copied_graph(exported.graph_module)
    nodes = {node.name: node for node in graph_module.graph.nodes}
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
            with graph_module.graph.inserting_after(node):
                own = graph_module.graph.placeholder(f"{node.name}{_USE}{number}")
            own.meta = {**node.meta, "val": _shared(node.meta["val"])}
            user.replace_input_with(node, own)
            values[name] = _shared(values[spec.target])
            specs.append(InputSpec(spec.kind, TensorArgument(name=own.name), name, spec.persistent))
    if len(specs) == len(exported.graph_signature.input_specs):
        return exported
    order = {spec.arg.name: position for position, spec in enumerate(specs)}
    _sort_inputs(graph_module.graph, order)
    graph_module.recompile()
    result = copy.copy(exported)
    result._graph_module = graph_module
    result._graph_signature = copy.copy(exported.graph_signature)
    result._graph_signature.input_specs = specs
    result._state_dict = values
    return result


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

"""Inlines regions of another grad mode into the graph, since a region reads all of its weights in one step.

A model whose forward runs under `torch.no_grad()`, exported with gradients on, becomes one operator
with the whole forward in its body. Nothing that penstock runs requires grad, so the grad mode changes
no value, and the body may stand in the graph itself.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, subgraphs_of
from penstock.passes.pipeline import declare


def inline_grad_regions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph without regions of another grad mode, or the graph itself if it has none.

    Nodes of a region keep their names unless another node has that name; equal graphs give equal names.
    The bodies of control flow stay as they are.
    """
    inlined = graph_module
    while regions := _regions(inlined):  # a region may contain regions
        inlined = _without(regions, copy_graph_module(inlined))
    return inlined


@declare(requires=("plain parts",), ensures=("one grad mode",))
def without_grad_regions(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program without regions of another grad mode, or the program if it has none."""
    inlined = inline_grad_regions(exported.graph_module)
    return exported if inlined is exported.graph_module else with_graph(exported, inlined)


def with_graph(exported: ExportedProgram, graph_module: fx.GraphModule) -> ExportedProgram:
    """Return the program with another graph, which has the same inputs, and the same outputs in order."""
    result = copy.copy(exported)
    result._graph_module = graph_module
    result._graph_signature = copy.deepcopy(exported.graph_signature)
    outputs: Any = graph_module.graph.output_node().args[0]
    for spec, node in zip(result._graph_signature.output_specs, outputs, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    return result


def _regions(graph_module: fx.GraphModule) -> list[str]:
    operator = torch.ops.higher_order.wrap_with_set_grad_enabled
    return [node.name for node in graph_module.graph.nodes if node.target is operator]


def _without(regions: Collection[str], module: fx.GraphModule) -> fx.GraphModule:
    """Writes the graph anew, the body of each region in place of its operator.

    In a new graph no name is taken by a node that is gone. `module` is a copy that may be changed.
    """
    graph = fx.Graph()
    here: dict[fx.Node, Any] = {}
    operators = [node for node in module.graph.nodes if node.name in regions]
    replaced = {node for operator in operators for node in (operator, *operator.users)}
    taken = {node.name for node in module.graph.nodes if node not in replaced}
    for node in module.graph.nodes:
        if node.name in regions:
            results = _copy_body(node, graph, here, taken)
            here |= {user: results[user.args[1]] for user in node.users}
        elif node not in here and not (node.op == "get_attr" and replaced.issuperset(node.users)):
            here[node] = graph.node_copy(node, here.__getitem__)
    graph.set_codegen(module.graph._codegen)
    result = fx.GraphModule(module, graph)
    result.meta.update(module.meta)
    return result


def _copy_body(region: fx.Node, graph: fx.Graph, here: dict[fx.Node, Any], taken: Collection[str]) -> Any:
    """Copies the body of a region to the end of `graph`, adds to `here`, and returns its results.

    The arguments of the region's operator are the grad mode, the body and the body's inputs.
    """
    (body,) = subgraphs_of(region)
    owner: Any = region.graph.owning_module
    here.update(zip(placeholders_of(body.graph), map_arg(region.args[2:], here.__getitem__), strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], here.__getitem__)
        if node in here:
            continue
        name = node.name if node.name not in taken else f"{region.name}_{node.name}"
        target = node.target
        if node.op == "get_attr":
            target = f"{region.name}_{target}"
            owner.add_module(target, body.get_submodule(str(node.target)))
        args, kwargs = map_arg((node.args, node.kwargs), here.__getitem__)
        here[node] = graph.create_node(node.op, target, args, kwargs, name, node.type)
        here[node].meta = copy.copy(node.meta)
    raise AssertionError("a graph ends with its output")

"""Programs in ExecuTorch's edge dialect as penstock's passes take them: with the operators of ATen."""

from __future__ import annotations

import copy

from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import fx
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule

from penstock.passes.graph.nodes import copy_graph_module


def with_plain_operators(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program with ATen's operators, on a copy of its graph with the same names of nodes.

    An operator of the edge dialect stands for one of ATen's and computes the same. The copy shares the
    weights.
    """
    graph_module = copied_graph(exported.graph_module)
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, EdgeOpOverload):
                    node.target = node.target._op
            module.recompile()
    result = copy.copy(exported)
    result._graph_module = graph_module
    return result


def copied_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph module, nested ones included, in which nodes keep their names."""
    copied = copy_graph_module(graph_module)
    for before, node in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        node.name = before.name  # copying renames what is a builtin of Python, such as `input`
    return copied


class _Uncompiled(_LazyGraphModule):
    """A graph module whose Python code is generated when it is called, and not to be printed."""

    def __str__(self) -> str:
        return f"a graph module of {len(self.graph.nodes)} nodes"


def compiled_late(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program with the same graph, whose Python code is not generated at every change.

    ExecuTorch changes the graph of a method for each delegate, and torch keeps the code of every version:
    1.5 GB for the 900 delegates of a model of 80 layers.
    """
    graph_module = exported.graph_module
    late = _Uncompiled(graph_module, graph_module.graph)
    late.meta.update(graph_module.meta)
    result = copy.copy(exported)
    result._graph_module = late
    return result

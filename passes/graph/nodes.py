"""Small helpers on `torch.fx` graphs that several passes need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph module whose graphs, nested ones included, may be changed.

    The copy has the same node names and metadata, and shares the tensors.
    """
    copied = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, copy_graph_module(child))
    return copied


def tensors_of(value: object) -> Sequence[torch.Tensor]:
    """Returns the tensors of a nested value."""
    if isinstance(value, torch.Tensor):  # as nearly all values are: to walk a tree takes ten times as long
        return (value,)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def placeholders_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a graph in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def needed(results: Iterable[fx.Node], allowed: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """Returns the nodes that values depend on, these included, as far as they are allowed."""
    return _reached(filter(allowed, results), lambda node: filter(allowed, node.all_input_nodes))


def dependent(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that depend on values, these included."""
    return _reached(sources, lambda node: node.users)


def _reached(starts: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += neighbours(node)
    return found


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graph modules that a control-flow operator is given, or the one that a node calls."""
    owner = node.graph.owning_module
    given = [node] if node.op == "call_module" else node.all_input_nodes
    found = [
        getattr(owner, str(operand.target), None)
        for operand in given
        if operand.op in ("get_attr", "call_module")
    ]
    return [module for module in found if isinstance(module, fx.GraphModule)]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype without its prefix: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def size_hint(size: int | torch.SymInt) -> int:
    """Returns a size as a number: for a symbolic size, the one that it was exported with (1 if unknown)."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)

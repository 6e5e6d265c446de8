"""Small helpers on `torch.fx` graphs that several passes need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

CALLS = ("call_function", "call_method")
"""The kinds of nodes that call an operator, a function or a method of a tensor."""


_OBSERVED = ("_operator", "builtins", "executorch", "math", "torch")
"""The packages of functions without a schema whose run on fakes shows all that they write."""


def is_opaque(node: fx.Node) -> bool:
    """Tell whether a node calls a function without a schema whose run on fakes may hide what it writes."""
    if node.op != "call_function" or isinstance(node.target, OpOverload | HigherOrderOperator):
        return False
    owner = getattr(node.target, "__self__", None)  # the class of torch.autograd.Function, for its `apply`
    home = getattr(owner if isinstance(owner, type) else node.target, "__module__", "")
    return str(home).partition(".")[0] not in _OBSERVED


def called(node: fx.Node) -> str:
    """Return what a node calls, in the words of a message."""
    name = getattr(node.target, "__name__", None) or str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return f"the higher-order operator {name!r}"
    return f"the Python function {getattr(node.target, '__module__', '')}.{name}"


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph module whose graphs, nested ones included, may be changed.

    The copy has the same node names and metadata, and shares the tensors.
    """
    copied = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for before, node in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        node.name = before.name  # fx renames a copied node called like a builtin of Python, such as `input`
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, copy_graph_module(child))
    return copied


def use_aten_operators(graph_module: fx.GraphModule) -> None:
    """Replace operators of other dialects by the operators of ATen that they wrap, in nested graphs too.

    ExecuTorch's edge dialect wraps each operator in an object with a schema of its own, which computes the
    same and has the operator as `_op`. Nodes keep their names.
    """
    for node in _wrapping(graph_module):
        node.target = node.target._op  # type: ignore[union-attr]


def with_aten_operators(exported: ExportedProgram) -> ExportedProgram:
    """Return the program on a copy of its graph with ATen's operators, or itself if it has no others.

    Nodes keep their names, and the copy shares the weights.
    """
    if not _wrapping(exported.graph_module):
        return exported
    result = copy.copy(exported)
    result._graph_module = copy_graph_module(exported.graph_module)
    use_aten_operators(result._graph_module)
    for module in result._graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return result


def _wrapping(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that call an operator which wraps one of ATen's."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes)
    return [node for node in nodes if isinstance(getattr(node.target, "_op", None), OpOverload)]


def written_values(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[Any]:
    """Yield what is passed to the arguments that an operator writes: tensors, or the nodes that compute them.

    These are the arguments that its schema marks, and running statistics, which batch and instance norm
    write in training although their schemas do not say so. The flag may be a number, or a node.
    """
    passed = passed_by_name(operator, args, kwargs)
    trains = any(passed.get(flag) for flag in ("training", "use_input_stats"))
    for argument in operator._schema.arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (trains and argument.name in {"running_mean", "running_var"}):
            yield from pytree.tree_leaves(passed.get(argument.name))


def passed_by_name(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return what a call passes to each argument of an operator."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


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
    reached: set[fx.Node] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += neighbours(node)
    return reached


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graph modules that a control-flow operator is given, or the one that a node calls."""
    owner = node.graph.owning_module
    operands = [node] if node.op == "call_module" else node.all_input_nodes
    modules = [
        getattr(owner, str(operand.target), None)
        for operand in operands
        if operand.op in ("get_attr", "call_module")
    ]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype without its prefix: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def size_hint(size: int | torch.SymInt) -> int:
    """Returns a size as a number: for a symbolic size, the one that it was exported with (1 if unknown)."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)

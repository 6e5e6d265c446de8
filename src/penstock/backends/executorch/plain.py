"""Programs as ExecuTorch makes them: their operators, and what it turns into copies as views again."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule

from penstock.passes.graph.propagation import fake_inputs, propagate


def operators_of(exported: ExportedProgram) -> list[OpOverload]:
    """The operators that a program calls, in the bodies of control flow too."""
    modules = [module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = {node.target: None for module in modules for node in module.graph.nodes}
    return [target for target in targets if isinstance(target, OpOverload)]


def as_torch_exports(exported: ExportedProgram) -> ExportedProgram:
    """Returns a program with ATen's operators as `torch.export` makes them: with views, and with numbers.

    ExecuTorch has made copies of views, and tensors of numbers. The graph is changed in place. It writes
    nothing but its buffers, in the end, so a view and a copy have the same values. Orders of dimensions are
    memory formats again, which compilers know. A copy has other strides than the view that it was made of, so
    formats are found after views are back, and a `view` becomes a `reshape`, which takes any strides.
    Inductor takes the scale of an attention for a number.
    """
    numbers = _numbers(exported)
    for node in _operators(exported.graph_module):
        _restore_view(node)
        _restore_number(node, numbers)
    graph_module = exported.graph_module
    _take_values(graph_module, propagate(graph_module, fake_inputs(graph_module)))
    for node in _operators(graph_module):
        _restore_format(node)
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return exported


def _operators(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that call operators, in the bodies of control flow too."""
    modules = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [node for one in modules for node in one.graph.nodes if isinstance(node.target, OpOverload)]


def _restore_view(node: fx.Node) -> None:
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    if node.target is torch.ops.aten.view_copy.default:
        node.target = torch.ops.aten.reshape.default
    elif namespace == "aten" and name.endswith("_copy"):
        overload = node.target._overloadname  # type: ignore[union-attr]
        view = getattr(getattr(torch.ops.aten, name.removesuffix("_copy"), None), overload, None)
        if view is not None and any(one.alias_info is not None for one in view._schema.returns):
            node.target = view


def _numbers(exported: ExportedProgram) -> dict[str, torch.Tensor]:
    """What ExecuTorch has made of numbers, by the names of inputs."""
    values = exported.state_dict
    named = exported.graph_signature.inputs_to_buffers.items()
    made = {name: values[fqn] for name, fqn in named if fqn.startswith(_MADE) and fqn in values}
    return {name: value for name, value in made.items() if value.dim() == 0}


def _restore_number(node: fx.Node, numbers: Mapping[str, torch.Tensor]) -> None:
    """Put a number where arithmetic with a tensor has a constant that leaves the dtype as it is."""
    if node.target not in _ARITHMETIC:
        return
    value, other = node.args
    if isinstance(value, fx.Node) and isinstance(other, fx.Node) and other.name in numbers:
        number, known = numbers[other.name], value.meta["val"]
        wider = known.dim() > 0 and known.is_floating_point() and number.is_floating_point()
        if number.dtype == known.dtype or wider:
            node.args = value, number.item()


_MADE = "_lifted_tensor_constant"
"""How ExecuTorch names the constants that it makes."""

_ARITHMETIC = tuple(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def _take_values(graph_module: fx.GraphModule, propagated: fx.GraphModule) -> None:
    for node, known in zip(graph_module.graph.nodes, propagated.graph.nodes, strict=True):
        if "val" in known.meta:
            node.meta["val"] = known.meta["val"]


def _restore_format(node: fx.Node) -> None:
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    if namespace != "dim_order_ops":
        return
    order = node.kwargs.get("dim_order")
    node.target = _FORMATTED[name]
    kept = {key: value for key, value in node.kwargs.items() if key != "dim_order"}
    node.kwargs = {**kept, "memory_format": _memory_format(node, order)}


_FORMATTED = {
    "_to_dim_order_copy": torch.ops.aten._to_copy.default,
    "_clone_dim_order": torch.ops.aten.clone.default,
    "_empty_dim_order": torch.ops.aten.empty.memory_format,
}

_FORMATS = {
    (0, 2, 3, 1): torch.channels_last,
    (0, 2, 3, 4, 1): torch.channels_last_3d,
}


def _memory_format(node: fx.Node, order: object) -> torch.memory_format:
    """The memory format that an order of dimensions stands for: that of the input, or one of torch's.

    An order that has no format there is the input's: values are the same in any.
    """
    source = node.args[0]
    given = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(order, list | tuple):
        return torch.preserve_format
    if isinstance(given, torch.Tensor) and given.dim_order() == tuple(order):
        return torch.preserve_format
    if list(order) == sorted(order):
        return torch.contiguous_format
    return _FORMATS.get(tuple(order), torch.preserve_format)


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

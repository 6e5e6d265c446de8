"""Finds stacks of experts that a program computes from others, as dequantisation does, slice by slice.

Such a *chain* of operators begins at a weight and ends in a product by experts. Each of its operators moves
elements within slices on dimension 0, or computes each element from one element of the chain and numbers
beside it. It rounds correctly if it rounds at all, so that no result depends on what is computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.graph.nodes import copy_program, needed, placeholders_of, subgraphs_of
from penstock.passes.graph.propagation import propagate
from penstock.passes.sparse.contracts import BY_EXPERT, CONTRACTS, computed_like
from penstock.schedule.facts.model import Part, SparseRead
from penstock.schedule.sparse import pool

aten = torch.ops.aten

Trusts = Callable[[SparseRead], bool]
"""Tells whether the operator of a read is known to compute each slice's rows from that slice alone."""

_EACH_ELEMENT = frozenset(
    getattr(getattr(aten, packet), overload)
    for packet, overloads in {
        "_to_copy": "default",
        "to": "dtype",
        **dict.fromkeys(("mul", "div", "bitwise_and", "bitwise_or"), "Tensor Scalar"),
        **dict.fromkeys(("add", "sub"), "Tensor"),
        **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), "Tensor Tensor_Scalar"),
        **dict.fromkeys(("__and__", "__or__", "__lshift__", "__rshift__"), "Tensor Scalar"),
        "neg": "default",
        "index": "Tensor",
    }.items()
    for overload in overloads.split()
)
"""Operators that compute each element from one of each operand, and round correctly."""


_LOOKED_UP = aten.index.Tensor
"""Takes each element from a table of one dimension, at the place that an element of the chain names."""


@dataclass(frozen=True)
class _Chain:
    """The nodes from a weight to a product's stack; `sliced` operands have a slice each, `shared` none."""

    nodes: tuple[fx.Node, ...]
    sliced: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]

    @property
    def weight(self) -> fx.Node:
        return self.nodes[0]

    @property
    def stack(self) -> fx.Node:
        return self.nodes[-1]


def by_expert(exported: ExportedProgram, trusts: Trusts) -> ExportedProgram:
    """Returns a copy of a program in which experts that chains compute are computed one at a time.

    The product, the chain before it, and nothing else become the body of one node, which has the product's
    name. This is not done where another node uses a value in the middle of a chain, where something is
    written between its first node and the product, for small weights, and for products that `trusts` does
    not. A program without chains is returned itself.
    """
    products = list(_products(exported, trusts))
    if not products:
        return exported
    copied = copy_program(exported)
    module = copied.graph_module
    nodes = {node.name: node for node in module.graph.nodes}
    for number, (product, chain, inner) in enumerate(products):
        name = f"penstock_experts_{number}"
        setattr(module, name, inner)
        node = nodes[product.name]
        rows, _, ends = node.args[:3]
        operands = [nodes[operand.name] for operand in (*chain.sliced, *chain.shared)]
        with module.graph.inserting_before(node):
            body = module.graph.get_attr(name)
        node.target, node.kwargs = BY_EXPERT, {}
        node.args = (body, len(chain.sliced), rows, nodes[chain.weight.name], ends, *operands)
        for chain_node in reversed(chain.nodes[1:]):
            for user in tuple(nodes[chain_node.name].users):
                module.graph.erase_node(user)  # an assertion
            module.graph.erase_node(nodes[chain_node.name])
    module.recompile()
    return copied


def _products(exported: ExportedProgram, trusts: Trusts) -> Iterator[tuple[fx.Node, _Chain, fx.GraphModule]]:
    """The products by experts whose stacks are computed by chains, in order, each with the body of both."""
    specs = exported.graph_signature.input_specs
    named = {spec.arg.name for spec in specs if spec.kind is not InputKind.USER_INPUT}
    weights = {node for node in placeholders_of(exported.graph) if node.name in named}
    position = {node: k for k, node in enumerate(exported.graph.nodes)}
    writes = [k for node, k in position.items() if _writes(node)]
    for node in exported.graph.nodes:
        contract = CONTRACTS.get(str(node.target)) if node.op == "call_function" else None
        if contract is None or not contract.ends or node.target is BY_EXPERT:
            continue
        further = (*node.args[3:], *node.kwargs.values())
        if len(node.args) < 3 or any(argument is not None for argument in further):
            continue
        chain = _chain(node, weights, position) if _is_static(node.args[1]) else None
        if chain is None or any(position[chain.nodes[1]] < k < position[node] for k in writes):
            continue
        if chain.weight.meta["val"].nbytes < pool.LEAST or not trusts(_read(node, chain)):
            continue
        body = _body(node, chain)
        (inner,) = body.graph.output_node().all_input_nodes
        single: fx.Node = inner.args[1]  # type: ignore[assignment]
        # Kernels choose how they work by strides, so the slice of an expert lies in memory as in the stack.
        if single.meta["val"].stride()[1:] == chain.stack.meta["val"].stride()[1:]:
            yield node, chain, body


def _read(product: fx.Node, chain: _Chain) -> SparseRead:
    value = chain.weight.meta["val"]
    view = Part("", str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(value.stride()), 0, 0)
    return SparseRead(view, str(product.target), 0, 0, computed=computed_like(chain.stack.meta["val"]))


def _writes(node: fx.Node) -> bool:
    if any(_writes(inner) for body in subgraphs_of(node) for inner in body.graph.nodes):
        return True
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_static(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    sizes: tuple[Any, ...] = tuple(value.shape)
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _chain(product: fx.Node, weights: Collection[fx.Node], position: Mapping[fx.Node, int]) -> _Chain | None:
    """The chain from the largest weight with as many slices as the product's stack; None if there is none."""
    stack: fx.Node = product.args[1]  # type: ignore[assignment]
    count = stack.meta["val"].shape[0]
    around = needed([stack], lambda node: _is_static(node) and node.meta["val"].shape[0] == count)
    weight = max(
        around & set(weights), key=lambda node: (node.meta["val"].nbytes, position[node]), default=None
    )
    if weight is None or weight is stack or stack.meta["val"].dim() != 3:
        return None
    inside = {weight: None}
    for node in sorted(around, key=position.__getitem__):
        if not inside.keys().isdisjoint(node.all_input_nodes):
            inside[node] = None
    sliced: dict[fx.Node, None] = {}
    shared: dict[fx.Node, None] = {}
    for node in inside:
        users = {user for user in node.users if user.target is not aten._assert_tensor_metadata.default}
        if node is not weight and (_opened(node) is None or not users <= {*inside, product}):
            return None
        for other in node.all_input_nodes:
            of = _sliced_as(other, node)
            if of is None or (other in inside and not of):
                return None
            if other not in inside:
                (sliced if of else shared)[other] = None
    if not any(_computes(node) for node in inside) or not inside.keys().isdisjoint(product.args[::2]):
        return None
    return _Chain(tuple(inside), tuple(sliced), tuple(shared))


def _computes(node: fx.Node) -> bool:
    """Tells whether a node does more than move elements; a conversion to the dtype that is there does not."""
    if node.target is aten.to.dtype:
        return bool(node.meta["val"].dtype != node.all_input_nodes[0].meta["val"].dtype)
    return node.target in _EACH_ELEMENT


def _sliced_as(operand: fx.Node, node: fx.Node) -> bool | None:
    """Tells whether slice k of a result needs slice k of an operand, or all of it; None if it is neither."""
    value, computed = operand.meta.get("val"), node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    if node.target is _LOOKED_UP and operand is node.args[0]:
        return False
    if node.target in _EACH_ELEMENT and (value.dim() < computed.dim() or value.shape[0] == 1):
        return False
    return True if value.shape[:1] == computed.shape[:1] else None


def _opened(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of a node of a chain without the number of slices; None if its operator mixes slices."""
    rank = node.all_input_nodes[0].meta["val"].dim() if node.all_input_nodes else 0
    if node.target in _EACH_ELEMENT:
        exact = not set(node.kwargs) - {"dtype"} and len(node.args) <= 2 and not _rounds_late(node)
        return node.args if exact and (node.target is not _LOOKED_UP or rank == 1) else None
    open_arguments = _WITHIN_SLICES.get(node.target)
    if open_arguments is None or set(node.kwargs) - {"memory_format"}:
        return None
    return open_arguments(node.args, rank, list(node.meta["val"].shape))


def _rounds_late(node: fx.Node) -> bool:
    """Tells whether an operator of two operands is not the same for a slice in which one has one element.

    For a result of 16 bits torch takes that element before it is rounded to the dtype of the result, and for
    one of 8 bits it refuses it.
    """
    computed: torch.Tensor = node.meta["val"]
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    is_small = computed.is_floating_point() and computed.itemsize <= 2
    if len(values) < 2 or node.target is _LOOKED_UP or not is_small:
        return False
    rounded = computed.itemsize == 2 and all(value.dtype == computed.dtype for value in values)
    return not rounded and any(value.numel() == computed.shape[0] for value in values)


_WITHIN_SLICES: Mapping[Any, Callable[[tuple[Any, ...], int, list[int]], tuple[Any, ...] | None]] = {
    **dict.fromkeys(
        (aten.alias.default, aten.detach.default, aten.contiguous.default, aten.clone.default),
        lambda arguments, rank, shape: arguments,
    ),
    **dict.fromkeys(
        (aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim),
        lambda arguments, rank, shape: (
            arguments if all(dim % max(rank, len(shape)) for dim in arguments[1:]) else None
        ),
    ),
    **dict.fromkeys(
        (aten.slice.Tensor, aten.select.int, aten.flatten.using_ints, aten.stack.default, aten.cat.default),
        lambda arguments, rank, shape: arguments if (*arguments, 0)[1] % max(rank, len(shape)) else None,
    ),
    aten.permute.default: lambda arguments, rank, shape: arguments if arguments[1][0] % rank == 0 else None,
    aten.mT.default: lambda arguments, rank, shape: arguments if rank > 2 else None,
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        lambda arguments, rank, shape: (arguments[0], [-1, *shape[1:]]),
    ),
    aten.expand.default: lambda arguments, rank, shape: (
        (arguments[0], [-1, *shape[1:]]) if len(shape) == rank else None
    ),
}
"""Operators that move elements within slices, each with what finds its arguments for any number of slices."""


def _body(product: fx.Node, chain: _Chain) -> fx.GraphModule:
    """A product and its chain as a graph of their own, with the values that it has for a single expert."""
    graph = fx.Graph()
    rows: fx.Node = product.args[0]  # type: ignore[assignment]
    ends: fx.Node = product.args[2]  # type: ignore[assignment]
    inputs = {"rows": rows, "weight": chain.weight, "ends": ends}
    operands = (*chain.sliced, *chain.shared)
    inputs |= {f"other_{k}": operand for k, operand in enumerate(operands)}
    inner = {outer: graph.placeholder(name) for name, outer in inputs.items()}
    for node in chain.nodes[1:]:
        copied = inner[node] = graph.node_copy(node, inner.__getitem__)
        copied.args = fx.node.map_arg(_opened(node) or (), inner.__getitem__)
    graph.output(graph.node_copy(product, inner.__getitem__))
    single = {chain.weight, ends, *chain.sliced}
    values = [outer.meta["val"].detach() for outer in inputs.values()]
    fakes = [
        value[:1] if outer in single else value for outer, value in zip(inputs.values(), values, strict=True)
    ]
    return propagate(fx.GraphModule({}, graph), fakes)

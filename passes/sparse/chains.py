"""Finds stacks of experts that a program computes from others, as dequantisation does, slice by slice.

Such a *chain* of operators begins at a weight and ends in a product by experts. Each of its operators moves
elements within slices on dimension 0, or computes each element from one element of the chain and numbers
beside it. It rounds correctly if it rounds at all, so that no result depends on what is computed with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of
from penstock.passes.graph.propagation import propagate
from penstock.passes.pipeline import declare
from penstock.passes.sparse.by_expert import BY_EXPERT
from penstock.passes.sparse.contracts import CONTRACTS, computed_like
from penstock.schedule.facts.model import Part, SparseRead
from penstock.schedule.sparse import division

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
    }.items()
    for overload in overloads.split()
)
"""Operators that compute each element from one of each operand, and round correctly."""


@dataclass(frozen=True)
class _Chain:
    """The nodes from a weight to the stack that a product is given, and what they are given besides.

    `sliced` have a slice for each of the stack, and `shared` are the same for all slices.
    """

    nodes: tuple[fx.Node, ...]
    sliced: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]

    @property
    def weight(self) -> fx.Node:
        return self.nodes[0]

    @property
    def stack(self) -> fx.Node:
        return self.nodes[-1]


@declare(requires=("plain parts", "one grad mode"), ensures=("experts from their own slices",))
def by_expert(exported: ExportedProgram, trusts: Trusts) -> ExportedProgram:
    """Returns a copy of a program in which experts that chains compute are computed one at a time.

    The product, the chain before it, and nothing else become the body of one node, which has the product's
    name. This is not done where another node uses a value in the middle of a chain, where something is
    written between its first node and the product, for small weights, and for products that `trusts` does
    not. A program without chains is returned itself.
    """
    found = list(_products(exported, trusts))
    if not found:
        return exported
    copied = copy.copy(exported)
    module = copied._graph_module = copy_graph_module(exported.graph_module)
    nodes = {node.name: node for node in module.graph.nodes}
    for number, (product, chain) in enumerate(found):
        name = f"penstock_experts_{number}"
        setattr(module, name, _body(product, chain))
        node = nodes[product.name]
        rows, _, ends = node.args[:3]
        others = [nodes[one.name] for one in (*chain.sliced, *chain.shared)]
        with module.graph.inserting_before(node):
            body = module.graph.get_attr(name)
        node.target, node.kwargs = BY_EXPERT, {}
        node.args = (body, len(chain.sliced), rows, nodes[chain.weight.name], ends, *others)
        for one in reversed(chain.nodes[1:]):
            for user in tuple(nodes[one.name].users):
                module.graph.erase_node(user)  # an assertion
            module.graph.erase_node(nodes[one.name])
    module.recompile()
    return copied


def _products(exported: ExportedProgram, trusts: Trusts) -> Iterator[tuple[fx.Node, _Chain]]:
    """The products by experts whose stacks are computed by chains, in order."""
    specs = exported.graph_signature.input_specs
    named = {spec.arg.name for spec in specs if spec.kind is not InputKind.USER_INPUT}
    weights = {node for node in placeholders_of(exported.graph) if node.name in named}
    position = {node: k for k, node in enumerate(exported.graph.nodes)}
    writes = [k for node, k in position.items() if _writes(node)]
    for node in exported.graph.nodes:
        contract = CONTRACTS.get(str(node.target)) if node.op == "call_function" else None
        if contract is None or not contract.ends or node.target is BY_EXPERT:
            continue
        if len(node.args) < 3 or any(one is not None for one in (*node.args[3:], *node.kwargs.values())):
            continue
        stack = node.args[1]
        chain = _chain(node, stack, weights) if _is_static(stack) else None
        if chain is None or any(position[chain.nodes[1]] < k < position[node] for k in writes):
            continue
        value = chain.weight.meta["val"]
        if value.numel() * value.itemsize >= division.LEAST and trusts(_read(node, chain)):
            yield node, chain


def _read(product: fx.Node, chain: _Chain) -> SparseRead:
    value = chain.weight.meta["val"]
    view = Part("", str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(value.stride()), 0, 0)
    return SparseRead(view, str(product.target), 0, 0, computed=computed_like(chain.stack.meta["val"]))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_static(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return all(isinstance(size, int) and size for size in value.shape)


def _chain(product: fx.Node, stack: fx.Node, weights: Collection[fx.Node]) -> _Chain | None:
    """The chain that computes a stack for a product; None if there is none, or others use what it computes."""
    count = stack.meta["val"].shape[0]
    nodes = _path(stack, count, weights)
    if len(nodes) < 2 or not any(node.target in _EACH_ELEMENT for node in nodes):
        return None
    sliced: dict[fx.Node, None] = {}
    shared: dict[fx.Node, None] = {}
    for before, node in zip(nodes, (*nodes[1:], product), strict=True):
        given = [one for one in tree_leaves((node.args, node.kwargs)) if isinstance(one, fx.Node)]
        users = {user for user in before.users if user.target is not aten._assert_tensor_metadata.default}
        if given.count(before) > 1 or (before is not nodes[0] and users != {node}):
            return None
        for other in (one for one in given if one is not before and node is not product):
            of = _sliced_as(other, node)
            if of is None:
                return None
            (sliced if of else shared)[other] = None
    return _Chain(tuple(nodes), tuple(sliced), tuple(shared))


def _path(node: fx.Node, count: int, weights: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes from the largest weight of which a value of `count` slices is computed; else none."""
    if not _is_static(node) or node.meta["val"].shape[0] != count:
        return []
    if node in weights:
        return [node]
    if node.op != "call_function" or _opened(node, count) is None:
        return []
    operands = (one for one in node.all_input_nodes if node.target not in _EACH_ELEMENT or _sliced_as(one, node))
    paths = [path for one in operands if (path := _path(one, count, weights))]
    largest = max(paths, key=lambda path: path[0].meta["val"].nbytes, default=[])
    return [*largest, node] if largest else []


def _sliced_as(operand: fx.Node, node: fx.Node) -> bool | None:
    """Tells whether slice k of a result needs slice k of an operand, or all of it; None where it is neither."""
    value, made = operand.meta.get("val"), node.meta["val"]
    if node.target not in _EACH_ELEMENT or not isinstance(value, torch.Tensor):
        return None
    if value.dim() < made.dim() or value.shape[0] == 1:
        return False
    return True if value.shape[0] == made.shape[0] else None


def _opened(node: fx.Node, count: int) -> tuple[Any, ...] | None:
    """The arguments of a node of a chain, which do not tell how many slices there are.

    None for an operator that mixes slices, or that is not known.
    """
    known = _WITHIN_SLICES.get(node.target)
    if node.target in _EACH_ELEMENT:
        exact = not set(node.kwargs) - {"dtype"} and len(node.args) <= 2
        return node.args if exact else None
    if known is None or set(node.kwargs) - {"memory_format"}:
        return None
    return known(node.args, node.args[0].meta["val"].dim(), list(node.meta["val"].shape))  # type: ignore[union-attr]


def _same(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return arguments


def _inner(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return arguments if all(dim % max(rank, len(shape)) for dim in arguments[1:]) else None


def _along(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    dim = arguments[1] if len(arguments) > 1 else 0
    return arguments if dim % rank else None


def _permuted(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return arguments if arguments[1][0] % rank == 0 else None


def _last_two(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return arguments if rank > 2 else None


def _shaped(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return arguments[0], [-1, *shape[1:]]


def _expanded(arguments: tuple[Any, ...], rank: int, shape: list[int]) -> tuple[Any, ...] | None:
    return (arguments[0], [-1, *shape[1:]]) if len(shape) == rank else None


_WITHIN_SLICES: Mapping[Any, Callable[[tuple[Any, ...], int, list[int]], tuple[Any, ...] | None]] = {
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.contiguous.default, aten.clone.default), _same),
    **dict.fromkeys((aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim), _inner),
    **dict.fromkeys((aten.slice.Tensor, aten.select.int), _along),
    aten.permute.default: _permuted,
    aten.mT.default: _last_two,
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _shaped),
    aten.expand.default: _expanded,
}
"""Operators that move elements within slices, each with what finds its arguments for any number of slices."""


def _body(product: fx.Node, chain: _Chain) -> fx.GraphModule:
    """A product and its chain as a graph of their own, with the values that it has for a single expert."""
    graph, rows, ends = fx.Graph(), product.args[0], product.args[2]
    inputs = {"rows": rows, "weight": chain.weight, "ends": ends}
    others = (*chain.sliced, *chain.shared)
    inputs |= {f"other_{k}": one for k, one in enumerate(others)}
    own = {given: graph.placeholder(name) for name, given in inputs.items()}
    count = chain.stack.meta["val"].shape[0]
    for node in chain.nodes[1:]:
        made = own[node] = graph.node_copy(node, own.__getitem__)
        opened = _opened(node, count)
        made.args = fx.node.map_arg(opened, own.__getitem__)
    graph.output(graph.node_copy(product, own.__getitem__))
    single = {chain.weight, ends, *chain.sliced}
    values = [one.meta["val"].detach() for one in inputs.values()]
    fakes = [value[:1] if one in single else value for one, value in zip(inputs.values(), values, strict=True)]
    return propagate(fx.GraphModule({}, graph), fakes)

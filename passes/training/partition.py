"""Divides a joint graph into a forward and a backward, between which no weight is kept.

What the backward needs of the forward is kept as it is, or computed again where the caller says so
(recomputing.py), with two exceptions. A weight, a view of one, or what is computed from frozen weights alone,
is not kept: the backward takes it from the weight again, which may have left memory meanwhile. So a product
unpacks its packed weight in both directions, where autograd would keep each weight unpacked. What an operator
of a library that is not known computes of them is kept: it may draw random numbers. A view of an input is
taken from the input again, so that autograd sees whether the input was changed in between. Whether a value is
a view is found by the memory behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from penstock.passes.graph import in_place
from penstock.passes.graph.nodes import dependent, needed, placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.training.joint import Joint
from penstock.passes.weights.usage import is_view


@dataclass(frozen=True)
class Partition:
    """Which nodes of a joint graph run in the forward, which in the backward, and what goes between them.

    `early` are the nodes of the forward, and `late` those of the backward, in order; views of inputs, and
    what is computed again, are in both. `inputs` are the placeholders of inputs that the backward takes, and
    `kept` the values that the forward returns for it. `same` maps a node to the one among `kept` that is the
    same value.
    """

    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    same: dict[fx.Node, fx.Node]


def partition(
    joint: Joint,
    frozen: Collection[str] = (),
    again: Collection[fx.Node] = frozenset(),
    kept: dict[object, fx.Node] | None = None,
) -> Partition:
    """Returns the partition that keeps what the backward reads of the forward, except for nodes in `again`.

    The backward computes those again, from what they are computed of, where it needs them first. `frozen` are
    the names of inputs that are weights and have no gradient. `kept` are the values that are kept for other
    backwards of that forward, to which this one's are added.
    """
    nodes = list(joint.graph_module.graph.nodes)
    early = forward_of(joint)
    after = dependent(node for node in joint.tangents if node is not None)
    checks = [node for node in nodes if node in after and node.op == "call_function" and node.is_impure()]
    backward_nodes = needed([*joint.gradients.values(), *checks]) - early
    crossing = _Crossing(joint, {*again, *unpacked(joint, frozen)}, {} if kept is None else kept)
    for node in nodes:
        if node in backward_nodes and node.op != "placeholder":
            for operand in node.all_input_nodes:
                if operand not in backward_nodes:
                    crossing.take(operand)
    return Partition(
        tuple(node for node in nodes if node in early and node.op != "placeholder"),
        tuple(_where_needed(joint, backward_nodes | crossing.again)),
        tuple(node for node in placeholders_of(joint.graph_module.graph) if node in crossing.inputs),
        tuple(dict.fromkeys(crossing.same.values())),
        crossing.same,
    )


def forward_of(joint: Joint) -> set[fx.Node]:
    """The nodes that the forward runs: what its results and what it writes are computed of."""
    after = dependent(joint.given)
    results = [node for node in (*joint.written.values(), *joint.results) if node is not None]
    effects = [
        node
        for node in joint.graph_module.graph.nodes
        if node.op == "call_function" and node.is_impure() and node not in after
    ]
    early = needed([*results, *effects])
    return early | {user for node in early for user in node.users if user.target is operator.getitem}


def steady_storages(joint: Joint) -> set[int]:
    """The storages of inputs that the program does not write to, which the backward can read as well."""
    inputs = (node for k, node in enumerate(joint.inputs) if node is not None and k not in joint.written)
    return {storage for node in inputs for storage in storages_of(node.meta["val"])}


def unpacked(joint: Joint, frozen: Collection[str]) -> set[fx.Node]:
    """What is computed from frozen weights alone, the same each time that it is computed."""
    inputs = (node for k, node in enumerate(joint.inputs) if node is not None and k not in joint.written)
    unchanged = {node for node in inputs if node.name in frozen}
    reached = set(unchanged)
    for node in joint.graph_module.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "call_function" and operands and reached.issuperset(operands) and _repeats(node):
            reached.add(node)
    return reached - unchanged


def _where_needed(joint: Joint, late: Set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of the backward, in the order in which autograd calls those that gradients go through.

    Each other value is computed right before the first of them that needs it: all of them at the beginning
    would take as much memory as if they had been kept.
    """
    nodes = [node for node in joint.graph_module.graph.nodes if node.op != "placeholder"]
    position = {node: k for k, node in enumerate(nodes)}
    after = dependent(joint.given)
    left = late & position.keys()
    for node in [candidate for candidate in nodes if candidate in left and candidate in after] + [
        *joint.gradients.values()
    ]:
        missing = needed([node], left.__contains__)
        yield from sorted(missing, key=position.__getitem__)
        left -= missing


@dataclass
class _Crossing:
    """Collects what crosses from the forward to the backward."""

    joint: Joint
    repeated: Collection[fx.Node]
    kept: dict[object, fx.Node]
    inputs: set[fx.Node] = field(default_factory=set)
    again: set[fx.Node] = field(default_factory=set)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The backward cannot read what the program has written over since: it keeps a copy.
        self._steady = steady_storages(self.joint)

    def take(self, first: fx.Node) -> None:
        left = [first]
        while left:
            node = left.pop()
            storages = storages_of(node.meta["val"])
            lasting = bool(storages) and self._steady.issuperset(storages)
            if node.op == "placeholder" and (lasting or node in self.joint.tangents):
                self.inputs.add(node)
            elif node in self.repeated or (node.op != "placeholder" and lasting and is_view(node)):
                if node not in self.again:
                    self.again.add(node)
                    left += node.all_input_nodes
            else:
                self.same[node] = self.kept.setdefault(_identity(node), node)


_KNOWN = frozenset({"aten", "prims", in_place.NAMESPACE, "quantized_decomposed", "torchao"})
"""Namespaces of operators whose tags tell whether they draw random numbers."""


def _repeats(node: fx.Node) -> bool:
    """Tells whether an operator has no effect, draws no random numbers, and writes to nothing.

    Of those from other libraries nothing is known.
    """
    if getattr(node.target, "namespace", "aten") not in _KNOWN:
        return False
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.target is operator.getitem:
        return True
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags


def _identity(node: fx.Node) -> object:
    """Equal for nodes whose values are the same: sizes by their expression, tensors by their memory."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        layout = (value.storage_offset(), tuple(value.shape), value.stride())
        return (storages_of(value)[0], value.dtype, *map(str, layout))
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat) else node

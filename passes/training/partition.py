"""Divides a joint graph into a forward and a backward, between which no weight is kept.

What the backward needs of the forward is kept as it is, with two exceptions. A weight, a view of one, or what
is computed from frozen weights alone, is not kept: the backward takes it from the weight again, which may
have left memory meanwhile. So a product unpacks its packed weight in both directions, where autograd would
keep each weight unpacked. A view of an input is taken from the input again, so that autograd sees whether the
input was changed in between. Whether a value is a view is found by the memory behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.training.joint import Joint
from penstock.passes.weights.usage import is_view


@dataclass(frozen=True)
class Partition:
    """Which nodes of a joint graph run in the forward, which in the backward, and what goes between them.

    `early` are the nodes of the forward, and `late` those of the backward, in order; views of inputs may be
    in both. `inputs` are the placeholders of inputs that the backward takes, and `kept` the values that the
    forward returns for it. `same` maps a node to the one among `kept` that is the same value.
    """

    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    same: dict[fx.Node, fx.Node]


def partition(
    joint: Joint, frozen: Collection[str] = (), kept: dict[object, fx.Node] | None = None
) -> Partition:
    """Returns the partition that keeps every value of the forward that the backward reads.

    `frozen` are the names of inputs that are weights and have no gradient. `kept` are the values that are
    kept for other backwards of that forward, to which this one's are added.
    """
    nodes = list(joint.graph_module.graph.nodes)
    results = [node for node in (*joint.written.values(), *joint.results) if node is not None]
    after = _reached(joint.given)
    effects = [
        node for node in nodes if node.op == "call_function" and node.is_impure() and node not in after
    ]
    early = _needed([*results, *effects])
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    own = _needed(joint.gradients.values()) - early
    crossing = _Crossing(joint, frozenset(frozen), {} if kept is None else kept)
    for node in nodes:
        if node in own and node.op != "placeholder":
            for operand in node.all_input_nodes:
                if operand not in own:
                    crossing.take(operand)
    late = [node for node in nodes if node in own and node.op != "placeholder"]
    return Partition(
        tuple(node for node in nodes if node in early and node.op != "placeholder"),
        tuple(_at_first_use(late, crossing.again)),
        tuple(node for node in placeholders_of(joint.graph_module.graph) if node in crossing.inputs),
        tuple(dict.fromkeys(crossing.same.values())),
        crossing.same,
    )


@dataclass
class _Crossing:
    """Collects what crosses from the forward to the backward."""

    joint: Joint
    frozen: frozenset[str]
    kept: dict[object, fx.Node]
    inputs: set[fx.Node] = field(default_factory=set)
    again: set[fx.Node] = field(default_factory=set)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The backward cannot read what the program has written over since: it keeps a copy.
        written = self.joint.written
        unwritten = [
            node for k, node in enumerate(self.joint.inputs) if node is not None and k not in written
        ]
        self._steady = {storage for node in unwritten for storage in storages_of(node.meta["val"])}
        self._unpacked = self._of_weights([node for node in unwritten if node.name in self.frozen])

    def _of_weights(self, weights: Iterable[fx.Node]) -> set[fx.Node]:
        """What is computed from frozen weights alone, the same each time that it is computed."""
        found = set(weights)
        for node in self.joint.graph_module.graph.nodes:
            operands = node.all_input_nodes
            if node.op == "call_function" and operands and found.issuperset(operands) and _repeats(node):
                found.add(node)
        return found

    def take(self, node: fx.Node) -> None:
        storages = storages_of(node.meta["val"])
        lasting = bool(storages) and self._steady.issuperset(storages)
        if node.op == "placeholder" and (lasting or node in self.joint.tangents):
            self.inputs.add(node)
        elif node.op != "placeholder" and ((lasting and is_view(node)) or node in self._unpacked):
            if node not in self.again:
                self.again.add(node)
                for operand in node.all_input_nodes:
                    self.take(operand)
        else:
            self.same[node] = self.kept.setdefault(_identity(node), node)


def _at_first_use(nodes: Iterable[fx.Node], again: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Nodes in order, each of them behind those of `again` that it is the first to need.

    So a weight is unpacked when it is needed, and not beside all others when the backward begins.
    """
    left = set(again)

    def taken(node: fx.Node) -> Iterator[fx.Node]:
        for operand in node.all_input_nodes:
            if operand in left:
                left.remove(operand)
                yield from taken(operand)
                yield operand

    for node in nodes:
        yield from taken(node)
        yield node


def _repeats(node: fx.Node) -> bool:
    """Tells whether an operator has no effect, draws no random numbers, and writes to nothing."""
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


def _needed(results: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that values depend on, these included."""
    found: set[fx.Node] = set()
    left = list(results)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _reached(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on values, these included."""
    found: set[fx.Node] = set()
    left = list(sources)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.users
    return found

"""Several traces of one program in one graph, in which what they have in common stands once.

Each trace takes the gradients of other results. The traces call the same operators in the same order as far
as they compute what no gradient goes into. So a node of one trace is the node of another one that calls the
same operator with the same arguments, and is the k-th to do so in both: two dropouts of one value stay two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from penstock.passes.graph.nodes import placeholders_of
from penstock.schedule.facts.errors import PassError


def align(
    first: fx.GraphModule, other: fx.GraphModule, pairs_given: Collection[str]
) -> dict[fx.Node, fx.Node]:
    """Adds a trace to the graph of a first one, and returns the nodes there of all nodes of the other.

    `given` are the names of the other's placeholders of gradients, which become further inputs; all others
    are those of equal names. Raises PassError where the other trace would have an effect a second time.
    """
    keys = _Keys()
    known = {
        key: node
        for node in first.graph.nodes
        if node.op != "output" and (key := keys.key(node, {})) is not None
    }
    inputs = {node.name: node for node in placeholders_of(first.graph)}
    last = placeholders_of(first.graph)[-1]
    keys = _Keys()
    here: dict[fx.Node, fx.Node] = {}
    behind: set[fx.Node] = set()
    for node in other.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            if node.name in pairs_given:
                with first.graph.inserting_after(last):
                    here[node] = last = first.graph.placeholder(f"{node.name}_again")
                last.target, last.meta = last.name, dict(node.meta)
                behind.add(node)
            else:
                here[node] = inputs[node.name]
            continue
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        key = None if node in behind else keys.key(node, here)
        twin = known.get(key) if key is not None else None
        if twin is not None and _is_same_attribute(node, twin):
            here[node] = twin
            continue
        if node not in behind and node.op != "get_attr" and node.is_impure():
            raise PassError(
                f"{node.target} has an effect, and the traces for several sets of losses do not agree on it: "
                "compile the sets one by one"
            )
        here[node] = _copied(first, node, here)
    return here


class _Keys:
    """Numbers the calls of an operator with equal arguments."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def key(self, node: fx.Node, here: Mapping[fx.Node, fx.Node]) -> Hashable:
        """What a node calls, with which arguments, for the how manieth time; None for a placeholder."""
        if node.op == "placeholder":
            return None
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: here.get(argument, argument))
        called = node.op, node.target, repr(arguments)
        self._counts[called] += 1
        return (*called, self._counts[called])


def _copied(graph_module: fx.GraphModule, node: fx.Node, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node of another module at the end of a graph, with the attribute that it reads."""
    graph = graph_module.graph
    with graph.inserting_before(graph.output_node()):
        copied = graph.node_copy(node, here.__getitem__)
    if node.op == "get_attr":
        number, name = 0, str(node.target).replace(".", "_")
        while hasattr(graph_module, f"{name}_{number}"):
            number += 1
        setattr(graph_module, f"{name}_{number}", _attribute(node))
        copied.target = f"{name}_{number}"
    return copied


def _is_same_attribute(node: fx.Node, other: fx.Node) -> bool:
    return node.op != "get_attr" or is_equal(_attribute(node), _attribute(other))


def _attribute(node: fx.Node) -> Any:
    attribute: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        attribute = getattr(attribute, name)
    return attribute


def is_equal(first: Any, other: Any) -> bool:
    """Tells whether two attributes of graphs have the same value: tensors, or graphs without tensors."""
    if isinstance(first, fx.GraphModule) and isinstance(other, fx.GraphModule):
        values = [*first.state_dict().values(), *other.state_dict().values()]
        return not values and codes(first) == codes(other)
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        return first is other or (
            first.dtype == other.dtype and first.shape == other.shape and torch.equal(first, other)
        )
    return first is other


def codes(graph_module: fx.GraphModule) -> list[str]:
    """The code of a graph and of all graphs within it."""
    return [part.code for part in graph_module.modules() if isinstance(part, fx.GraphModule)]

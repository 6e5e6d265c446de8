"""Which inputs of a graph are weights: by facts in `node.meta`, or else by the names that export gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from penstock.passes.graph.nodes import dtype_name, placeholders_of
from penstock.schedule.facts.errors import PassError, PayloadError
from penstock.schedule.facts.model import Weight

if TYPE_CHECKING:
    from penstock.schedule.payload.codec import Payload

FACTS = "penstock"
"""The key of penstock's facts in `node.meta["custom"]`, which torch hands on where it retraces a program."""


def facts_of(node: fx.Node) -> dict[str, Any]:
    """Returns the facts of a node: plain values by name, and empty if it has none."""
    return dict(node.meta.get("custom", {}).get(FACTS, {}))


def add_facts(node: fx.Node, **facts: object) -> None:
    """Gives a node more facts. Neighbours that share its meta with it do not get them."""
    custom = node.meta.get("custom", {})
    node.meta = {**node.meta, "custom": {**custom, FACTS: {**custom.get(FACTS, {}), **facts}}}


def weights_among(graph_module: fx.GraphModule, payload: Payload, method: str) -> dict[str, Weight]:
    """Returns the weights of a method by the names of the inputs of its graph that hold them.

    Raises PassError if a weight that the method reads is not among them, and PayloadError if an input holds
    a weight that the payload does not have.
    """
    known = {weight.fqn: weight for weight in payload.tensors}
    inputs = {leaf.name for called in payload.methods if called.name == method for leaf in called.inputs}
    labels = _labels(known, method)
    weights: dict[str, Weight] = {}
    for node in placeholders_of(graph_module.graph):
        fqn = facts_of(node).get("weight")
        if fqn is None and inputs.isdisjoint((node.name, node.target)):
            fqn = labels.get(node.name)
        if fqn is not None:
            weights[node.name] = _checked(node, fqn, known)
    _refuse_lost(graph_module, payload, method, weights)
    return weights


def _labels(known: Mapping[str, Weight], method: str) -> dict[str, str]:
    """FQNs by the names that torch.export gives to their inputs: equal ones are numbered, as it does."""
    labels: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for fqn, weight in known.items():
        # Constants that several methods number alike have the method before their name in a payload.
        short = fqn.removeprefix(f"{method}.") if weight.role == "constant" else fqn
        base = label = f"{weight.role[0]}_" + re.sub(r"[^a-z0-9]", "_", short.lower())
        if label in labels:
            label = f"{base}_{numbers[base] + 1}"
        if match := re.fullmatch(r"(.*)_(\d+)", label):
            numbers[match[1]] = max(numbers[match[1]], int(match[2]))
        labels[label] = fqn
    return labels


def _checked(node: fx.Node, fqn: str, known: Mapping[str, Weight]) -> Weight:
    value = node.meta.get("val")
    if fqn not in known:
        raise PayloadError(
            f"the graph reads the weight {fqn!r}, which the payload does not have: this payload is of "
            "another model; load the one that was written with this graph"
        )
    part = known[fqn].parts[0]
    if isinstance(value, torch.Tensor):
        got = (dtype_name(value.dtype), tuple(value.shape))
        if got != (part.dtype, part.shape):
            raise PayloadError(
                f"the graph's weight {fqn!r} is {_described(got)}, and the payload's is "
                f"{_described((part.dtype, part.shape))}: this payload is of another model; load the one "
                "that was written with this graph"
            )
    return known[fqn]


def _refuse_lost(
    graph_module: fx.GraphModule, payload: Payload, method: str, weights: Mapping[str, Weight]
) -> None:
    there = {weight.parts[0].storage for weight in weights.values()}
    read = {s for t in payload.traces if t.method == method for step in t.steps for s in step.reads}
    if read <= there:
        return
    names, inputs = payload.storage_names(), [n.name for n in placeholders_of(graph_module.graph)]
    lost = next(names[s] for s in sorted(read - there))
    raise PassError(
        f"no input of the graph is the weight {lost!r} that method {method!r} reads (the inputs are "
        f"{', '.join(inputs[:3]) or 'none'}{', ...' * (len(inputs) > 3)}): a pass has renamed its inputs, or "
        "folded its weights into constants; annotate the graph before that pass, and inputs keep their names"
    )


def _described(dtype_and_shape: tuple[str, tuple[int, ...]]) -> str:
    return f"{dtype_and_shape[0]} of shape {list(dtype_and_shape[1])}"

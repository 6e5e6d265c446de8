"""A joint graph whose backward runs autograd itself, on one segment of the forward after another.

It is for programs whose backward has no trace: an operator that reads values in its gradient, for one. The
forward, which has a trace, is cut where least goes from one segment to the next, and keeps that. What is
random in a segment is drawn again from the state of the generator in front of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.graph.nodes import needed, placeholders_of, tensors_of
from penstock.passes.graph.propagation import fake_inputs, fake_mode_of, storages_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.training.joint import Joint, trace_forward
from penstock.passes.training.partition import boundaries, forward_of, may_draw, unpacked
from penstock.passes.training.rerun import RANDOM_STATE, SEGMENT_GRADIENTS
from penstock.passes.weights.lifted import Weights
from penstock.schedule.facts.errors import PassError

_Gradients = dict[fx.Node, fx.Node]


def segment_joint(
    exported: ExportedProgram, weights: Weights, trainable: Collection[str], losses: Sequence[Collection[int]]
) -> list[Joint]:
    """Returns what `trace_joint` does, with a backward whose nodes are the gradients of segments.

    Raises PassError where autograd cannot trace the forward.
    """
    if not trainable:
        raise PassError("nothing is trained: name parameters, or give an example whose inputs require grad")
    union = {k for names in losses for k in names}
    joint = trace_forward(exported, weights, trainable, union)
    frozen = weights.held.keys() - {*trainable}
    requiring = _requiring(joint, weights, trainable)
    segments = _segments(joint, frozen, requiring)
    joints: list[Joint] = []
    tangent_nodes: list[fx.Node] = []
    for names in losses:
        tangents = tuple(
            _tangent(joint, k) if k in names and node in requiring else None
            for k, node in enumerate(joint.results)
        )
        tangent_nodes += [node for node in tangents if node is not None]
        left_out = frozenset(
            k for k, node in enumerate(joint.results) if node in requiring and k not in names
        )
        joints.append(replace(joint, tangents=tangents, left_out=left_out))
    with_gradients = [
        replace(divided, gradients=_backward(divided, segments, requiring)) for divided in joints
    ]
    joint.graph_module.graph.lint()
    joint.graph_module.recompile()
    return [replace(divided, given=tuple(tangent_nodes)) for divided in with_gradients]


@dataclass(frozen=True)
class _Segment:
    """A segment that gradients go through: the name of its body, and the nodes of what goes in and out.

    `state` is the state of random numbers in front of it, None if it draws none.
    """

    body: str
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: fx.Node | None


@kept_torch_state()
def _requiring(joint: Joint, weights: Weights, trainable: Collection[str]) -> set[fx.Node]:
    """The nodes of a forward whose values require grad when the inputs `trainable` do."""
    nodes: set[fx.Node] = set()

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "placeholder" and n.name in trainable:
                result = result.detach().requires_grad_()
            if isinstance(result, torch.Tensor) and result.requires_grad:
                nodes.add(n)
            return result

    inputs = fake_inputs(joint.graph_module, weights)
    sizes = (mode := fake_mode_of(inputs)).shape_env
    fresh = sizes.ignore_fresh_unbacked_symbols() if sizes else nullcontext()  # numbers out of tensors
    with torch.enable_grad(), mode, fresh:
        Noting(joint.graph_module).run(*inputs)
    return nodes


def _segments(joint: Joint, frozen: Collection[str], requiring: set[fx.Node]) -> list[_Segment]:
    """The segments that gradients go through, the last one first; the graph's module gets their bodies."""
    early = forward_of(joint)
    nodes = [node for node in joint.graph_module.graph.nodes if node in early]
    derived = _derived(joint, frozen, nodes)
    outside = derived | _kept(joint)
    starts = [0, *(nodes.index(node) for node in boundaries(joint, frozen)), len(nodes)]
    parts = [
        [node for node in nodes[a:b] if node.op != "placeholder" and node not in outside]
        for a, b in pairwise(starts)
    ]
    shown = {node for node in joint.results if node is not None}
    segments: list[_Segment] = []
    for number, part in reversed([*enumerate(parts)]):
        outputs = tuple(node for node in part if node in shown and node in requiring)
        if not outputs:
            continue
        segment = _cut(joint, f"segment_{number}", (part, outputs), derived)
        shown.update(segment.inputs)
        segments.append(segment)
    return segments


def _kept(joint: Joint) -> set[fx.Node]:
    """What no segment computes: copies of inputs that are written to."""
    written = [node for k in joint.written if (node := joint.inputs[k]) is not None]
    return {copied for node in written for copied in node.users}


def _derived(joint: Joint, frozen: Collection[str], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What each segment computes for itself: views of frozen weights, and what is made of these alone."""
    frozen_inputs = [node for node in joint.inputs if node is not None and node.name in frozen]
    storages = {storage for node in frozen_inputs for storage in storages_of(node.meta["val"])}
    views = {
        node
        for node in nodes
        if node.op != "placeholder"
        and (storages_of_node := storages_of(node.meta.get("val")))
        and storages.issuperset(storages_of_node)
    }
    return views | unpacked(joint, frozen)


def _cut(
    joint: Joint, name: str, part: tuple[Sequence[fx.Node], tuple[fx.Node, ...]], derived: set[fx.Node]
) -> _Segment:
    """Makes the body of a segment, which computes the outputs from what other segments and inputs give."""
    nodes, outputs = part
    random = [node for node in nodes if may_draw(node)]
    own_nodes = {*nodes, *derived}
    inside = needed([*outputs, *random], own_nodes.__contains__)
    order = [node for node in joint.graph_module.graph.nodes if node in inside]
    inputs = tuple(
        dict.fromkeys(operand for node in order for operand in node.all_input_nodes if operand not in inside)
    )
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    if any(node.op == "get_attr" for node in (*order, *inputs)):
        raise PassError("a body of control flow stands in a segment: compile with backward='joint'")
    for node in inputs:
        here[node] = graph.placeholder(node.name)
        here[node].meta = {"val": node.meta["val"]}
    for node in order:
        here[node] = graph.node_copy(node, here.__getitem__)
    graph.output(tuple(here[node] for node in outputs))
    joint.graph_module.add_module(name, fx.GraphModule({}, graph))
    state = None
    if random:
        _refuse_accelerators(random)
        with joint.graph_module.graph.inserting_before(random[0]):
            state = joint.graph_module.graph.call_function(RANDOM_STATE)
        with fake_mode_of([node.meta.get("val") for node in nodes]):
            state.meta["val"] = RANDOM_STATE()
    return _Segment(name, inputs, outputs, state)


def _refuse_accelerators(random: Sequence[fx.Node]) -> None:
    for node in random:
        for tensor in tensors_of(node.meta.get("val")):
            if tensor.device.type != "cpu":
                raise PassError(
                    f"{node.target} may draw random numbers on {tensor.device}, and backward='segments' "
                    "knows the CPU's generator only: export the program for the CPU, or use backward='joint'"
                )


def _tangent(joint: Joint, number: int) -> fx.Node:
    """A new input of the graph: the gradient of a result."""
    value: Any = joint.results[number]
    graph = joint.graph_module.graph
    with graph.inserting_after(placeholders_of(graph)[-1]):
        node = graph.placeholder(f"gradient_{number}_{len(placeholders_of(graph))}")
    with fake_mode_of([value.meta["val"]]):
        node.meta["val"] = torch.empty_like(value.meta["val"])
    return node


def _backward(joint: Joint, segments: Sequence[_Segment], requiring: set[fx.Node]) -> dict[int, fx.Node]:
    """Adds the nodes of a backward to the graph, and returns the gradients of inputs by number."""
    graph, gradients = joint.graph_module.graph, _Gradients()
    with graph.inserting_before(graph.output_node()):
        for result, tangent in zip(joint.results, joint.tangents, strict=True):
            if result is not None and tangent is not None:
                if result in gradients:
                    raise PassError("two results of losses= are one value: leave one of them out")
                gradients[result] = tangent
        for segment in segments:
            _add(graph, segment, gradients, requiring)
    numbers: Mapping[Any, int] = {node: k for k, node in enumerate(joint.inputs) if node is not None}
    return {numbers[node]: gradient for node, gradient in gradients.items() if node in numbers}


def _add(graph: fx.Graph, segment: _Segment, gradients: _Gradients, requiring: set[fx.Node]) -> None:
    reached = [k for k, node in enumerate(segment.outputs) if node in gradients]
    if not reached:
        return
    wanted = [k for k, node in enumerate(segment.inputs) if node in requiring]
    begun = [k for k in wanted if segment.inputs[k] in gradients]
    operands = [segment.state] if segment.state is not None else []
    operands += [gradients[segment.outputs[k]] for k in reached]
    operands += [gradients[segment.inputs[k]] for k in begun]
    body = graph.get_attr(segment.body)
    arguments = (body, (*wanted,), (*reached,), (*begun,), segment.state is not None)
    computed = graph.call_function(SEGMENT_GRADIENTS, (*arguments, *operands, *segment.inputs))
    values = [segment.inputs[k].meta["val"] for k in wanted]
    with fake_mode_of(values):
        computed.meta["val"] = tuple(torch.empty_like(value) for value in values)
    for position, k in enumerate(wanted):
        gradient = graph.call_function(getitem, (computed, position))
        gradient.meta["val"] = computed.meta["val"][position]
        gradients[segment.inputs[k]] = gradient

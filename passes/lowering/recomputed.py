"""What a stored graph does with the weights, found out again from the graph before it may run.

Whoever made an artifact has said which steps read which weights. A read that stands in no step finds memory
that nobody has filled, and a write may meet memory that is mapped, so neither is taken on trust: the graph is
followed as it was when it was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.passes.building.refusals import sentence
from penstock.passes.calls.checks import ConstantLeaf, Dimension, Leaf, TensorLeaf
from penstock.passes.graph.dry_run import dry_run
from penstock.passes.graph.in_place import is_dense
from penstock.passes.graph.nodes import subgraphs_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.graph.retarget import indexed, move_graph, nested_modules
from penstock.passes.lowering.method_code import MethodCode
from penstock.passes.probes import STORE
from penstock.passes.sparse.contracts import readers_by_units
from penstock.passes.weights.usage import Flow, follow
from penstock.passes.weights.values import tensor_in
from penstock.schedule.facts.errors import TRUST, PayloadError
from penstock.schedule.facts.model import IN_ARENA, Method
from penstock.schedule.payload.codec import Payload

OTHERS = "payload and program are not of one compilation, compile again"


def check_uses(payload: Payload, method: Method, code: MethodCode) -> None:
    """Raises PayloadError unless a method's graph reads each weight in the steps of its trace that say so.

    Weights that it writes are mutable, and those that a result shares memory with never stream. Raises it
    also for a node that cannot run at the sizes that the program was exported for. All this is found on fake
    tensors, for which no memory is taken.
    """
    try:
        flow, graph, numbers = _followed(payload, code)
    except Exception as error:  # of torch, for a graph that is none
        raise PayloadError(
            f"method {method.name!r} cannot be followed without running it: {sentence(error)}; "
            f"compile again, or {TRUST}"
        ) from error
    stores = _checked_stores(payload, method, graph, numbers)
    sized = {s: storage.kind for s, storage in enumerate(payload.storages) if storage.nbytes}
    streams = {s for s, kind in sized.items() if kind in IN_ARENA}
    _check_units(payload, method, graph, numbers)
    unwritten = set().union(*stores.values())
    brought: dict[str, set[int]] = {}
    for step in payload.trace_for(method.graph).steps:
        brought.setdefault(step.name, set()).update(step.reads, step.writes)
    for node, storages in flow.reads.items():  # in the order in which they run
        unwritten -= stores.get(node, set())
        for s in unwritten.intersection(storages):
            _refuse(payload, method, s, f"is read by {node}, before it is written")
        for s in streams.intersection(storages) - brought.get(node, set()):
            _refuse(payload, method, s, f"is read by {node}, and no step of that name in its trace says so")
    for s in flow.written:
        if sized.get(s, "mutable") not in ("mutable", "produced"):
            _refuse(payload, method, s, "is written, and is no mutable weight")
    for s in streams & flow.escaping:
        _refuse(payload, method, s, "is in memory that a result shares, and streams")


def _check_units(payload: Payload, method: Method, graph: fx.Graph, numbers: dict[int, int]) -> None:
    """Raises PayloadError unless nodes that read by units, by the trace, need no more of the weight."""
    readers, reason = readers_by_units(graph), "is read by units by {}, which needs all of it"
    for step in payload.trace_for(method.graph).steps:
        for read in step.sparse:
            if numbers.get(readers.get(step.name, 0)) != read.storage:
                _refuse(payload, method, read.storage, reason.format(step.name))


def _checked_stores(
    payload: Payload, method: Method, graph: fx.Graph, numbers: dict[int, int]
) -> dict[str, set[int]]:
    """The storages that steps of a method write, by node. `numbers` has them by those of fake tensors.

    Raises PayloadError unless each is a node that fills all of its storage. Only nodes of a method itself are
    steps, so that no body may store.
    """
    filled: dict[str, set[int]] = {}
    for node in (node for node in graph.nodes if node.target is STORE):
        slot, value = (operand.meta["val"] for operand in node.args[:2])
        (place,) = storages_of(slot)
        s, nbytes = numbers.get(place), slot.numel() * slot.itemsize
        if s is not None and place not in storages_of(value) and is_dense(slot):
            filled[node.name] = {s} if nbytes == payload.storages[s].nbytes else set()
    stores = {step.name: set(step.writes) for step in payload.trace_for(method.graph).steps if step.writes}
    for name, storages in stores.items():
        for s in storages - filled.get(name, set()):
            _refuse(payload, method, s, f"is written by the step {name}, which is no node that fills it")
    bodies = [
        body for node in graph.nodes for holder in subgraphs_of(node) for body in nested_modules(holder)
    ]
    if any(node.target is STORE for body in bodies for node in body.graph.nodes):
        raise PayloadError(f"a body in method {method.name!r} stores a value, which no step says: {OTHERS}")
    return stores


def _refuse(payload: Payload, method: Method, storage: int, reason: str) -> NoReturn:
    name = payload.storage_names()[storage]
    raise PayloadError(f"weight {name!r} of method {method.name!r} {reason}: {OTHERS}")


def _followed(payload: Payload, code: MethodCode) -> tuple[Flow, fx.Graph, dict[int, int]]:
    """Runs a method's graph on fake tensors, on a CPU in the place of the program's device.

    Returns the flow, the graph with its values, and the payload's storages by those of the fake tensors.
    """
    graph, device = code.graph(), code.signature.device
    bodies = [module for body in graph.bodies.values() for module in nested_modules(body)]
    move_graph(graph.graph, bodies, device, "cpu")
    owner: Any = nn.Module()  # no GraphModule, which would write the graph as Python
    for name, body in graph.bodies.items():
        setattr(owner, name, body)
    graph.graph.owning_module = owner
    weights = {weight.fqn: weight for weight in payload.tensors}
    stored = [weights[fqn] for _, fqn in code.weights]
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()):
        bases: dict[int, torch.Tensor] = {}
        for weight in stored:
            s = weight.parts[0].storage
            where = "cpu" if indexed(torch.device(weight.device)) == indexed(device) else weight.device
            if s not in bases:
                bases[s] = torch.empty(payload.storages[s].nbytes, dtype=torch.uint8, device=where)
        inputs: list[object] = [
            tensor_in(bases[weight.parts[0].storage], weight.parts[0]) for weight in stored
        ]
        inputs += [
            _example(leaf, device, code.strides.get(k)) for k, leaf in enumerate(code.signature.leaves)
        ]
        numbers = {storages_of(base)[0]: s for s, base in bases.items()}
        dry_run(graph.graph, inputs, frozenset(numbers))
        return follow(graph.graph, numbers, _run_body), graph.graph, numbers


def _run_body(body: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
    dry_run(body.graph, inputs, frozenset(s for value in inputs for s in storages_of(value)))
    return body


def _example(leaf: Leaf, device: torch.device, stride: tuple[int, ...] | None) -> object:
    """A leaf as it was when the program was exported, without values."""
    if isinstance(leaf, ConstantLeaf):
        return leaf.value
    if isinstance(leaf, TensorLeaf):
        sizes = [size.example if isinstance(size, Dimension) else size for size in leaf.sizes]
        where = "cpu" if leaf.device == device.type else leaf.device
        if stride is not None:
            return torch.empty_strided(sizes, stride, dtype=leaf.dtype, device=where)
        return torch.empty(sizes, dtype=leaf.dtype, device=where)
    return leaf.type(1) if leaf.dimension is None else leaf.dimension.example

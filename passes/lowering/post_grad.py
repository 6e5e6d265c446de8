"""What is changed in the graph that Inductor is about to lower: probes go in, written buffers are mended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.graph_module import _assign_attr

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.probes import ACQUIRE, RELEASE
from penstock.passes.trace import steps_of
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.usage import Flow, follow_weights
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Step, Work
from penstock.schedule.payload.codec import Payload

aten = torch.ops.aten

_KERNELS_OF_THEIR_OWN = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "_grouped_mm",
    "_scaled_mm",
    "linear",
)
"""Operators with a lowering that other nodes are not inlined into."""

GraphPass = Callable[[fx.Graph], None]


@dataclass(frozen=True)
class PlacedProbes:
    """The probes in a graph, in order: for each a step, of its node. `tail` is the work behind the last one.

    A step's `reads` are storages of the catalog, and its times are 0.
    """

    steps: tuple[Step, ...]
    tail: Work


class ProbePass(CustomGraphPass):
    """Puts an acquire before every read of a streamable weight, and a release behind it.

    A ProbePass serves one compilation. It changes only the graph that holds the weights, and not the bodies
    of control flow, which Inductor lowers as well. `before` are the passes that would run without this one.
    With `inputs`, it changes only a graph with that many inputs, and checks its use of the weights: PassError
    is raised if the graph writes a weight or returns an alias of one.
    """

    def __init__(
        self,
        number: int,
        weights: Weights,
        name_of: Callable[[fx.Node], str | None],
        before: Sequence[GraphPass] = (),
        *,
        inputs: int | None = None,
    ) -> None:
        self._number, self._weights, self._name_of, self._before = number, weights, name_of, tuple(before)
        self._inputs = inputs
        self.placed: PlacedProbes | None = None
        self.input_names: dict[int, str] = {}

    def __call__(self, graph: fx.Graph) -> None:
        for run in self._before:
            run(graph)
        entries = placeholders_of(graph)
        if self._inputs not in (None, len(entries)):
            return
        names = {node: name for node in graph.nodes if (name := self._name_of(node)) is not None}
        if not names:
            return
        if self.placed is not None:
            raise PassError(
                "Inductor lowered the program's graph twice in one compilation, expected once: turn off what "
                "compiles it for several shapes or devices"
            )
        self.input_names = {i: node.name for i, node in enumerate(entries)}
        propagated, flow = follow_weights(*with_weights_as_inputs(graph, names, self._weights))
        if self._inputs is not None:
            check_flow(flow, names, self._weights)
        operands = _operands(names, self._weights)
        steps, tail = steps_of(propagated.graph, flow.reads, operands)
        _insert(graph, self._number, operands, steps)
        self.placed = PlacedProbes(steps, tail)
        graph.lint()

    def __deepcopy__(self, memo: object) -> ProbePass:
        """Returns this pass itself: Inductor copies its options, and `placed` is read from the original."""
        return self

    def uuid(self) -> bytes:
        """Returns a hash for Inductor's cache, which differs if the probes or the passes before differ."""
        digest = hashlib.sha256()
        for run in self._before:
            identity = run.uuid() if isinstance(run, CustomGraphPass) else repr(run)
            digest.update(repr(identity).encode())
        digest.update(repr((self._number, self._weights)).encode())
        return digest.digest()


def _operands(names: Mapping[fx.Node, str], weights: Weights) -> dict[int, list[fx.Node]]:
    operands: dict[int, list[fx.Node]] = {}
    for node, name in names.items():
        storage = weights.storage_of(name)
        if node.users and weights.storages[storage].kind == "streamable":
            operands.setdefault(storage, []).append(node)
    return operands


def _insert(
    graph: fx.Graph, number: int, operands: Mapping[int, Sequence[fx.Node]], steps: Sequence[Step]
) -> None:
    by_name = {node.name: node for node in graph.nodes}
    readers = [by_name[step.name] for step in steps]
    for probe, (step, reader) in enumerate(zip(steps, readers, strict=True)):
        arguments = ([node for s in step.reads for node in operands[s]], number, probe)
        with graph.inserting_before(reader):
            graph.call_function(ACQUIRE, arguments)
        # The release of an inlined node waits behind the next read, or at the end.
        behind = readers[probe + 1 : probe + 2] if _is_inlined(reader) else [reader]
        with graph.inserting_after(behind[0]) if behind else graph.inserting_before(graph.output_node()):
            graph.call_function(RELEASE, arguments)


def with_weights_as_inputs(
    graph: fx.Graph, names: Mapping[fx.Node, str], weights: Weights
) -> tuple[fx.GraphModule, Weights]:
    """Returns a copy of the graph in which weights are inputs, and the weights by the inputs' names."""
    copied, values = fx.Graph(), {}
    for node in names:
        values[node] = copied.placeholder(node.name)
        values[node].meta = dict(node.meta)
    inputs = {values[node].name: weights.held[fqn] for node, fqn in names.items()}
    for node in graph.nodes:
        if node not in values:
            values[node] = copied.node_copy(node, values.__getitem__)
            values[node].name = node.name
    module = fx.GraphModule(graph.owning_module or torch.nn.Module(), copied)
    return module, replace(weights, held=inputs)


def check_flow(flow: Flow, names: Mapping[fx.Node, str], weights: Weights) -> None:
    """Raises PassError for a weight that the graph writes or returns, since it cannot leave memory."""
    for title, storages in (("written", flow.written), ("returned, or aliased by what is,", flow.escaping)):
        for name in names.values():
            if weights.storage_of(name) in storages:
                raise PassError(
                    f"weight {name!r} is {title} by the compiled graph, so that it cannot be streamed: "
                    "make it a buffer, or copy what is handed out (clone)"
                )


def _is_inlined(node: fx.Node) -> bool:
    """Tell whether Inductor may compute the node within the kernels of its users."""
    from torch._inductor import lowering

    if not isinstance(node.target, OpOverload) or node.target in lowering.fallbacks:
        return False
    return node.target in lowering.lowerings and node.target._opname not in _KERNELS_OF_THEIR_OWN


INLINED = 8
"""The most elements of a tensor that the compiler may copy into the code."""


def options_for(payload: Payload) -> Mapping[str, Any]:
    """Options of Inductor for programs of which a method writes a buffer that a compiler would inline."""
    written = any(
        payload.storages[part.storage].kind == "mutable" and prod(part.shape) <= INLINED
        for weight in payload.tensors
        for part in weight.parts
    )
    return {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False} if written else {}


class NamedLiterals(CustomGraphPass):
    """Gives each constant of a program that torch has named anew its name again, which its memory tells."""

    def __init__(self, exported: ExportedProgram) -> None:
        literals = exported.graph_signature.inputs_to_lifted_tensor_constants.values()
        values = {name: exported.constants[name] for name in literals}
        self._names = {value.data_ptr(): name for name, value in values.items() if value.numel()}

    def __call__(self, graph: fx.Graph) -> None:
        module: Any = graph.owning_module
        for node in graph.nodes:
            value = getattr(module, node.target, None) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor) and (name := self._names.get(value.data_ptr())) is not None:
                _assign_attr(value, module, name)
                node.target = name

    def uuid(self) -> bytes:
        """Returns what tells this pass from others, for Inductor's cache."""
        return f"penstock: names of literals {sorted(self._names.values())}".encode()


class OldValues(CustomGraphPass):
    """Copies each result that shares the memory of a buffer which the graph writes."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, graph: fx.Graph) -> None:
        nodes = (node for node in graph.nodes if node.op == "get_attr")
        buffers = {node: str(node.target) for node in nodes if node.target in self._weights.held}
        writes = [node for node in graph.nodes if node.target is aten.copy_.default]
        if not writes:
            return
        propagated, flow = follow_weights(*with_weights_as_inputs(graph, buffers, self._weights))
        values = {node.name: node.meta.get("val") for node in propagated.graph.nodes}
        written = {
            memory
            for node, name in buffers.items()
            if self._weights.storage_of(name) in flow.written
            for memory in storages_of(values[node.name])
        }
        output = graph.output_node()
        copies: dict[fx.Node, fx.Node] = {}
        for node in output.all_input_nodes:
            if not written.isdisjoint(storages_of(values[node.name])):
                with graph.inserting_before(writes[0]):
                    copies[node] = graph.call_function(aten.clone.default, (node,))
                copies[node].meta = {**node.meta, "val": node.meta["val"].clone()}
        output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))

    def uuid(self) -> bytes:
        """Returns what tells this pass from others, for Inductor's cache."""
        return b"penstock: copies of old values"

"""penstock's passes for any compiler of torch.fx graphs: partitions, a pass, and the one protocol of both.

A compiler calls four things, in this order (docs/backends.md shows it in code):

    annotate    facts into `node.meta`: which inputs are weights, which nodes read which of them
    lower       acquire and release around the reads of the graph as it now is; any number of times
    payload     a key and bytes for the compiler's own container; the weights are written beside it
    load        at run time, with one number: the budget
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.passes.operator_support import OperatorSupportBase

from penstock.backends.running import LoadedPayload, load_payload, payload_key, trace_of
from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.graph.nodes import copy_graph_module, inline_grad_regions, placeholders_of, subgraphs_of
from penstock.passes.graph.transforms import inline_transforms
from penstock.passes.probes import insert_probes, without_probes
from penstock.passes.trace import PRESET_CPU, observe, sum_of
from penstock.passes.weights.lifted import Weights, add_facts, weights_among
from penstock.passes.weights.usage import usage_of
from penstock.runtime.artifact import write_weights
from penstock.runtime.checkpoint.opening import Paths
from penstock.runtime.options import LoadOptions
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Step
from penstock.schedule.facts.parts import read_together
from penstock.schedule.payload.codec import Payload


class Backend(Protocol):
    """All that a compiler needs of penstock. `FxBackend` is it for graphs of torch.fx."""

    def annotate(
        self, exported: ExportedProgram | Mapping[str, ExportedProgram]
    ) -> Mapping[str, fx.GraphModule]:
        """Return a copy of each method's graph, with facts in `node.meta`. No weight is touched.

        Args:
            exported: A program, or several methods `{name: program}`.
        """

    def lower(self, graph_module: fx.GraphModule, method: str = "forward") -> fx.GraphModule:
        """Return a copy with an acquire before every read of a streamed weight, and a release behind it.

        The order of reads is that of the graph given here, after the compiler's passes. Lowering what has
        been lowered gives an equal graph, so it may be called again after later passes.

        Args:
            graph_module: A graph that `annotate` returned, or what passes made of it.
            method: The name of its method.

        Raises:
            PassError: As for `reobserve`.
        """

    def payload(self) -> tuple[str, bytes]:
        """Write the weights, and return the key and the bytes that a container keeps for the program.

        One payload serves all methods, all partitions and every budget.
        """

    def load(self, payload: tuple[str, bytes], budget: int | str) -> LoadedPayload:
        """Start to load the weights of a payload.

        Args:
            payload: The key and the bytes that `payload` returned.
            budget: Bytes of weights in memory at most: a number, `"8GB"`, or `"50%"` of the weights.

        Raises:
            PayloadError: The bytes are not those of the key.
            BudgetError: The budget is below the floor.
            SourceError: The weight files are others.
        """


class FxBackend(Backend):
    """The protocol `Backend` for graphs of torch.fx.

    Args:
        folder: Where the weights lie, beside the container.
        weights: Safetensors files of a checkpoint that are used in place, so that nothing is written.

    Example:
        >>> import pathlib
        >>> backend = penstock.backends.fx.FxBackend(pathlib.Path())
        >>> graph = backend.lower(backend.annotate(exported)["forward"])
        >>> with backend.load(backend.payload(), "50%") as weights:
        ...     torch.equal(weights.bind(graph)(x)[0], model(x))
        True
    """

    def __init__(self, folder: Path, weights: Paths | None = None) -> None:
        self._folder, self._files = folder, weights
        self._annotated: Annotated | None = None

    @property
    def facts(self) -> Payload:
        """The weights, and the order of reads, so far. Raises PassError before `annotate`."""
        return self._known().payload

    def annotate(
        self, exported: ExportedProgram | Mapping[str, ExportedProgram]
    ) -> dict[str, fx.GraphModule]:
        self._annotated = annotated = annotate_with_values(exported)
        return {
            name: with_facts(program.graph_module, annotated.payload, method=name, names=_names(program))
            for name, program in annotated.programs.items()
        }

    def lower(self, graph_module: fx.GraphModule, method: str = "forward") -> fx.GraphModule:
        annotated = self._known()
        lowered, payload = lower(graph_module, annotated.payload, method)
        self._annotated = replace(annotated, payload=payload)
        return lowered

    def observe(self, order: Sequence[Collection[str]], method: str = "forward") -> None:
        """Say in which order a program that is no graph reads its weights, in place of `lower`.

        Args:
            order: The FQNs that each step reads, as for `with_order`, which raises the same.
            method: The name of the method.
        """
        annotated = self._known()
        self._annotated = replace(annotated, payload=with_order(annotated.payload, order, method=method))

    def payload(self) -> tuple[str, bytes]:
        annotated = self._known()
        if not annotated.payload.files:
            written = write_weights(annotated, self._folder, self._files)
            self._annotated = annotated = replace(annotated, payload=written)
        data = annotated.payload.to_bytes()
        return payload_key(data), data

    def load(
        self,
        payload: tuple[str, bytes],
        budget: int | str,
        *,
        keep: tuple[str, ...] = (),
        options: LoadOptions | None = None,
    ) -> LoadedPayload:
        """Do what `Backend.load` does, which describes `payload` and `budget`.

        Args:
            keep: FQN patterns of weights that never leave memory.
            options: How weights come into memory.
        """
        return load_payload(payload, budget, self._folder, keep=keep, options=options)

    def _known(self) -> Annotated:
        if self._annotated is None:
            raise PassError("nothing has been annotated: call annotate(exported) first")
        return self._annotated


def with_facts(
    graph_module: fx.GraphModule,
    payload: Payload,
    *,
    method: str | None = None,
    names: Mapping[str, str] | None = None,
) -> fx.GraphModule:
    """Return a copy of a graph with facts in `node.meta["custom"]["penstock"]`, as plain values.

    An input that holds a weight has `weight` (its FQN). A node that reads weights that stream has `step` (its
    position in the order of reads), `reads` (FQNs) and `nbytes` (of the storages that it reads).

    Args:
        graph_module: The graph.
        payload: What `annotate` returned.
        method: The name of its method. Default: the only one.
        names: FQNs of inputs by their names, where the graph has neither facts nor the names of an export.

    Raises:
        PassError: The weights of the graph have lost their names; or as for `reobserve`.

    Example:
        >>> graph = penstock.backends.fx.with_facts(exported.graph_module, penstock.annotate(exported))
        >>> next(iter(graph.graph.nodes)).meta["custom"]["penstock"]
        {'weight': '0.weight'}
    """
    method = _method(payload, method)
    copied = inline_grad_regions(inline_transforms(copy_graph_module(graph_module)))
    for node in placeholders_of(copied.graph):
        if names is not None and node.name in names:
            add_facts(node, weight=names[node.name])
    weights = weights_among(copied, payload, method)
    observed = reobserve(copied, payload, method)
    steps = {step.name: (k, step.reads) for k, step in enumerate(trace_of(observed, method).steps)}
    storages, fqns = payload.storages, payload.storage_names()
    for node in copied.graph.nodes:
        if node.name in weights:
            add_facts(node, weight=weights[node.name].fqn)
        elif node.name in steps:
            step, reads = steps[node.name]
            nbytes = sum(storages[s].nbytes for s in reads)
            add_facts(node, step=step, reads=[fqns[s] for s in reads], nbytes=nbytes)
    return copied


def reobserve(graph_module: fx.GraphModule, payload: Payload, method: str | None = None) -> Payload:
    """Return the payload with the order in which a method's graph reads its weights now.

    Passes have fused, moved or decomposed nodes since it was annotated. A region that became a graph module
    is one step.

    Args:
        graph_module: The graph.
        payload: The payload before.
        method: The name of its method. Default: the only one.

    Raises:
        PassError: The graph writes or returns a weight that streamed before, calls a module that is no graph
            module, or there is no such method.

    Example:
        >>> payload = penstock.annotate(exported)
        >>> penstock.backends.fx.reobserve(exported.graph_module, payload).traces == payload.traces
        True
    """
    method = _method(payload, method)
    opaque = [n for n in graph_module.graph.nodes if n.op == "call_module" and not subgraphs_of(n)]
    if opaque:
        raise PassError(
            f"node {opaque[0].name!r} calls a module that is no graph, so what it reads cannot be seen: "
            "lower the graph before its regions are replaced by compiled code"
        )
    weights = weights_among(graph_module, payload, method)
    usage = usage_of(graph_module, Weights(weights, payload.storages))
    names = payload.storage_names()
    for s, (kind, storage) in enumerate(zip(usage.kinds, payload.storages, strict=True)):
        if kind != "streamable" and storage.kind == "streamable":
            state = "written" if kind == "mutable" else "returned, or aliased by what is returned,"
            raise PassError(
                f"weight {names[s]!r} is {state} by the graph, and was not when it was annotated: leave the "
                "weight out of that pass, or annotate the program behind it"
            )
    described = next(candidate for candidate in payload.methods if candidate.name == method)
    trace = read_together(observe(usage, payload.storages, described, PRESET_CPU), payload.weights)
    traces = tuple(trace if before.method == method else before for before in payload.traces)
    return replace(payload, traces=traces)


def with_order(payload: Payload, order: Sequence[Collection[str]], *, method: str | None = None) -> Payload:
    """Return the payload with the order of reads that a compiler reports of its own code.

    Work is that of the annotated nodes that read the same, each counted once.

    Args:
        payload: The payload before.
        order: For each step, the FQNs of the weights that it reads; those that never stream may be among
            them.
        method: The name of the method. Default: the only one.

    Raises:
        PassError: A name is no weight's, a step reads nothing that streams, or no step reads a weight that
            was read before.

    Example:
        >>> order = [[f"{k}.weight", f"{k}.bias"] for k in range(4)]
        >>> payload = penstock.backends.fx.with_order(penstock.annotate(exported), order)
        >>> [step.name for step in payload.traces[0].steps]
        ['step_0', 'step_1', 'step_2', 'step_3']
    """
    before = trace_of(payload, _method(payload, method))
    storages = {weight.fqn: weight.parts[0].storage for weight in payload.tensors}
    names = payload.storage_names()
    left, steps = list(before.steps), []
    for k, fqns in enumerate(order):
        unknown = [fqn for fqn in fqns if fqn not in storages]
        if unknown:
            raise PassError(
                f"step {k} reads {unknown[0]!r}, which is no weight of the payload: the compiler has renamed "
                "or folded its weights; have weights keep their names"
            )
        reads = {s for fqn in fqns if payload.storages[s := storages[fqn]].kind == "streamable"}
        if not reads:
            raise PassError(
                f"step {k} of {len(order)} reads no weight that streams: count it to the step before"
            )
        same = [step for step in left if reads.issuperset(step.reads)]
        left = [step for step in left if step not in same]
        lead, read = sum_of(*(step.lead_work for step in same)), sum_of(*(step.read_work for step in same))
        steps.append(Step(f"step_{k}", tuple(sorted(reads)), 0, 0, lead, read))
    missing = {s for step in before.steps for s in step.reads}.difference(*(step.reads for step in steps))
    if missing:
        raise PassError(
            f"no step reads the weight {names[min(missing)]!r}, which the annotated program reads: the "
            "compiler has folded it or merged it with another, or the order lacks a read; have weights keep "
            "their names"
        )
    trace = with_times(replace(before, steps=tuple(steps)), PRESET_CPU)
    trace = read_together(trace, payload.weights)
    return replace(payload, traces=tuple(trace if other is before else other for other in payload.traces))


def lower(
    graph_module: fx.GraphModule, payload: Payload, method: str | None = None
) -> tuple[fx.GraphModule, Payload]:
    """Return a copy of the graph with probes around its reads, and the payload with their order.

    Probes that the graph has are placed anew.

    Args:
        graph_module: The graph.
        payload: The payload before.
        method: The name of its method. Default: the only one.

    Raises:
        PassError: As for `reobserve`.

    Example:
        >>> graph, payload = penstock.backends.fx.lower(exported.graph_module, penstock.annotate(exported))
        >>> sum("acquire" in str(node.target) for node in graph.graph.nodes)
        4
    """
    bare = with_facts(without_probes(graph_module), payload, method=method)
    payload = reobserve(bare, payload, method)
    return insert_probes(bare, payload, method=method), payload


def torch_pass(run: Callable[[fx.GraphModule], fx.GraphModule]) -> Callable[[fx.GraphModule], PassResult]:
    """Return a pass for torch's `PassManager`, whose result counts as modified if its code is another.

    Args:
        run: A pass of penstock's kind, which takes a graph module and returns one: `FxBackend.lower`, a
            `Pipeline`, and every pass of docs/passes.md.

    Example:
        >>> run = penstock.backends.fx.torch_pass(lambda graph_module: graph_module)
        >>> run(exported.graph_module).modified
        False
    """

    def run_pass(graph_module: fx.GraphModule) -> PassResult:
        result = run(graph_module)
        return PassResult(result, result.code != graph_module.code)

    return run_pass


@dataclass(frozen=True)
class AnnotatedPartition:
    """Nodes that become one region.

    Attributes:
        nodes: The nodes, in the order of the graph.
        steps: Their positions in the order of reads.
        weights: The FQNs of the weights that they read and that stream.
        nbytes: Bytes of these: the least that a budget needs for the region once it is one step.
    """

    nodes: tuple[fx.Node, ...]
    steps: tuple[int, ...]
    weights: tuple[str, ...]
    nbytes: int


def annotated_partitions(
    graph_module: fx.GraphModule,
    payload: Payload,
    *,
    method: str | None = None,
    supported: OperatorSupportBase | None = None,
) -> tuple[AnnotatedPartition, ...]:
    """Return the regions of a graph that read streamed weights, in the order of their first reads.

    torch's `CapabilityBasedPartitioner` finds them. The facts of a region's nodes get its number,
    `partition`; nothing else of the graph is changed.

    Args:
        graph_module: The graph.
        payload: What `annotate` returned.
        method: The name of its method. Default: the only one.
        supported: Says which nodes a compiler takes. Default: those that read streamed weights.

    Raises:
        PassError: No region reads a weight that streams, or the weights of the graph have lost their names.

    Example:
        >>> payload = penstock.annotate(exported)
        >>> graph = penstock.backends.fx.with_facts(exported.graph_module, payload)
        >>> (region,) = penstock.backends.fx.annotated_partitions(graph, payload)
        >>> region.steps, region.nbytes
        ((0, 1, 2, 3), 66560)
    """
    method = _method(payload, method)
    if inline_grad_regions(graph_module) is not graph_module:
        raise PassError("the graph has regions of another grad mode: take the graph that annotate() returns")
    trace = trace_of(reobserve(graph_module, payload, method), method)
    by_name = {step.name: (k, step.reads) for k, step in enumerate(trace.steps)}
    chosen = supported or NamedNodes(frozenset(by_name))
    partitioner = CapabilityBasedPartitioner(graph_module, chosen, allows_single_node_partition=True)
    order = {node: position for position, node in enumerate(graph_module.graph.nodes)}
    partitions = []
    proposed = partitioner.propose_partitions()
    names = payload.storage_names()
    for nodes in (sorted(_with_bodies(proposal.nodes), key=order.__getitem__) for proposal in proposed):
        reading = [by_name[node.name] for node in nodes if node.name in by_name]
        storages = sorted({s for _, reads in reading for s in reads})
        if reading:
            nbytes = sum(payload.storages[s].nbytes for s in storages)
            steps = tuple(sorted(k for k, _ in reading))
            weights = tuple(names[s] for s in storages)
            partitions.append(AnnotatedPartition(tuple(nodes), steps, weights, nbytes))
    if not partitions:
        raise PassError(
            f"none of the {len(proposed)} partitions of method {method!r} reads a weight that streams: "
            "compile this graph without penstock"
        )
    partitions.sort(key=lambda partition: partition.steps)
    for number, partition in enumerate(partitions):
        for node in partition.nodes:
            add_facts(node, partition=number)
    return tuple(partitions)


def _with_bodies(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes, and those that hold the bodies of control flow among them, which belong to them."""
    operands = {operand for node in nodes for operand in node.all_input_nodes if operand.op == "get_attr"}
    return {*nodes, *(operand for operand in operands if operand.users.keys() <= set(nodes))}


@dataclass(frozen=True)
class NamedNodes(OperatorSupportBase):
    """Supports the nodes of these names."""

    names: frozenset[str]

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.name in self.names


def _method(payload: Payload, method: str | None) -> str:
    names = [described.name for described in payload.methods]
    if method is None and len(names) > 1:
        raise PassError(f"the payload has the methods {names}: name one of them with method=")
    if method is not None and method not in names:
        raise PassError(f"there is no method {method!r}: the payload has {names}")
    return method or names[0]


def _names(program: ExportedProgram) -> dict[str, str]:
    specs = program.graph_signature.input_specs
    return {spec.arg.name: str(spec.target) for spec in specs if spec.target is not None}

"""Another library's torch.compile backend beside penstock, in one graph of Dynamo.

    torch.compile(module, backend=beside("openvino"), options={"budget": "8GB"})

Such a backend copies the weights of what it compiles into its own memory, so it cannot be given nodes that
read weights which stream. It gets the regions between them; the nodes that read run as PyTorch's own kernels,
between an acquire and a release. All of it is one method, so that weights are prefetched across regions.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from penstock.backends.fx import NamedNodes
from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.lowering.post_grad import check_flow
from penstock.passes.probes import Site, add_sites
from penstock.passes.trace import steps_of
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.usage import follow_weights
from penstock.runtime.dynamo.backend import (
    Piece,
    compile_for,
    own_options,
    placeholder_names,
    refuse_other_inputs,
    untimed,
)
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Trace
from penstock.schedule.payload.codec import ProbeOrder

_INLINED = "inline_inbuilt_nn_modules"
"""What puts parameters among a graph's inputs. OpenVINO's backend switches it off as it is imported."""

Compiler = Callable[..., Callable[..., Any]]
"""A backend of torch.compile: a function of a graph module and example inputs that returns what runs them."""


def beside(other: str | Compiler) -> Compiler:
    """Return a backend for torch.compile that runs a module offloaded by `penstock.offload`.

    Its `options` are `budget` and `resident_below`, as for the backend "penstock", and those of the other.

    Args:
        other: The backend that compiles every region which reads no streamed weight: its name, or a function
            of a graph module and example inputs.

    Raises:
        PassError: No installed library has a backend of that name.
    """
    compiler = _find(other) if isinstance(other, str) else other

    def compile_graph(
        graph_module: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        own_part, rest_options = own_options(options, f"penstock beside {other}")

        def alone(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return compiler(graph, inputs, **({"options": rest_options} if rest_options else {}))

        def lower(piece: Piece) -> tuple[Callable[..., Any], Trace, ProbeOrder]:
            return _lower(piece, alone)

        return compile_for(lower, alone, graph_module, list(example_inputs), own_part)

    return compile_graph


def _find(name: str) -> Compiler:
    from torch._dynamo import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    config: Any = torch._dynamo.config
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # torch 2.13 always inlines, and warns of the switch
            inlined = getattr(config, _INLINED, None)
            compiler: Compiler = lookup_backend(name)
            if inlined is not None:
                setattr(config, _INLINED, inlined)
            return compiler
    except InvalidBackend:
        raise PassError(
            f"no installed library has the torch.compile backend {name!r}: there are "
            f"{', '.join(torch._dynamo.list_backends(exclude_tags=()))}"
        ) from None


def _lower(piece: Piece, compiler: Compiler) -> tuple[Callable[..., Any], Trace, ProbeOrder]:
    """Lowers a piece to a graph of PyTorch's operators, in which the other compiler's regions are modules."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    traces: list[Trace] = []

    def lower_graph(graph_module: fx.GraphModule, _: list[Any]) -> Any:
        if len(placeholders_of(graph_module.graph)) != len(piece.inputs):
            refuse_other_inputs()
        lowered, trace = _with_regions(graph_module, piece, compiler)
        traces.append(trace)
        return make_boxed_func(lowered.forward)

    run = aot_autograd(fw_compiler=lower_graph)(piece.graph_module, piece.inputs)
    (trace,) = traces
    steps = range(len(trace.steps))
    order = ProbeOrder(piece.number, tuple(2 * k for k in steps), tuple(2 * k + 1 for k in steps))
    return run, trace, order


def _with_regions(
    graph_module: fx.GraphModule, piece: Piece, compiler: Compiler
) -> tuple[fx.GraphModule, Trace]:
    name_of = placeholder_names(piece.homes, piece.weights)
    fqns = {node: fqn for node in placeholders_of(graph_module.graph) if (fqn := name_of(node))}
    weight_of = {node.name: piece.weights.held[fqn] for node, fqn in fqns.items()}
    weights = Weights(weight_of, piece.weights.storages)
    streamed = {s for s, storage in enumerate(weights.storages) if storage.kind == "streamable"}
    propagated, flow = follow_weights(graph_module, weights)
    check_flow(flow, fqns, piece.weights)
    steps, tail = steps_of(propagated.graph, flow.reads, streamed)
    owners: dict[int, list[str]] = {}
    for node in fqns:
        owners.setdefault(weights.storage_of(node.name), []).append(node.name)
    sites = [
        Site(step.name, k, tuple(name for s in step.reads for name in owners[s]))
        for k, step in enumerate(steps)
    ]
    others_graph = _without_weights(
        propagated, {node.name for node in fqns if weights.storage_of(node.name) in streamed}
    )
    partitioner = CapabilityBasedPartitioner(graph_module, NamedNodes(others_graph))
    fused = partitioner.fuse_partitions(partitioner.propose_partitions(), prefix="region_")
    for name, region in list(fused.named_children()):
        if name.startswith("region_") and isinstance(region, fx.GraphModule):
            setattr(fused, name, _Region(region, compiler))
    _own_outputs(fused.graph)
    add_sites(fused.graph, piece.number, sites)
    fused.recompile()
    return fused, untimed(piece.number, steps, tail)


def _own_outputs(graph: fx.Graph) -> None:
    """Copies what a region returns to the caller: OpenVINO's backend writes the next call's results there."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, fx.Node) and source.op == "call_module":
            with graph.inserting_before(output):
                output.replace_input_with(node, graph.call_function(torch.ops.aten.clone.default, (node,)))


def _without_weights(propagated: fx.GraphModule, streamed: set[str]) -> frozenset[str]:
    """The nodes that neither read a weight which streams nor return a view of one."""
    values = {node.name: storages_of(node.meta.get("val")) for node in propagated.graph.nodes}
    weights = {storage for name in streamed for storage in values[name]}
    return frozenset(
        node.name
        for node in propagated.graph.nodes
        if node.op == "call_function"
        and weights.isdisjoint(values[node.name])
        and all(weights.isdisjoint(values[operand.name]) for operand in node.all_input_nodes)
    )


class _Region(torch.nn.Module):
    """A region that the other compiler compiles when first called, once for each sizes of real inputs."""

    def __init__(self, graph_module: fx.GraphModule, compiler: Compiler) -> None:
        super().__init__()
        self._graph_module, self._compiler = graph_module, compiler
        self._runs: dict[object, Callable[..., Any]] = {}
        values = [node.meta.get("val") for node in placeholders_of(graph_module.graph)]
        self._dynamic = any(has_free_symbols(value) for value in values if value is not None)

    def forward(self, *inputs: Any) -> Any:
        if not self._dynamic:
            if not self._runs:
                self._runs[()] = self._compiler(self._graph_module, list(inputs))
            return self._runs[()](*inputs)
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        sizes = tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs)
        if sizes not in self._runs:
            self._runs[sizes] = self._compiler(_with_sizes(self._graph_module, inputs), tensors)
        return self._runs[sizes](*tensors)


def _with_sizes(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Returns a copy of a region whose inputs are tensors alone: it has the given sizes inside."""
    graph, copied = fx.Graph(), dict[fx.Node, Any]()
    value_of = dict(zip(placeholders_of(graph_module.graph), inputs, strict=True))
    for node in graph_module.graph.nodes:
        is_size = node in value_of and not isinstance(value_of[node], torch.Tensor)
        copied[node] = value_of[node] if is_size else graph.node_copy(node, copied.__getitem__)
    return fx.GraphModule(graph_module, graph)

"""The order in which a lowered program reads its weights, and what the compute between costs.

Times are modelled by a roofline (Williams, Waterman and Patterson, 2009): a stretch of compute takes
the longer of its operations over the peak rate and its bytes over the memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx
from torch._ops import OpOverload

from penstock.passes.graph.nodes import CALLS, placeholders_of, size_hint, subgraphs_of, tensors_of
from penstock.passes.graph.propagation import FLOPS, fake_inputs, propagate
from penstock.passes.probes import STORE
from penstock.passes.weights.usage import Usage, is_view, outs_of
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Hardware, Method, SparseRead, Step, Storage, Trace, Work

aten = torch.ops.aten

GATHERS = frozenset(
    {aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default}
)
"""Operators that read of their first input only as many bytes as they return."""

PRESET_CPU = Hardware(
    name="cpu-2-cores",
    flops_per_s=1e11,
    memory_bytes_per_s=1.5e10,
    link_bytes_per_s=2e9,
    link_latency_ns=50_000,
    note="round figures of a two-core x86-64 virtual machine with a network disk; assumed, not measured here",
)
"""The machine that `annotate` assumes; planning replaces it by the one that is measured or asked for."""


def observe(
    usage: Usage,
    storages: Sequence[Storage],
    method: Method,
    hardware: Hardware,
    sparse: Mapping[str, SparseRead] = MappingProxyType({}),
) -> Trace:
    """Returns the trace of the eager lowering: a step per node that reads or produces what may stream.

    `sparse` are the reads by units, by the names of their nodes. Costs are for the sizes that the program was
    exported with. The body of a loop counts once.
    """
    streamable = {
        s
        for s, storage in enumerate(storages)
        if storage.kind in ("streamable", "produced") and storage.nbytes
    }
    steps, tail = steps_of(usage.graph_module.graph, usage.reads, streamable)
    steps = tuple(
        replace(step, sparse=(sparse[step.name],)) if step.name in sparse else step for step in steps
    )
    shape = ",".join(f"{symbol.name}={symbol.example}" for symbol in method.symbols)
    untimed = Trace(method.name, method.graph, shape, steps, 0, 0, "modelled", tail)
    return with_times(untimed, hardware)


def steps_of(
    graph: fx.Graph, reads: Mapping[str, Iterable[int]], streamed: Container[int]
) -> tuple[tuple[Step, ...], Work]:
    """Returns a step without times for each node that reads or stores a streamed storage, and the work after.

    `graph` is propagated, and `reads` has the storages that each node reads, by its name.
    """
    steps: list[Step] = []
    lead = Work()
    for node in graph.nodes:
        work = work_of(node)
        read = tuple(s for s in reads.get(node.name, ()) if s in streamed)
        if read:
            stored = read if node.target is STORE else ()
            steps.append(Step(node.name, () if stored else read, 0, 0, lead, work, stored))
            lead = Work()
        else:
            lead = sum_of(lead, work)
    return tuple(steps), lead


def with_measured(trace: Trace, lead_ns: Sequence[int], read_ns: Sequence[int], tail_ns: int) -> Trace:
    """The trace with measured times, in ns for each step. Raises PassError for another number of steps."""
    count = len(trace.steps)
    if len(lead_ns) != count or len(read_ns) != count:
        raise PassError(
            f"the measurement of method {trace.method!r} has {len(lead_ns)} lead times and {len(read_ns)} "
            f"read times, expected {count} of each: measure this program"
        )
    steps = tuple(
        replace(step, lead_ns=lead, read_ns=read)
        for step, lead, read in zip(trace.steps, lead_ns, read_ns, strict=True)
    )
    return replace(trace, steps=steps, tail_ns=tail_ns, gap_ns=0, times="measured")


def work_of(node: fx.Node) -> Work:
    """Returns what one node of a propagated graph costs: views and placeholders cost nothing."""
    if node.op not in (*CALLS, "call_module"):
        return Work()
    if getattr(node.target, "is_once_each", False):
        return _work_of_experts(node)
    if bodies := subgraphs_of(node):
        work = sum_of(*(_work_of_body(body) for body in bodies))
        # A segment runs again, and then a product of the same size for the gradient of each product's input.
        return sum_of(work, work) if getattr(node.target, "is_recorded", False) else work
    inputs = [tensors_of(operand.meta.get("val")) for operand in node.all_input_nodes]
    allocates = not isinstance(node.target, OpOverload) and not any(inputs)  # as `alloc` of ExecuTorch does
    if allocates or is_view(node):
        return Work()
    written = sum(_nbytes(tensor) for tensor in tensors_of(node.meta.get("val")))
    outs = outs_of(node)  # their bytes are those of the result
    operands = [
        sum(map(_nbytes, tensors))
        for operand, tensors in zip(node.all_input_nodes, inputs, strict=True)
        if operand not in outs
    ]
    if node.target in GATHERS and operands:
        operands[0] = min(operands[0], written)
    return Work(node.meta.get(FLOPS, 0), written + sum(operands))


def _work_of_experts(node: fx.Node) -> Work:
    """The work of computing as many experts as the example asks for, and of one product of all rows."""
    (body,) = subgraphs_of(node)
    _, _, rows, weight, *_ = node.args
    sizes = [size_hint(operand.meta["val"].shape[0]) for operand in (rows, weight)]  # type: ignore[union-attr]
    *chain, product = [
        work_of(body_node) for body_node in body.graph.nodes if body_node.op == "call_function"
    ]
    return sum_of(product, *min(sizes) * chain)


def _work_of_body(body: fx.GraphModule) -> Work:
    if any(node.meta.get("val") is None for node in placeholders_of(body.graph)):
        return Work()
    return sum_of(*(work_of(node) for node in propagate(body, fake_inputs(body)).graph.nodes))


def sum_of(*works: Work) -> Work:
    """Returns what several stretches of compute cost together."""
    return Work(sum(work.flops for work in works), sum(work.nbytes for work in works))


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(size_hint(size) for size in tensor.shape) * tensor.itemsize

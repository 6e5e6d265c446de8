"""Which step of a program reads which storage, as a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule.facts.model import Part, Step
from penstock.schedule.payload.codec import Payload

if TYPE_CHECKING:
    import networkx


def read_graph(payload: Payload) -> networkx.DiGraph:
    """Returns the steps of all methods, the storages of all weights, and who reads what.

    The node `("step", graph, k)` is step k of method number `graph`, with these attributes: `kind` ("step"),
    `name` (of the node or kernel that reads), `method`, `index` (k), `bytes` (of the storages that it reads),
    `lead_ns`, `lead_flops` and `lead_bytes` (the compute since the step before, and the memory that it reads
    and writes), `read_ns`, `read_flops` and `read_bytes` (the same of the step itself).

    The node `("storage", s)` is storage s of the payload: `kind` ("storage"), `name` (the first FQN that lies
    in it), `bytes`, `storage_kind` ("streamable", "mutable", "returned", "inlined" or "small"), and one entry
    for each tensor that lies in it in the lists `fqns`, `dtypes` and `shapes`. A storage without edges
    always stays in memory, or nothing uses it.

    Edges have the attribute `why`: "reads" from a storage to a step, "order" from a step to the next one of
    its method. The graph's own attributes are `lowering`, and `methods`: by name the `shape` point of the
    trace, its `tail_ns` and `gap_ns`, and whether its `times` are modelled or measured.
    """
    import networkx

    graph = networkx.DiGraph(
        lowering=payload.lowering,
        methods={
            t.method: {"shape": t.shape, "tail_ns": t.tail_ns, "gap_ns": t.gap_ns, "times": t.times}
            for t in payload.traces
        },
    )
    names = payload.storage_names()
    held_by: dict[int, list[tuple[str, Part]]] = {}
    for weight in payload.tensors:
        held_by.setdefault(weight.parts[0].storage, []).append((weight.fqn, weight.parts[0]))
    for s, storage in enumerate(payload.storages):
        held = held_by.get(s, [])
        graph.add_node(
            ("storage", s),
            kind="storage",
            name=names[s],
            bytes=storage.nbytes,
            storage_kind=storage.kind,
            fqns=[fqn for fqn, _ in held],
            dtypes=[part.dtype for _, part in held],
            shapes=[list(part.shape) for _, part in held],
        )
    for trace in payload.traces:
        for k, step in enumerate(trace.steps):
            node = ("step", trace.graph, k)
            nbytes = sum(payload.storages[s].nbytes for s in step.reads)
            graph.add_node(node, kind="step", method=trace.method, index=k, bytes=nbytes, **_facts(step))
            if k:
                graph.add_edge(("step", trace.graph, k - 1), node, why="order")
            for s in step.reads:
                graph.add_edge(("storage", s), node, why="reads")
    return graph


def _facts(step: Step) -> dict[str, str | int]:
    return {
        "name": step.name,
        "lead_ns": step.lead_ns,
        "lead_flops": step.lead_work.flops,
        "lead_bytes": step.lead_work.nbytes,
        "read_ns": step.read_ns,
        "read_flops": step.read_work.flops,
        "read_bytes": step.read_work.nbytes,
    }

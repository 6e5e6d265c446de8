"""The graph of a program's steps and of the storages that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule.facts.model import Part, SparseRead, Step

if TYPE_CHECKING:
    import networkx

    from penstock.schedule.payload.codec import Payload


def read_graph(payload: Payload) -> networkx.DiGraph:
    """Returns what `Payload.read_graph` says."""
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
            units = {one.storage: one for one in step.sparse}
            for s in step.reads:
                graph.add_edge(("storage", s), node, why="reads", **_units(units.get(s)))
            for s in step.writes:
                graph.add_edge(node, ("storage", s), why="writes")
    return graph


def _units(read: SparseRead | None) -> dict[str, str | int]:
    """The attributes of an edge of which units may do."""
    if read is None:
        return {}
    named: dict[str, str | int] = {"operator": read.operator, "route": read.route}
    return named | {"units": read.count, "unit_bytes": read.unit_nbytes, "asked": read.asked}


def _facts(step: Step) -> dict[str, str | int]:
    """The attributes of a step's node that say what it computes."""
    return {
        "name": step.name,
        "lead_ns": step.lead_ns,
        "lead_flops": step.lead_work.flops,
        "lead_bytes": step.lead_work.nbytes,
        "read_ns": step.read_ns,
        "read_flops": step.read_work.flops,
        "read_bytes": step.read_work.nbytes,
    }

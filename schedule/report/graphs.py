"""A program's graph and the reads of its weights, for the report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.schedule.clock.event_graph import build_graph, launched_steps
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Part, SparseRead, Step
from penstock.schedule.report.pictures import copied_by, names_of, views_of

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
        ranges = held_by.get(s, [])
        graph.add_node(
            ("storage", s),
            kind="storage",
            name=names[s],
            bytes=storage.nbytes,
            storage_kind=storage.kind,
            fqns=[fqn for fqn, _ in ranges],
            dtypes=[part.dtype for _, part in ranges],
            shapes=[list(part.shape) for _, part in ranges],
        )
    for trace in payload.traces:
        for k, step in enumerate(trace.steps):
            node = ("step", trace.graph, k)
            nbytes = sum(payload.storages[s].nbytes for s in step.reads)
            graph.add_node(node, kind="step", method=trace.method, index=k, bytes=nbytes, **_facts(step))
            if k:
                graph.add_edge(("step", trace.graph, k - 1), node, why="order")
            units = {read.storage: read for read in step.sparse}
            for s in step.reads:
                graph.add_edge(("storage", s), node, why="reads", **_units(units.get(s)))
            for s in step.writes:
                graph.add_edge(node, ("storage", s), why="writes")
    return graph


def _units(read: SparseRead | None) -> dict[str, str | int]:
    if read is None:
        return {}
    named: dict[str, str | int] = {"operator": read.operator, "route": read.route}
    return named | {"units": read.count, "unit_bytes": read.unit_nbytes, "asked": read.asked}


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


_WHY = {
    ("transfer", "step"): "covers",
    ("stage", "transfer"): "covers",
    ("step", "transfer"): "room",
    ("transfer", "stage"): "room",
}
"""The reason why one event waits for another, by the kinds of the earlier and the later event.

An edge between other kinds has the reason "order".
"""


def event_graph(plan: Decisions, method: str | None = None) -> networkx.DiGraph:
    """The graph of the events of a steady pass of one method; an edge leads to an event that waits.

    The plan was timed by this graph: the period is the largest ratio of `weight` to `height` over its cycles,
    rounded up. `method` may be left out if the plan has only one. Methods whose calls come in turn are one,
    called `forward + backward`.

    Raises:
        PlanError: the plan has no method of that name, or several and no name is given.
    """
    plan = joined(plan)
    index = _number_of(plan, method)
    trace, schedule = plan.traces[index], plan.schedules[index]
    launched = launched_steps(plan, index)
    graph = build_graph(trace, schedule, plan.hardware, plan.wrap, launched=launched)
    graph.graph |= {"method": trace.method, "shape": trace.shape, "period_ns": schedule.predicted_ns}
    view = views_of(plan, index).steady
    times, begin = view.passes[view.focus], view.begins[view.focus]
    spans = {
        "step": dict(enumerate(times.reads)),
        "transfer": dict(enumerate(times.transfers)),
        "stage": dict(enumerate(times.stages)),
        "call": {0: (begin, begin)},
        "launch": dict(zip(launched, times.launches, strict=True)),
    }
    described = {kind: _described(plan, index, kind) for kind in spans}
    for (kind, number), facts in graph.nodes.items():
        start, end = spans[kind][number]
        facts.update(kind=kind, method=trace.method, start_ns=start - begin, end_ns=end - begin)
        facts.update(described[kind][number])
    for (source, _), (target, _), edge in graph.edges(data=True):
        edge["why"] = _WHY.get((source, target), "order")
    return graph


def to_dot(graph: networkx.DiGraph) -> str:
    """Return a graph in Graphviz' language; every attribute of a node or an edge is written as text.

    `weight` is written as `weight_ns`: Graphviz adds up the weights of edges in 32 bits to lay them out.

    Args:
        graph: What `Plan.event_graph` or `Program.read_graph` returns.

    Example:
        >>> from penstock.schedule.report.graphs import to_dot
        >>> to_dot(plan.event_graph()).splitlines()[0]
        'digraph penstock {'
    """
    numbers = {node: number for number, node in enumerate(graph)}
    lines = []
    for node, facts in graph.nodes.items():
        label = {"label": str(facts.get("name") or node)}
        lines.append(f"  n{numbers[node]} [{_attributes(label | facts)}];")
    for source, target, facts in graph.edges(data=True):
        label = {"label": facts["why"]} if "why" in facts else {}
        named = {"weight_ns" if name == "weight" else name: value for name, value in facts.items()}
        lines.append(f"  n{numbers[source]} -> n{numbers[target]} [{_attributes(label | named)}];")
    return "\n".join(["digraph penstock {", *lines, "}"]) + "\n"


def to_json(graph: networkx.DiGraph) -> str:
    """Return a graph of penstock's as node-link JSON, which `networkx.node_link_graph` reads.

    Args:
        graph: As for `to_dot`.
    """
    import networkx

    return json.dumps(networkx.node_link_data(graph, edges="edges"), indent=1) + "\n"


def _number_of(plan: Decisions, method: str | None) -> int:
    methods = [trace.method for trace in plan.traces]
    if method is None and len(methods) == 1:
        return 0
    if method not in methods:
        asked = "no method is named" if method is None else f"there is no method {method!r}"
        raise PlanError(f"{asked}: the plan has {', '.join(methods) or 'none'}")
    return methods.index(method)


def _described(plan: Decisions, number: int, kind: str) -> list[dict[str, Any]]:
    """The name, the bytes and the pass of every event of one kind, in order."""
    trace, schedule = plan.traces[number], plan.schedules[number]
    if kind == "call":
        return [{"name": "call", "bytes": 0, "pass": 0}]
    if kind == "launch":
        return [{"name": step.name, "bytes": 0, "pass": 0} for step in trace.steps]
    if kind == "step":
        released = [0] * len(trace.steps)
        for drop in schedule.drops:
            released[drop.step] += drop.stop - drop.start
        return [
            {"name": step.name, "bytes": nbytes, "pass": 0}
            for step, nbytes in zip(trace.steps, released, strict=True)
        ]
    copied = list(zip(schedule.transfers, copied_by(plan, number, names_of(plan)), strict=True))
    moved = [
        {
            "name": ", ".join(fact["weights"]),
            "bytes": fact["bytes"],
            "direction": t.direction,
            "pass": -int(t.after < 0),
        }
        for t, fact in copied
    ]
    if kind == "transfer":
        return moved
    staged = zip(moved, schedule.staged, strict=False)
    return [fact | {"bytes": nbytes} for fact, nbytes in staged if nbytes]


def _attributes(facts: dict[str, Any]) -> str:
    return ", ".join(f"{_quoted(name)}={_quoted(value)}" for name, value in facts.items())


def _quoted(value: Any) -> str:
    """A double-quoted string of DOT, in which backslashes and quotes are escaped and lines end as \\n."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'

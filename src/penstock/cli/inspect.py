"""`penstock inspect`: the contents of an artifact, or of what a `.pte` of ExecuTorch holds of penstock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import check_artifact, fail
from penstock.schedule.facts.sizes import format_size, format_time

if TYPE_CHECKING:
    from penstock.backends.executorch.files import Exported
    from penstock.runtime.training.module import RungBytes
    from penstock.schedule.facts.model import SparseRead, Weight
    from penstock.schedule.payload.codec import Payload
    from penstock.schedule.plan import Plan

EXAMPLES = (
    "penstock inspect model.penstock --json",
    "penstock inspect model.penstock --graph dot",
    "penstock inspect model.penstock --graph json --budget 25%",
    "penstock inspect model.pte",
)

_ROWS = 40

Table = tuple[str, Sequence[str], list[list[str]]]
"""A title, the names of columns, and rows."""


class GraphForm(StrEnum):
    """The forms in which a graph can be written."""

    dot = "dot"
    json = "json"


def inspect(
    artifact: Annotated[
        Path, typer.Argument(help="An artifact folder, NAME.penstock, or a .pte.", show_default=False)
    ],
    *,
    json: options.Json = False,
    graph: Annotated[
        GraphForm | None,
        typer.Option(help="Print which step reads which weights instead, for Graphviz or as node-link JSON."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="With --graph: the events of a plan within 32MiB, 8GB or 50% instead.",
            callback=options.check_size("--budget"),
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="With --budget: of which method, where there are several.")
    ] = None,
) -> None:
    """Show an artifact, or a .pte: methods, weights, steps and floors, or its graphs."""
    if json and graph is not None:
        fail("--graph prints a graph and --json facts: give one of them")
    if graph is None and (budget or method):
        fail("--budget and --method are for the graph of a plan: give --graph dot or --graph json too")
    if method and not budget:
        fail("--method is for the graph of a plan: give --budget too")
    program = _open(artifact)
    if graph is not None:
        _print_graph(program, graph, budget, method)
        return
    if json:
        console.print_json(_facts(program))
        return
    console.print_facts(str(program.path), _totals(program))
    tables = artifact_tables(program)
    tables += activation_tables(_activations(program))
    if program.payload.lowering == "executorch":
        tables += delegate_tables(cast("Exported", program))
    for title, columns, rows in tables:
        console.print_table(title, columns, rows)


class _Inspected(Protocol):
    """What an artifact and a `.pte` have in common."""

    @property
    def path(self) -> Path: ...
    @property
    def payload(self) -> Payload: ...
    @property
    def weight_bytes(self) -> int: ...
    def arenas(self) -> tuple[str, ...]: ...
    def floor(self, *, arena: str) -> int: ...
    def plan(self, budget: str) -> Plan: ...


def _open(path: Path) -> _Inspected:
    """The artifact, or what a `.pte` of ExecuTorch holds of penstock."""
    if path.suffix != ".pte":
        check_artifact(path)
        from penstock.runtime.program import read_program

        return read_program(path)
    from penstock.backends.executorch import read

    return read(path)


def _print_graph(program: _Inspected, form: GraphForm, budget: str | None, method: str | None) -> None:
    from penstock.schedule.report.graphs import to_dot, to_json

    if budget is None:
        graph = program.payload.read_graph()
    else:
        with console.spinner("planning"):
            graph = program.plan(budget).event_graph(method)
    console.print_text((to_dot if form == GraphForm.dot else to_json)(graph).removesuffix("\n"))


def _facts(program: _Inspected) -> dict[str, Any]:
    payload = program.payload
    facts = {
        "path": str(program.path),
        "version": payload.version,
        "lowering": payload.lowering,
        "torch": payload.torch,
        "weight_bytes": program.weight_bytes,
        "value_bytes": sum(storage.nbytes for storage in payload.storages if storage.kind == "produced"),
        "floors": {name: program.floor(arena=name) for name in program.arenas()},
        "files": [asdict(f) for f in payload.files],
        "methods": [asdict(m) for m in payload.methods],
        "weights": [asdict(w) for w in payload.weights],
        "storages": [asdict(s) for s in payload.storages],
        "traces": [asdict(t) for t in payload.traces],
        "dynamic_values": list(_dynamic(program)),
        "activations": [asdict(activations) for activations in _activations(program)],
    }
    return facts if payload.lowering != "executorch" else facts | _delegate_facts(program)


def _delegate_facts(program: _Inspected) -> dict[str, Any]:
    exported = cast("Exported", program)
    return {
        "regions": [asdict(region) for region in exported.regions],
        "places": {key: {"file": str(path), "offset": at} for key, (path, at) in exported.places.items()},
        "plans": [asdict(plan) for plan in exported.payload.plans],
    }


def _totals(program: _Inspected) -> list[tuple[str, str]]:
    payload = program.payload
    values = [storage.nbytes for storage in payload.storages if storage.kind == "produced"]
    machine = payload.program.machine if payload.program else ""
    named = {(f.path, f.key): f for f in payload.files if f.kind == "named"}
    sizes = [(f.path, f.nbytes) for f in payload.files if f.kind == "file"]
    for name in dict.fromkeys(path for path, _ in named):
        sizes.append((name, sum(f.nbytes for f in named.values() if f.path == name)))
    return [
        ("lowering", f"{payload.lowering} (torch {payload.torch})"),
        ("weights", f"{format_size(program.weight_bytes)} in {len(payload.storages) - len(values)} storages"),
        *_values(program, values),
        *((f"floor, {name}", format_size(program.floor(arena=name))) for name in program.arenas()),
        *([("compiled for", machine)] if machine else []),
        *(("file", f"{name} ({format_size(nbytes)})") for name, nbytes in sizes[:_ROWS]),
    ]


def _values(program: _Inspected, sizes: Sequence[int]) -> list[tuple[str, str]]:
    """What a forward keeps among the weights, and what it keeps beside them because its size is dynamic."""
    if not sizes:
        return []
    summary = (
        f"{format_size(sum(sizes))} in {len(sizes)} places, within the budget; what leaves goes to a file"
    )
    dynamic = _dynamic(program)
    named = f"{len(dynamic)} of dynamic size stay in memory, beside the budget: {', '.join(dynamic)}"
    return [("kept values", summary), *([("kept beside them", named)] if dynamic else [])]


def _dynamic(program: _Inspected) -> Sequence[str]:
    """The values of dynamic size that a forward with places for others keeps."""
    from penstock.runtime.program import Program
    from penstock.runtime.training.module import dynamic_values

    return dynamic_values(program) if isinstance(program, Program) else ()


def _activations(program: _Inspected) -> Sequence[RungBytes]:
    """What the rungs of a program that is trained keep."""
    from penstock.runtime.program import Program
    from penstock.runtime.training.module import rung_bytes

    return rung_bytes(program) if isinstance(program, Program) else ()


def activation_tables(rungs: Sequence[RungBytes]) -> list[Table]:
    """The table of what is kept for a backward, at the exported sizes; none for what is not trained."""
    rows = [
        [
            rung.activations,
            *map(format_size, (rung.kept_bytes, rung.activation_bytes, rung.backward_read_bytes)),
        ]
        for rung in rungs
    ]
    columns = ("activations", "kept", "at most", "weights read by the backward")
    return [("Kept for the backward", columns, rows)] if rows else []


def delegate_tables(exported: Exported) -> list[Table]:
    """The tables of the places of weights, of the regions and of the plans of a `.pte`."""
    payload = exported.payload
    largest = sorted(payload.tensors, key=lambda w: -payload.storages[w.parts[0].storage].nbytes)[:_ROWS]
    places = [(weight.fqn, exported.place_of(weight.parts[0])) for weight in largest]
    steps = {trace.graph: (trace.method, trace.steps) for trace in payload.traces}
    names = payload.storage_names()
    regions = []
    for region in exported.regions[:_ROWS]:
        method, of_method = steps[region.graph]
        reads = [names[s] for step in of_method[slice(*region.steps)] for s in step.reads]
        states = [appended.name for appended in region.appended if appended.mutable]
        regions.append([method, str(region.region), ", ".join(reads), ", ".join(states)])
    plans = [
        [
            format_size(plan.budget),
            plan.arena.kind,
            format_size(plan.streamed_bytes),
            format_time(plan.predicted_ns),
        ]
        for plan in payload.plans
    ]
    return [
        ("Places", ("weight", "file", "offset"), [[n, p[0].name, str(p[1])] for n, p in places if p]),
        ("Regions", ("method", "region", "streams", "writes"), regions),
        ("Plans", ("budget", "arena", "streamed in a pass", "predicted"), plans),
    ]


def artifact_tables(program: _Inspected) -> list[Table]:
    """The tables of the methods and of the largest weights of an artifact."""
    payload = program.payload
    methods = [
        [m.name, str(len(t.steps)), "\n".join(f"{i.name}: {i.dtype} {_shape(i.shape)}" for i in m.inputs)]
        for m in payload.methods
        for t in payload.traces
        if t.graph == m.graph
    ]
    values = [w for w in payload.tensors if w.role == "value"]
    weights = [w for w in payload.tensors if w.role != "value"]
    return [
        ("Methods", ("name", "steps", "inputs"), methods),
        _largest(payload, "Weights", "weight", weights),
        *unit_tables(payload),
        *([_largest(payload, "Kept values", "value", values)] if values else []),
    ]


def unit_tables(payload: Payload) -> list[Table]:
    """The table of what may be read by units, the largest first; none if nothing may."""
    names = payload.storage_names()
    reads: dict[tuple[int, str], SparseRead] = {}
    for read in (read for trace in payload.traces for step in trace.steps for read in step.sparse):
        reads.setdefault((read.storage, read.operator), read)
    largest = sorted(reads.values(), key=lambda read: -read.count * read.unit_nbytes)
    rows = [
        [
            names[read.storage],
            read.operator,
            f"{read.count:,}",
            format_size(read.unit_nbytes),
            f"{read.asked:,}",
        ]
        for read in largest[:_ROWS]
    ]
    title = "May be read by units" + (f" (the largest {_ROWS} of {len(reads)})" if len(reads) > _ROWS else "")
    return (
        [(title, ("weight", "operator", "units", "bytes of one", "asked for at most"), rows)] if rows else []
    )


def _largest(payload: Payload, title: str, noun: str, weights: Sequence[Weight]) -> Table:
    """The table of the largest weights, or of the largest values that a forward keeps among them."""
    parts = [(w.fqn, w.parts[0], payload.storages[w.parts[0].storage]) for w in weights]
    rows = [
        [name, p.dtype, _shape(p.shape), format_size(s.nbytes), s.kind, str(p.storage)]
        for name, p, s in sorted(parts, key=lambda row: -row[2].nbytes)[:_ROWS]
    ]
    title = f"{title} (the largest {_ROWS} of {len(parts)})" if len(parts) > _ROWS else title
    return title, (noun, "dtype", "shape", "bytes", "kind", "storage"), rows


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"

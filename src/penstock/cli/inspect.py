"""`penstock inspect`: the contents of an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.inputs import fail
from penstock.schedule.facts.sizes import format_size

if TYPE_CHECKING:
    from penstock.runtime.program import Program

EXAMPLES = (
    "penstock inspect model.penstock --json",
    "penstock inspect model.penstock --graph dot",
    "penstock inspect model.penstock --graph json --budget 25%",
)

_ROWS = 40

Table = tuple[str, Sequence[str], list[list[str]]]
"""A title, the names of columns, and rows."""


class GraphForm(StrEnum):
    """The forms in which a graph can be written."""

    dot = "dot"
    json = "json"


def inspect(
    artifact: options.Artifact,
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
    """Show an artifact: methods, weights, steps and floors, or its graphs."""
    from penstock.runtime.program import open as open_program

    if json and graph is not None:
        fail("--graph prints a graph and --json facts: give one of them")
    if graph is None and (budget or method):
        fail("--budget and --method are for the graph of a plan: give --graph dot or --graph json too")
    if method and not budget:
        fail("--method is for the graph of a plan: give --budget too")
    program = open_program(artifact)
    if graph is not None:
        _print_graph(program, graph, budget, method)
        return
    if json:
        console.print_json(_facts(program))
        return
    console.print_facts(str(program.path), _totals(program))
    for title, columns, rows in artifact_tables(program):
        console.print_table(title, columns, rows)


def _print_graph(program: Program, form: GraphForm, budget: str | None, method: str | None) -> None:
    from penstock.schedule.report.graphs import to_dot, to_json

    if budget is None:
        graph = program.read_graph()
    else:
        with console.spinner("planning"):
            graph = program.plan(budget).event_graph(method)
    console.print_text((to_dot if form == GraphForm.dot else to_json)(graph).removesuffix("\n"))


def _facts(program: Program) -> dict[str, Any]:
    payload = program.payload
    return {
        "path": str(program.path),
        "version": payload.version,
        "lowering": payload.lowering,
        "torch": payload.torch,
        "weight_bytes": program.weight_bytes,
        "floors": {name: program.floor(arena=name) for name in program.arenas()},
        "files": [asdict(f) for f in payload.files],
        "methods": [asdict(m) for m in payload.methods],
        "weights": [asdict(w) for w in payload.weights],
        "storages": [asdict(s) for s in payload.storages],
        "traces": [asdict(t) for t in payload.traces],
    }


def _totals(program: Program) -> list[tuple[str, str]]:
    payload = program.payload
    return [
        ("lowering", f"{payload.lowering} (torch {payload.torch})"),
        ("weights", f"{format_size(program.weight_bytes)} in {len(payload.storages)} storages"),
        *((f"floor, {name}", format_size(program.floor(arena=name))) for name in program.arenas()),
        *(("file", f"{file.path} ({format_size(file.nbytes)})") for file in payload.files[:_ROWS]),
    ]


def artifact_tables(program: Program) -> list[Table]:
    """The tables of the methods and of the largest weights of an artifact."""
    payload = program.payload
    methods = [
        [m.name, str(len(t.steps)), "\n".join(f"{i.name}: {i.dtype} {_shape(i.shape)}" for i in m.inputs)]
        for m in payload.methods
        for t in payload.traces
        if t.graph == m.graph
    ]
    parts = [(w.fqn, w.parts[0], payload.storages[w.parts[0].storage]) for w in payload.tensors]
    largest = sorted(parts, key=lambda row: -row[2].nbytes)[:_ROWS]
    weights = [
        [name, p.dtype, _shape(p.shape), format_size(s.nbytes), s.kind, str(p.storage)]
        for name, p, s in largest
    ]
    title = f"Weights (the largest {_ROWS} of {len(parts)})" if len(parts) > _ROWS else "Weights"
    return [
        ("Methods", ("name", "steps", "inputs"), methods),
        (title, ("weight", "dtype", "shape", "bytes", "kind", "storage"), weights),
    ]


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"

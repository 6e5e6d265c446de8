"""Which models of transformers and diffusers run, bit for bit, streamed from the library's own checkpoint.

Each model, tiny and with random weights, is exported from its configuration without being built
(`penstock.fake_export`), bound to what the library's `save_pretrained` wrote (`penstock.bind`), compiled, and
streamed on the CPU at the floor and within half of its weights. The eager lowering must return the bits of
the library's own model, read by the library from the same checkpoint, every weight in memory of 64-byte
alignment; the Inductor lowering those of the same compiled program with all weights in memory, close to the
library's. What does not work is a row with its reason, and the exit status is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import describe_machine
from benchmarks.table import write_between
from benchmarks.zoo import adapters as zoo_adapters
from benchmarks.zoo import diffusers_models as zoo_diffusers
from benchmarks.zoo import quantised as zoo_quantised
from benchmarks.zoo import transformers_models as zoo_transformers
from benchmarks.zoo.visit import Row, Run, visit
from penstock.schedule.facts.sizes import format_size

BEGIN = "<!-- benchmarks.zoo writes from here -->"
ENTRIES = (
    *zoo_transformers.entries(),
    *zoo_diffusers.entries(),
    *zoo_adapters.entries(),
    *zoo_quantised.entries(),
)
LOWERINGS = ("eager", "inductor")
LIBRARIES = ("transformers", "diffusers", "peft", "torch")


def render(rows: Sequence[Row]) -> str:
    """One line a model; below, why one does not work or could not be bound by name."""
    lines = [
        "| model | weights | bound | floor | eager | Inductor | from the library's | from AOTInductor's "
        "| export, s | compile, s |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        runs = [row.runs.get(lowering, Run()) for lowering in LOWERINGS]
        floor = max(run.floor_bytes for run in runs)
        times = ", ".join(f"{run.compile_s:.1f}" for run in row.runs.values())
        lines.append(
            f"| {row.name} | {format_size(row.weight_bytes)} | {row.bound or '-'} | {format_size(floor)} "
            f"| {' | '.join(verdict(row, lowering) for lowering in LOWERINGS)} "
            f"| {runs[1].from_library:.1g} | {runs[1].from_alone:.1g} | {row.export_s:.1f} | {times} |"
        )
    return "\n".join([*lines, "", *reasons(rows)])


def verdict(row: Row, lowering: str) -> str:
    """What became of a lowering, in a word or two."""
    if row.failure:
        return "**no**"
    if lowering not in row.runs:
        return "not run"
    run = row.runs[lowering]
    if run.failure:
        return "**fails**"
    return "bit-equal" if run.works else "**other bits**"


def reasons(rows: Sequence[Row]) -> list[str]:
    """By name, why something does not work."""
    lines = []
    for row in rows:
        found = {"": row.failure} | {f"{name}: ": run.failure for name, run in row.runs.items()}
        lines += [f"- {row.name}: {where}`{failure}`" for where, failure in found.items() if failure]
    return lines


def works(row: Row) -> bool:
    """Whether all that was tried returned the expected bits."""
    return not row.failure and bool(row.runs) and all(run.works for run in row.runs.values())


def describe(rows: Sequence[Row]) -> str:
    """The machine and the libraries, and how many work."""
    facts = describe_machine()
    nbytes = facts["memory_bytes"]
    assert isinstance(nbytes, int)
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"{sum(works(row) for row in rows)} of {len(rows)} models work ({facts['date']}: {facts['cpu']}, "
        f"{facts['cores']} cores, {format_size(nbytes)} of memory, Linux {facts['kernel']}; "
        f"{libraries})."
    )


def main(
    *,
    only: Annotated[str, typer.Option(help="A pattern of models' names, as the table has them.")] = "*",
    lowering: Annotated[list[str] | None, typer.Option(help="eager or inductor; both by default.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the table into this document.")] = None,
) -> None:
    """Run the zoo: about twenty models, a quarter of an hour.

    Example: python -m benchmarks.zoo --docs docs/notes/zoo.md
    """
    chosen = [entry for entry in ENTRIES if fnmatchcase(entry.name, only)]
    lowerings = lowering or list(LOWERINGS)
    if not chosen:
        names = ", ".join(entry.name for entry in ENTRIES)
        raise typer.BadParameter(f"no model is called {only!r}: choose of {names}")
    if unknown := set(lowerings) - set(LOWERINGS):
        raise typer.BadParameter(f"there is no lowering {min(unknown)!r}: choose of {', '.join(LOWERINGS)}")
    rows = []
    for entry in chosen:
        rows.append(visit(entry, lowerings))
        typer.echo(f"{entry.name}: {'works' if works(rows[-1]) else 'DOES NOT WORK'}", err=True)
    text = f"{describe(rows)}\n\n{render(rows)}"
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)
    if not all(works(row) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

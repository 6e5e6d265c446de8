"""The command line: `penstock preflight | convert | compile | plan | simulate | inspect | verify | run`.

Exit status: 0 when done, 2 with one sentence on stderr for bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import console
from penstock.cli.compile import compile
from penstock.cli.inputs import fail, integer, pairs
from penstock.cli.models import convert, doctor, preflight
from penstock.cli.options import (
    ArenaName,
    Artifact,
    Budget,
    DeviceName,
    HardwareName,
    HostMemory,
    Json,
    Keep,
    examples,
)
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.sizes import format_size

app = typer.Typer(
    help="Run exported PyTorch programs whose weights are bigger than the memory they run in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


app.command(
    epilog=examples(
        "penstock preflight Llama-3.1-405B/config.json --hardware h200 --budget 80GiB",
        "penstock preflight my_models:build --hardware rtx4090 --hardware h100 --budget 50%",
    )
)(preflight)


app.command(epilog=examples("penstock doctor my_models:build"))(doctor)
app.command(
    epilog=examples(
        "penstock convert model.pt -o model.safetensors",
        "penstock convert model/ -o model-bf16/ --dtype bfloat16 --shard-size 5GB",
    )
)(convert)


app.command(
    epilog=examples(
        "penstock compile model.pt2 model.penstock --weights model.safetensors --no-pack",
        "penstock compile Llama-3.2-1B/ model.penstock --tokens 128",
    )
)(compile)


class DemoPart(StrEnum):
    """What `penstock demo` shows."""

    all = "all"
    cap = "cap"
    real = "real"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.command(
    epilog=examples(
        "penstock plan model.penstock --budget 25% --keep 'lm_head.*'",
        "penstock plan model.penstock --budget 8GB --hardware rtx4090 --sweep --report plan.html",
    )
)
def plan(
    artifact: Artifact,
    *,
    budget: Budget,
    keep: Keep = None,
    arena: ArenaName = None,
    hardware: HardwareName = "auto",
    host_memory: HostMemory = None,
    compare: Annotated[bool, typer.Option("--compare", help="Beside what other policies take.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Time against budget, with all policies.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON here.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write one page of HTML here, with pictures of it all.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here.")] = None,
    json: Json = False,
) -> None:
    """Show what would stay in memory and what would stream within a budget, and whether that pays."""
    from penstock.cli import plan as plan_command
    from penstock.runtime.program import open as open_program

    for path in (output, report, timeline):
        if path is not None and path.exists():
            fail(f"{path} exists: choose another output")
    with console.spinner("planning") as say:
        program = open_program(artifact)
        asked = plan_command.Asked(program, budget, keep or (), arena, hardware, host_memory)
        facts = plan_command.answer(asked, say, compare=compare, sweep=sweep)
    plan_command.write(facts, output=output, report=report, timeline=timeline)
    if json:
        plan_command.print_json(facts)
    else:
        plan_command.print_facts(artifact, program, facts)


@app.command(
    epilog=examples(
        "penstock simulate model.penstock --budget 8GB --hardware rtx4090",
        "penstock simulate model.penstock --budget 8GB --device sim:rtx4090",
    )
)
def simulate(
    artifact: Artifact,
    *,
    budget: Budget,
    keep: Keep = None,
    arena: ArenaName = None,
    hardware: HardwareName = "auto",
    host_memory: HostMemory = None,
    device: DeviceName = "cpu",
    json: Json = False,
) -> None:
    """Execute a plan on a virtual clock, with `--device sim:NAME` the program too; show where it waits."""
    from penstock.cli import plan as plan_command
    from penstock.cli import run as run_command
    from penstock.runtime.program import open as open_program

    with console.spinner("planning"):
        program = open_program(artifact)
        asked = plan_command.Asked(program, budget, keep or (), arena, hardware, host_memory, device)
        decided = asked.plan()
    facts = plan_command.simulated(decided)
    if device != "cpu":
        with console.spinner(f"running on {device}"):
            facts += run_command.run_simulated(program, decided, device)
    if json:
        console.print_json(facts)
    else:
        plan_command.print_simulated(artifact, facts)


@app.command(epilog=examples("penstock inspect model.penstock --json"))
def inspect(artifact: Artifact, json: Json = False) -> None:
    """Show an artifact: methods, weights, steps and floors."""
    from penstock.cli.facts import artifact_facts, artifact_tables
    from penstock.runtime.program import open as open_program

    program = open_program(artifact)
    if json:
        console.print_json(artifact_facts(program))
        return
    for title, columns, rows in artifact_tables(program):
        console.print_table(title, columns, rows)


@app.command(epilog=examples("penstock verify model.penstock"))
def verify(artifact: Artifact, json: Json = False) -> None:
    """Hash every weight byte and prove every plan of an artifact."""
    from penstock.runtime.program import open as open_program

    program = open_program(artifact)
    with console.byte_progress() as progress:
        nbytes = program.verify(progress)
    if json:
        console.print_json({"path": str(artifact), "verified_bytes": nbytes})
    else:
        typer.echo(f"{artifact}: {format_size(nbytes)} of weights are those that were compiled")


@app.command(
    epilog=examples(
        "penstock run model.penstock --budget 50% --size batch=2",
        "penstock run model.penstock --budget 32MiB --input in.safetensors --output out.safetensors",
    )
)
def run(
    artifact: Artifact,
    *,
    budget: Budget,
    input: Annotated[
        Path | None, typer.Option(help="Safetensors file with one tensor per input; else generated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the outputs to this safetensors file.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="NAME=N: a dynamic size of generated inputs; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Which method to run, where there are several.")] = None,
    passes: Annotated[int, typer.Option(min=1, help="How often to run.")] = 1,
    keep: Keep = None,
    arena: ArenaName = None,
    device: DeviceName = "cpu",
    host_memory: HostMemory = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of generated inputs.")] = 0,
    json: Json = False,
) -> None:
    """Run an artifact within a byte budget and show what moved."""
    from penstock.cli.facts import run_facts, run_table
    from penstock.cli.run import Run, run_artifact

    if output is not None and output.exists():
        fail(f"{output} exists: choose another output")
    sizes = {name: integer(value, name) for name, value in pairs(size or [], "--size", "NAME=N")}
    with console.spinner(f"loading {artifact}") as say:
        asked = Run(
            artifact,
            budget,
            input,
            output,
            sizes,
            method,
            passes,
            tuple(keep or ()),
            arena,
            seed,
            device,
            host_memory,
        )
        done = run_artifact(asked, say)
    if json:
        console.print_json(run_facts(done))
    else:
        console.print_facts(f"{artifact} within {format_size(done.stats.budget)}", run_table(done))


@app.command(epilog=examples("penstock demo --part real"))
def demo(
    part: Annotated[
        DemoPart, typer.Option(help="cap: larger than memory; real: trained weights.")
    ] = DemoPart.all,
    size: Annotated[str | None, typer.Option(help="Weights of the decoder, for example 1GiB.")] = None,
    json: Json = False,
) -> None:
    """Show penstock at work: a decoder four times its memory, and a real sentence encoder."""
    from penstock.demo import run as run_demo

    raise typer.Exit(run_demo(part=part.value, size=size, json=json))


def main() -> None:
    """Run the command line; every error of the tree becomes one sentence and status 2."""
    try:
        app()
    except PenstockError as error:
        fail(str(error))
    except OSError as error:  # a path that cannot even be looked at
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        typer.echo("penstock: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()

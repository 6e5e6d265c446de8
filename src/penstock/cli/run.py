"""`penstock run`: passes of an artifact within a budget, and the bytes that moved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import check_outputs, check_there, integer, pairs
from penstock.schedule.facts.sizes import format_budget, format_size, format_time

if TYPE_CHECKING:
    from penstock.models.trial import TrialResult

EXAMPLES = (
    "penstock run model.penstock --budget 50% --size batch=2",
    "penstock run model.penstock --budget 32MiB --input in.safetensors --output out.safetensors",
)


def run(
    artifact: options.Artifact,
    *,
    budget: options.Budget,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors file with one tensor per input; else generated.", callback=check_there
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the outputs to this safetensors file.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="NAME=N: a dynamic size of generated inputs; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Which method to run, where there are several.")] = None,
    passes: Annotated[int, typer.Option(min=1, help="How often to run.")] = 1,
    keep: options.Keep = None,
    arena: options.ArenaName = None,
    device: options.DeviceName = "cpu",
    host_memory: options.HostMemory = None,
    engine: options.EngineName = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of generated inputs.")] = 0,
    force: options.Force = False,
    digest: options.Digest = None,
    trust: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Run an artifact within a byte budget and show what moved."""
    check_outputs(output, force=force)
    sizes = {name: integer(value, name) for name, value in pairs(size or [], "--size", "NAME=N")}
    with console.spinner(f"loading {artifact}") as say:
        from penstock.models.trial import Trial, run_trial
        from penstock.runtime.options import LoadOptions
        from penstock.runtime.program import open as open_program

        program = open_program(artifact, trust=trust)
        load = partial(
            program.load,
            budget,
            keep=keep or (),
            device=device,
            host_memory=host_memory,
            options=LoadOptions(engine=engine, arena=arena),
            digest=digest,
        )
        done = run_trial(program, Trial(method, passes, input, output, sizes, seed, force), load, say)
    if json:
        console.print_json(done.facts())
    else:
        within = format_budget(done.stats.budget, program.largest_budget)
        console.print_facts(f"{artifact} within {within}", _facts(done))


def _facts(done: TrialResult) -> list[tuple[str, str]]:
    stats = done.stats
    times = ", ".join(format_time(seconds * 1e9) for seconds in done.pass_seconds)
    return [
        ("time a pass", f"{times} (load {format_time(done.load_seconds * 1e9)})"),
        ("memory for weights", f"{format_size(stats.peak_bytes)} at most, of {format_budget(stats.budget)}"),
        ("moved", format_size(stats.bytes_moved)),
        *([("written", format_size(stats.bytes_written))] if stats.bytes_written else []),
        ("waited for weights", f"{format_time(stats.stall_seconds * 1e9)}, {stats.misses} misses"),
        ("weights live in", stats.arena),
        *[("output " + name, shape) for name, shape in done.outputs.items()],
    ]

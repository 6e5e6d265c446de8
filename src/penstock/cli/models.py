"""The commands for models that are not built here: `preflight`, `doctor` and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import console
from penstock.cli.inputs import fail
from penstock.cli.options import HostMemory, Json


def preflight(
    model: Annotated[
        str,
        typer.Argument(
            help="A transformers config.json or its folder, or module:function that returns a module and "
            "example inputs.",
            show_default=False,
        ),
    ],
    *,
    hardware: Annotated[
        list[str],
        typer.Option(help="A preset (t4, rtx4090, h200, ...), or auto: this machine. May be given again."),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(help="For weights: 80GiB, 25%. May be given again. Default: what the memory leaves."),
    ] = None,
    host_memory: HostMemory = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a call: 1 is a decoding step.")] = 1,
    context: Annotated[int, typer.Option(min=0, help="Tokens of a key-value cache to leave room for.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Instead of the configuration's: bfloat16, ...")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the plan as a page of HTML here.")] = None,
    json: Json = False,
) -> None:
    """Say whether and how a model will run on hardware that is not here, without building it."""
    from penstock.cli import preflight as command

    if report is not None and report.exists():
        fail(f"{report} exists: choose another output")
    asked = command.Preflight(
        model, tuple(hardware), tuple(budget or (None,)), host_memory, tokens, context, dtype
    )
    with console.spinner("importing") as say, console.quiet():
        found, findings = command.run(asked, say)
    if report is not None:
        command.write_report(findings, report)
    if json:
        command.print_json(found, findings)
    else:
        command.print_findings(found, findings)
    if not any(finding.plan for finding in findings):
        raise typer.Exit(1)


def doctor(
    model: Annotated[
        str,
        typer.Argument(help="module:function that returns a module and example inputs, or a config.json."),
    ],
    *,
    json: Json = False,
) -> None:
    """Say what of a model will export and stream, what will not, and which line is to blame."""
    from penstock.models.doctor import examine, facts

    with console.spinner(f"exporting {model} without building it"), console.quiet():
        checks = examine(model)
    if json:
        console.print_json(facts(checks))
    else:
        console.print_facts(model, [(f"{one.outcome:7} {one.name}", one.message) for one in checks])
    if any(one.outcome == "problem" for one in checks):
        raise typer.Exit(1)


def convert(
    source: Annotated[
        list[Path],
        typer.Argument(
            help="Safetensors, an index, a folder, or what torch.save or torch.distributed wrote.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .safetensors file, or a folder of shards.")
    ],
    shard_size: Annotated[str | None, typer.Option(help="Bytes of a shard at most: 5GB.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="For floating-point tensors: bfloat16, float16, float32.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Names to take, such as 'model.layers.0.*'. May be given again."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint in another layout or dtype, in bounded memory."""
    from penstock.runtime.checkpoint import convert as conversion

    with console.byte_progress() as progress:
        done = conversion.convert(
            source,
            output,
            shard_size=shard_size,
            dtype=dtype,
            only=only or (),
            force=force,
            progress=progress,
        )
    if json:
        console.print_json(conversion.describe(done))
    else:
        console.print_facts(str(output), conversion.summary(done))

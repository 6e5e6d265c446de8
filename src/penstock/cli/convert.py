"""`penstock convert`: a checkpoint in another layout or dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import console, options

EXAMPLES = (
    "penstock convert model/",
    "penstock convert model.pt -o model.safetensors",
    "penstock convert model/ -o model-bf16/ --dtype bfloat16 --shard-size 5GB",
)


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
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A .safetensors file, or a folder of shards. Default: a file beside what is converted.",
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            help="Bytes of a shard at most: 5GB.", callback=options.check_size("--shard-size", share=False)
        ),
    ] = None,
    dtype: options.DtypeName = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Names to take, such as 'model.layers.0.*'. May be given again."),
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint in another layout or dtype, in bounded memory."""
    from penstock.runtime.checkpoint import convert as conversion

    output = output or conversion.place_beside(source[0])
    with console.byte_progress(f"writing {output}") as progress:
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

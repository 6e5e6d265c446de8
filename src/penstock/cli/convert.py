"""`penstock convert`: a checkpoint in another layout or dtype, or with an adapter merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock._extras import ADAPTER, local_folder, require
from penstock.cli.terminal import console, options
from penstock.schedule.facts.errors import SourceError

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.convert import Converted

EXAMPLES = (
    "penstock convert model/",
    "penstock convert model.pt -o model.safetensors",
    "penstock convert model/ -o model-bf16/ --dtype bfloat16 --shard-size 5GB",
    "penstock convert model/ -o merged/ --merge adapter/",
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
        list[str] | None, typer.Option(help="Names to take, such as 'model.layers.0.*'. May be given again.")
    ] = None,
    merge: Annotated[
        Path | None,
        typer.Option(help="A folder with a LoRA adapter of peft; the model's folder or name is converted."),
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint in another layout or dtype, in bounded memory."""
    if merge is None:
        options.check_there(source)
    elif len(source) > 1 or only or force or output is None or output.suffix == ".safetensors":
        raise SourceError(
            "--merge writes the whole of one model's folder to a new folder: give one of each, with "
            "--output and without --only and --force"
        )
    else:
        require("peft", purpose="--merge")
        options.check_there([local_folder(source[0]), merge / ADAPTER])
    from penstock.runtime.checkpoint import convert as conversion

    target = output or conversion.place_beside(source[0])
    if merge is not None:
        done = _merge(local_folder(source[0]), merge, target, shard_size, dtype)
    else:
        names = only or ()
        with console.byte_progress(f"writing {target}") as progress:
            done = conversion.convert(
                source, target, shard_size=shard_size, dtype=dtype, only=names, force=force, progress=progress
            )
    if json:
        console.print_json(conversion.describe(done))
    else:
        console.print_facts(str(target), conversion.summary(done))


def _merge(folder: Path, adapter: Path, output: Path, shard_size: str | None, dtype: str | None) -> Converted:
    from penstock.integrations import merged

    with console.byte_progress(f"writing {output}") as progress:
        return merged.merge(
            folder, adapter, output, shard_size=shard_size or "5GB", dtype=dtype, progress=progress
        )

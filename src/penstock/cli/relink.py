"""`penstock relink`: lets an artifact refer to identical copies of its weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import console, options
from penstock.schedule.facts.sizes import format_size

EXAMPLES = ("penstock relink model.penstock", "penstock relink model.penstock /new/place/model.safetensors")


def relink(
    artifact: options.Artifact,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Copies of its weight files, or folders of them. Default: the files where they were.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Let an artifact refer to copies of its weight files, after every byte of the weights is checked."""
    from penstock.runtime.artifact import relink as relink_artifact

    with console.byte_progress(f"relinking {artifact}") as progress:
        program = relink_artifact(artifact, files or (), progress=progress)
    paths = [file.path for file in program.payload.files if Path(file.path).is_absolute()]
    if json:
        console.print_json({"path": str(artifact), "files": paths, "verified_bytes": program.weight_bytes})
    else:
        number = "1 file" if len(paths) == 1 else f"{len(paths)} files"
        verified = f"each byte of its {format_size(program.weight_bytes)} of weights is as it was compiled"
        console.print_text(f"{artifact} is relinked to {number}, and {verified}:")
        for path in paths:
            console.print_text(f"  {path}")

"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifact = Annotated[Path, typer.Argument(help="An artifact folder, NAME.penstock.", show_default=False)]
Budget = Annotated[
    str, typer.Option(help="Bytes for weights: 32MiB, 8GB, 50%, or bytes.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
Keep = Annotated[
    list[str] | None, typer.Option(help="Pattern of weights that stay in memory; may be given again.")
]
ArenaName = Annotated[
    str | None, typer.Option(help="mapped, pooled, contiguous or paged instead of the fastest.")
]

HardwareName = Annotated[
    str, typer.Option(help="A preset (rtx4090, h200, laptop, ...) instead of this machine, measured.")
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="What that hardware's host may hold of the weights; the rest from its disk."),
]
DeviceName = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, sim, or sim:NAME with any preset, such as sim:rtx4090.")
]

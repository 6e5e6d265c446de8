"""`penstock demo`: a demonstration of penstock on this machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.terminal import options

EXAMPLES = ("penstock demo --part real",)


class Part(StrEnum):
    """The parts of the demo."""

    all = "all"
    cap = "cap"
    real = "real"


def demo(
    part: Annotated[Part, typer.Option(help="cap: larger than memory; real: trained weights.")] = Part.all,
    size: Annotated[str | None, typer.Option(help="Weights of the decoder, for example 4GiB.")] = None,
    json: options.Json = False,
) -> None:
    """Show penstock at work: a decoder four times its memory, and a real sentence encoder."""
    from penstock.demo import run

    raise typer.Exit(run(part=part.value, size=size, json=json))

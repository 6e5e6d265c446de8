"""Options that several commands have. What they are given is checked before a command begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import PRESETS, find_hardware
from penstock.schedule.facts.sizes import parse_size

_Given = str | list[str] | None
_ANY_TOTAL = 1 << 60
"""Bytes of which a percentage is taken where only the form of a size is checked."""


def check_hardware(given: str) -> str:
    """Raise PlanError, which suggests the nearest, for a name that is neither a preset's nor `auto`."""
    return given if given == "auto" else find_hardware(given).name


def check_presets(given: list[str]) -> list[str]:
    """Raise PlanError for a name that is no preset's, where this machine cannot be measured."""
    if "auto" in given:
        raise PlanError(
            "--hardware auto measures how fast this machine reads a model's files, and a model that was "
            f"never built has none: give one of {', '.join(PRESETS)}, or compile it for `penstock plan`"
        )
    return [find_hardware(name).name for name in given]


def check_size(name: str, *, share: bool = True) -> Callable[[_Given], _Given]:
    """A check that raises BudgetError, naming the option, for what is no size; 50% is one with `share`."""

    def check(given: _Given) -> _Given:
        for size in [given] if isinstance(given, str) else given or []:
            parse_size(size, total=_ANY_TOTAL if share else None, name=name)
        return given

    return check


def offer(*names: str) -> Callable[[str], list[str]]:
    """What a shell completes the value of an option with; typer knows the parameter by its name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Artifact = Annotated[Path, typer.Argument(help="An artifact folder, NAME.penstock.", show_default=False)]
Budget = Annotated[
    str,
    typer.Option(
        help="Bytes for weights: 32MiB, 8GB, 50%, or bytes.",
        callback=check_size("--budget"),
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace outputs that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
Keep = Annotated[
    list[str] | None, typer.Option(help="Pattern of weights that stay in memory; may be given again.")
]
ArenaName = Annotated[
    str | None,
    typer.Option(
        help="mapped, pooled, contiguous or paged instead of the fastest.",
        autocompletion=offer("mapped", "pooled", "contiguous", "paged"),
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        help="A preset (rtx4090, h200, laptop, ...) instead of this machine, measured.",
        callback=check_hardware,
        autocompletion=offer("auto", *PRESETS),
    ),
]
PresetNames = Annotated[
    list[str],
    typer.Option(
        help="A preset (t4, rtx4090, h200, ...). May be given again.",
        callback=check_presets,
        autocompletion=offer(*PRESETS),
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="What that hardware's host may hold of the weights; the rest from its disk.",
        callback=check_size("--host-memory"),
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:1, sim, or sim:NAME with any preset, such as sim:rtx4090.",
        autocompletion=offer("cpu", "cuda", "sim", *(f"sim:{name}" for name in PRESETS)),
    ),
]

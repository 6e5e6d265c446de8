"""Options that several commands have. Their values are checked before a command begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.schedule.facts.errors import PlanError, StreamError
from penstock.schedule.facts.hardware import PRESETS, find_hardware
from penstock.schedule.facts.sizes import parse_size

_Given = str | list[str] | None
_ARENAS = ("mapped", "pooled", "contiguous", "paged")
_ACTIVATIONS = ("auto", "keep", "layers")
_ENGINES = ("auto", "native", "python")
_DTYPES = ("bfloat16", "float16", "float32")
_ANY_TOTAL = 1 << 60
"""The bytes of which a percentage is taken when only the form of a size is checked."""


def check_hardware(given: str) -> str:
    """Raise PlanError for what names no hardware and is not `auto`."""
    if given != "auto":
        find_hardware(given)
    return given


def check_presets(given: list[str]) -> list[str]:
    """Raise PlanError for a name that is no preset, for a command that cannot measure this machine."""
    if "auto" in given:
        raise PlanError(
            "--hardware auto measures how fast this machine reads a model's files, and a model that was "
            f"never built has none: give one of {', '.join(PRESETS)}, or compile it for `penstock plan`"
        )
    return [check_hardware(name) for name in given]


def check_size(name: str, *, share: bool = True) -> Callable[[_Given], _Given]:
    """A check that raises BudgetError, naming the option, for a value that is no size; `share` allows 50%."""

    def check(given: _Given) -> _Given:
        for size in [given] if isinstance(given, str) else given or []:
            parse_size(size, total=_ANY_TOTAL if share else None, name=name)
        return given

    return check


def check_arena(given: str | None) -> str | None:
    """Raise PlanError for a name that no arena has; the weights decide later whether they can be in it."""
    if given is not None and given not in _ARENAS:
        raise PlanError(f"there is no arena {given!r}: choose {', '.join(_ARENAS[:-1])} or {_ARENAS[-1]}")
    return given


def check_engine(given: str) -> str:
    """Raise StreamError for a name that no engine has."""
    if given not in _ENGINES:
        raise StreamError(
            f"there is no engine {given!r}: choose {', '.join(_ENGINES[:-1])} or {_ENGINES[-1]}"
        )
    return given


def check_device(given: str) -> str:
    """Raise StreamError for a name that no device has, and PlanError for a preset that does not exist."""
    if given != "cpu":
        from penstock.runtime.device.opening import device_kind, hardware_of

        device_kind(given)
        hardware_of(given)
    return given


def offer(*names: str) -> Callable[[str], list[str]]:
    """A function that completes the value of an option in a shell; typer finds its parameter by name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Artifact = Annotated[Path, typer.Argument(help="An artifact folder, NAME.penstock.", show_default=False)]
Budget = Annotated[
    str,
    typer.Option(
        help="Memory for weights: 32MiB, 8GB, 50% of them, or bytes.",
        callback=check_size("--budget"),
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace outputs that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
Keep = Annotated[
    list[str] | None,
    typer.Option(help="Weights that stay in memory, such as 'lm_head.*'. May be given again."),
]
Digest = Annotated[
    str | None,
    typer.Option(help="The digest that the artifact must have, to the last byte (docs/security.md)."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run code of this file as well: you trust whoever made it (docs/security.md)."
    ),
]
ArenaName = Annotated[
    str | None,
    typer.Option(
        help="mapped, pooled, contiguous or paged instead of the fastest.",
        callback=check_arena,
        autocompletion=offer(*_ARENAS),
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        help="What a program that is trained keeps for its backward: keep or layers.",
        autocompletion=offer(*_ACTIVATIONS),
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        help="What executes the plan on a CPU: auto, native or python.",
        callback=check_engine,
        autocompletion=offer(*_ENGINES),
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        help="A preset (rtx4090, h200, laptop, ...), with figures of yours (rtx4090,link=12GB/s), or a "
        ".json file, instead of this machine, measured.",
        callback=check_hardware,
        autocompletion=offer("auto", *PRESETS),
    ),
]
PresetNames = Annotated[
    list[str],
    typer.Option(
        help="A preset (t4, rtx4090, h200, ...), with figures of yours (rtx4090,link=12GB/s), or a .json "
        "file. May be given again.",
        callback=check_presets,
        autocompletion=offer(*PRESETS),
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="With a GPU: what its host may hold of the weights, such as 32GiB; the rest comes from disk.",
        callback=check_size("--host-memory"),
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:1, sim, or sim:NAME with any preset, such as sim:rtx4090.",
        callback=check_device,
        autocompletion=offer("cpu", "cuda", "sim", *(f"sim:{name}" for name in PRESETS)),
    ),
]
DtypeName = Annotated[
    str | None,
    typer.Option(
        help="For floating-point tensors, instead of what they have: bfloat16, float16, float32.",
        autocompletion=offer(*_DTYPES),
    ),
]

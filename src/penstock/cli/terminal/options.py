"""Options that several commands have, and checks of their values before a command begins."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn
from zipfile import BadZipFile

import typer

from penstock.schedule.atomic_file import reporting
from penstock.schedule.bounded_file import open_regular, open_zip
from penstock.schedule.facts.errors import PenstockError, PlanError, SourceError
from penstock.schedule.facts.hardware import PRESETS, find_hardware
from penstock.schedule.facts.sizes import parse_size

_Paths = Path | list[Path] | None

_OF_SAVE = re.compile(r"[^/]+/data\.pkl")
"""A member of the zip that torch.save writes."""


def fail(sentence: str) -> NoReturn:
    """Print one sentence on stderr and exit with status 2."""
    typer.echo(f"penstock: {sentence}", err=True)
    sys.exit(2)


def check_outputs(*paths: Path | None, force: bool) -> None:
    """Fail if a file cannot be written where an output should be; called before work that takes time."""
    for path in paths:
        if path is None:
            continue
        with reporting(path):
            if path.is_dir():
                fail(f"{path} is a folder: choose a file for this output")
            if path.exists() and not force:
                fail(f"{path} exists: choose another output, or overwrite it with --force")
            if not path.absolute().parent.is_dir():
                fail(
                    f"there is no folder {path.parent} to write {path.name} to: make it, or choose another "
                    "output"
                )


def check_there(paths: _Paths) -> _Paths:
    """Raise SourceError for a path that leads nowhere; called before torch is imported to open it."""
    for path in [paths] if isinstance(paths, Path) else paths or []:
        if not path.exists():
            raise SourceError(f"{path} is not a file or folder that exists: correct the path")
    return paths


def check_artifact(folder: Path) -> Path:
    """Raise SourceError for what is no artifact; called before torch is imported to open it."""
    from penstock.runtime.files.artifact_files import read_payload_bytes

    read_payload_bytes(folder)
    return folder


def check_folder(artifact: Path, *, force: bool) -> None:
    """Raise SourceError where no artifact can be written; called before torch is imported."""
    from penstock.runtime.files.artifact_files import PAYLOAD
    from penstock.runtime.system.atomic import check_output

    check_output(artifact, force=force, marker=PAYLOAD)


def load_exported(path: Path, *, trust: bool) -> Any:
    """Load the program that torch.export.save wrote to `path`; fail without trust, or if it is none."""
    from penstock.runtime.files.safetensors_file import reading

    with reading(path):
        if not path.is_file():
            fail(
                f"{path} is not a file or folder that exists: give a program saved by torch.export.save "
                "(.pt2), the folder of a model, or module:function"
            )
    _check_program(path)
    if not trust:
        fail(
            f"{path} is read by torch.export.load, which may run code: give --trust if you trust whoever "
            "saved it, or compile the model itself"
        )
    import torch

    from penstock.passes.calls.stored_program import load_stored

    try:
        return load_stored(path)
    except Exception as error:
        fail(f"{path} is not a program that this torch ({torch.__version__}) can load: {first_line(error)}")


def _check_program(path: Path) -> None:
    """Fail for files that are no program whoever wrote them; nothing in them is run."""
    from penstock.runtime.files.safetensors_file import reading

    holds_weights = path.suffix in (".safetensors", ".gguf")
    if not holds_weights:
        try:
            with reading(path), open(open_regular(path), "rb") as file, open_zip(file, path) as archive:
                holds_weights = any(map(_OF_SAVE.fullmatch, archive.namelist()))
        except BadZipFile:
            fail(f"{path} is not a program that torch.export.save wrote: give one that it wrote (.pt2)")
    if holds_weights:
        fail(
            f"{path} holds weights, and no program to run them: give the folder of the model; or a program "
            f"that torch.export.save wrote (.pt2), or module:function, with --weights {path}"
        )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's type if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def pairs(items: list[str], option: str, form: str) -> list[tuple[str, str]]:
    """The name and the value of each `NAME=VALUE` of an option; fails for an item of another form."""
    for pair in items:
        if "=" not in pair:
            fail(f"{option} {pair!r} is not of the form {form}")
    return [(name, value) for name, _, value in (pair.partition("=") for pair in items)]


def integer(value: str, name: str) -> int:
    """The number of an option `--size NAME=N`; fails if it is no whole number."""
    if not value.isdecimal():
        fail(f"--size {name}={value} is not a whole number")
    return int(value)


_Given = str | list[str] | None
_ARENAS = ("mapped", "contiguous", "paged")
_ACTIVATIONS = ("auto", "keep", "layers")
_ENGINES = ("auto", "native", "python")
_DTYPES = ("bfloat16", "float16", "float32")
_ANY_TOTAL = 1 << 60
"""The bytes of which a percentage is taken when only the form of a size is checked."""


def check_hardware(name: str) -> str:
    """Raise PlanError for what names no hardware and is not `auto`."""
    if name != "auto":
        find_hardware(name)
    return name


def check_presets(names: list[str]) -> list[str]:
    """Raise PlanError for a name that is no preset, for a command that cannot measure this machine."""
    if "auto" in names:
        raise PlanError(
            "--hardware auto measures how fast this machine reads a model's files, and a model that was "
            f"never built has none: give one of {', '.join(PRESETS)}, or compile it for `penstock plan`"
        )
    return [check_hardware(name) for name in names]


def check_size(name: str, *, share: bool = True) -> Callable[[_Given], _Given]:
    """A check that raises BudgetError, naming the option, for a value that is no size; `share` allows 50%."""

    def check(sizes: _Given) -> _Given:
        for size in [sizes] if isinstance(sizes, str) else sizes or []:
            parse_size(size, total=_ANY_TOTAL if share else None, name=name)
        return sizes

    return check


def check_choice(noun: str, names: Sequence[str]) -> Callable[[str | None], str | None]:
    """A check that raises PenstockError, before torch is imported, for what is none of the names."""

    def check(name: str | None) -> str | None:
        if name is not None and name not in names:
            raise PenstockError(f"there is no {noun} {name!r}: choose {', '.join(names[:-1])} or {names[-1]}")
        return name

    return check


def check_device(name: str) -> str:
    """Raise StreamError for a name that no device has, and PlanError for a preset that does not exist."""
    if name != "cpu":
        from penstock.runtime.device.opening import device_kind, hardware_of

        device_kind(name)
        hardware_of(name)
    return name


def offer(*names: str) -> Callable[[str], list[str]]:
    """A function that completes the value of an option in a shell; typer finds its parameter by name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _one_of(noun: str, names: Sequence[str], help: str) -> Any:
    return typer.Option(help=help, callback=check_choice(noun, names), autocompletion=offer(*names))


Artifact = Annotated[
    Path,
    typer.Argument(help="An artifact folder, NAME.penstock.", callback=check_artifact, show_default=False),
]
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
_KEPT = "What a program that is trained keeps for its backward: keep or layers."
_DTYPE = "For floating-point tensors, instead of what they have: bfloat16, float16, float32."
ArenaName = Annotated[
    str | None, _one_of("arena", _ARENAS, "mapped, contiguous or paged instead of the fastest.")
]
Activations = Annotated[str, _one_of("way to keep activations", _ACTIVATIONS, _KEPT)]
EngineName = Annotated[
    str, _one_of("engine", _ENGINES, "What executes the plan on a CPU: auto, native or python.")
]
DtypeName = Annotated[str | None, _one_of("dtype", _DTYPES, _DTYPE)]
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

"""Checks of the files, pairs and numbers that commands are given; a wrong one ends the command."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NoReturn
from zipfile import BadZipFile

import typer

from penstock.schedule.atomic_file import reporting
from penstock.schedule.bounded_file import open_regular, open_zip

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


def check_artifact(folder: Path) -> None:
    """Raise SourceError for what is no artifact; called before torch is imported to open it."""
    from penstock.runtime.files.artifact_files import read_payload_bytes

    read_payload_bytes(folder)


def check_folder(artifact: Path, *, force: bool) -> None:
    """Raise SourceError where no artifact can be written; called before torch is imported."""
    from penstock.runtime.files.artifact_files import PAYLOAD
    from penstock.runtime.system.atomic import check_output

    check_output(artifact, force=force, marker=PAYLOAD)


def load_exported(path: Path, *, trust: bool) -> Any:
    """Load the program that torch.export.save wrote to `path`; fail without trust, or if it is none."""
    import torch

    from penstock.passes.calls.stored_program import load_stored
    from penstock.runtime.files.safetensors_file import reading

    with reading(path):
        there = path.is_file()
    if not there:
        fail(f"{path} is not a file: give a program saved by torch.export.save")
    _check_program(path)
    if not trust:
        fail(
            f"{path} is read by torch.export.load, which may run code: give --trust if you trust whoever "
            "saved it, or compile the model itself"
        )
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


def weight_files(weights: list[Path] | None) -> Path | list[Path] | None:
    """The files in the form that `penstock.compile(weights=...)` takes."""
    return weights[0] if weights and len(weights) == 1 else weights or None


def pairs(items: list[str], option: str, form: str) -> list[tuple[str, str]]:
    """The name and the value of each `NAME=VALUE` of an option; fails for an item of another form."""
    for item in items:
        if "=" not in item:
            fail(f"{option} {item!r} is not of the form {form}")
    return [(name, value) for name, _, value in (item.partition("=") for item in items)]


def integer(value: str, name: str) -> int:
    """The number of an option `--size NAME=N`; fails if it is no whole number."""
    if not value.isdecimal():
        fail(f"--size {name}={value} is not a whole number")
    return int(value)

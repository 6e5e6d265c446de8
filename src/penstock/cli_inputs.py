"""What commands are given: files, pairs and numbers, checked; and how they refuse."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer


def fail(sentence: str) -> NoReturn:
    """One sentence on stderr, and status 2."""
    typer.echo(f"penstock: {sentence}", err=True)
    sys.exit(2)


def load_exported(path: Path) -> Any:
    """The program that torch.export.save wrote to `path`."""
    import torch

    if not path.is_file():
        fail(f"{path} is not a file: give a program saved by torch.export.save")
    try:
        return _load(path)
    except Exception as error:
        fail(f"{path} is not a program that this torch ({torch.__version__}) can load: {first_line(error)}")


def _load(path: Path) -> Any:
    """torch.export.load, twice where the first time names a library that knows the program's outputs."""
    import torch

    imported: set[str] = set()
    while True:
        with _logged_errors() as logged:
            try:
                return torch.export.load(path)
            except Exception as error:
                cause = logged[-1] if logged and "warnings above" in str(error) else error
        module = _unregistered(cause)
        if module is None or module in imported:
            raise cause
        imported.add(module)
        importlib.import_module(module)


def _unregistered(error: BaseException) -> str | None:
    """The module of a library whose import lets torch load its types."""
    found = re.search(r"Deserializing ((?:transformers|diffusers)\.[\w.]+)\.\w+ in pytree", str(error))
    return found[1] if found else None


@contextmanager
def _logged_errors() -> Iterator[list[BaseException]]:
    """The errors that torch logs, in place of its log: one of them is the reason."""
    errors: list[BaseException] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                errors.append(record.exc_info[1])

    named = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict)}
    torchs = [found for name, found in named.items() if name.split(".")[0] == "torch" and found.handlers]
    before = [(found, found.handlers) for found in torchs]
    try:
        for found in torchs:
            found.handlers = [Keep()]
        yield errors
    finally:
        for found, handlers in before:
            found.handlers = handlers


def first_line(error: Exception) -> str:
    """What an error says first, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def weight_files(weights: list[Path] | None) -> Path | list[Path] | None:
    """As `penstock.compile(weights=...)` takes them."""
    return weights[0] if weights and len(weights) == 1 else weights or None


def pairs(items: list[str], option: str, form: str) -> list[tuple[str, str]]:
    """The two sides of each `NAME=VALUE` of an option."""
    for item in items:
        if "=" not in item:
            fail(f"{option} {item!r} is not of the form {form}")
    return [(name, value) for name, _, value in (item.partition("=") for item in items)]


def integer(value: str, name: str) -> int:
    """A number of an option `--size NAME=N`."""
    if not value.isdecimal():
        fail(f"--size {name}={value} is not a whole number")
    return int(value)

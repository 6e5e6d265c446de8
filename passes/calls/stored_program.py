"""Loads what torch.export.save wrote, and imports the library that defines the types of its outputs."""

from __future__ import annotations

import importlib
import io
import logging
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram

_Loaded = TypeVar("_Loaded")


def load_stored(stored: Path | bytes) -> ExportedProgram:
    """The program in a file, or in the bytes of a file. It is code, so load only what you trust.

    Imports transformers or diffusers if the types of the program's outputs need it. Raises what torch raises;
    where torch logs the reason and raises something else, raises the reason. Logs nothing.
    """
    return with_types(lambda: _load(stored), trust=True)


_KNOWN = ("diffusers.models.modeling_outputs", "transformers.cache_utils", "transformers.modeling_outputs")
"""Modules that register the types of most results, and that are imported for whoever made a program."""


def with_types(load: Callable[[], _Loaded], *, trust: bool) -> _Loaded:
    """The result of `load`, after the modules that register the types that it asks for are imported.

    Without `trust` these are the known ones; all others have to be imported before.
    """
    imported: set[str] = set()
    while True:
        try:
            return load()
        except Exception as error:
            module = _unregistered(error)
            if module is None or module in imported or not (trust or module in _KNOWN):
                raise
        imported.add(module)
        importlib.import_module(module)


def _load(stored: Path | bytes) -> ExportedProgram:
    with _logged_errors() as logged, _type_hints_once():
        try:
            return torch.export.load(io.BytesIO(stored) if isinstance(stored, bytes) else stored)
        except Exception as error:
            raise (logged[-1] if logged and "warnings above" in str(error) else error) from None


def _unregistered(error: BaseException) -> str | None:
    """The module that registers the type that torch could not load; None if that is not the error."""
    type_name = re.search(r"Deserializing ((?:transformers|diffusers)\.[\w.]+)\.\w+ in pytree", str(error))
    return type_name[1] if type_name else None


@contextmanager
def _logged_errors() -> Iterator[list[BaseException]]:
    """Collects the errors that torch would log, and keeps them out of the log: one of them is the reason."""
    errors: list[BaseException] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                errors.append(record.exc_info[1])

    named = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict)}
    torchs = [logger for name, logger in named.items() if name.split(".")[0] == "torch" and logger.handlers]
    before = [(logger, logger.handlers) for logger in torchs]
    try:
        for logger in torchs:
            logger.handlers = [Keep()]
        yield errors
    finally:
        for logger, handlers in before:
            logger.handlers = handlers


@contextmanager
def _type_hints_once() -> Iterator[None]:
    """Resolve the types of torch's schema once, not for every node: that was half of a load (torch 2.13)."""
    from torch._export.serde import serialize  # this import takes a second, and most programs are data

    resolve = typing.get_type_hints
    hints: dict[type, dict[str, Any]] = {}

    def resolve_once(cls: type, **namespaces: Any) -> dict[str, Any]:
        if cls not in hints:
            hints[cls] = resolve(cls, **namespaces)
        return hints[cls]

    names = {name: value for name, value in vars(typing).items() if not name.startswith("__")}
    module: Any = serialize
    module.typing = SimpleNamespace(**names | {"get_type_hints": resolve_once})
    try:
        yield
    finally:
        module.typing = typing

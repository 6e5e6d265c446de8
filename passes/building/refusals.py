"""Models that cannot be built or exported: those refused beforehand, and the reports of failures."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from penstock.schedule.facts.errors import PassError

_BRANCH = "values decide which way it goes: torch.where or torch.cond make both ways part of the program"
_OPERATOR = "the operator does not say what it returns: register a fake of it, or do without"
_PLAIN = "call the model in memory like this: if it runs there, write this line with torch's operators alone"

_REMEDIES: tuple[tuple[type[BaseException], str], ...] = (
    (GuardOnDataDependentSymNode, _BRANCH),
    (DataDependentOutputException, _BRANCH),
    (DynamicOutputShapeException, "values decide about sizes: give the result a size that its inputs decide"),
    (UnsupportedOperatorException, _OPERATOR),
    (UnsupportedFakeTensorException, _OPERATOR),
)


def refuse_scripted(model: object, name: str = "the model") -> None:
    """Raises PassError for a module that `torch.jit` compiled: its parameters cannot be replaced."""
    parts = [("", model)]
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        parts += model.named_modules()
    for path, part in parts:
        if isinstance(part, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise PassError(
                f"{path or name} is a {type(part).__name__}, which torch.jit compiled, so that its Python "
                "is gone: give the nn.Module that it was made from"
            )


def check_inputs(module: nn.Module, example: Any, giver: str = "the caller") -> None:
    """Raises PassError for example inputs that do not fit `forward`; messages name their source, `giver`."""
    if isinstance(example, str) or not isinstance(example, Sequence | Mapping):
        raise PassError(
            f"{giver} gives {type(example).__name__} as example inputs, expected a tuple of the positional "
            "arguments, such as (x,), or a mapping of names"
        )
    by_name = isinstance(example, Mapping)
    signature = inspect.signature(module.forward)
    args, kwargs = ((), dict(example)) if by_name else (tuple(example), {})
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        example_text = ", ".join(map(str, example)) if by_name else f"{len(example)} by position"
        raise PassError(
            f"{giver} gives example inputs ({example_text}) that do not fit "
            f"{type(module).__name__}.forward({', '.join(signature.parameters)}): {error}"
        ) from error


def remedy(error: BaseException) -> str:
    """Returns advice after a failed export, by the class of its error or of that error's cause."""
    from torch._dynamo.exc import UserError  # this import takes a second, and is needed only here

    if "fake impl" in str(error):
        return _OPERATOR
    causes = [error, error.__cause__, error.__context__]
    remedies: list[tuple[type[BaseException], str]]
    remedies = [*_REMEDIES, (UserError, "export it for fewer dynamic sizes, or with what it asks for")]
    texts = [text for cause in causes for kind, text in remedies if isinstance(cause, kind)]
    return next(iter(texts), _PLAIN)


def sentence(error: Exception) -> str:
    """Returns the first line of an error's message, or its class where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def own_sentence(error: Exception) -> str:
    """Returns what `sentence` does, with the class of an error whose message is no more than a key."""
    return f"{type(error).__name__}: {sentence(error)}" if isinstance(error, KeyError) else sentence(error)


def where(error: BaseException) -> str:
    """Returns the innermost line of a traceback that is in the user's code; an empty string if none is."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def caller() -> str:
    """Returns the line of the user's code that is running now; an empty string if there is none."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: Iterable[FrameSummary]) -> str:
    """Returns the last frame outside torch, torchao, Python and this package; an empty string if none is."""
    package = Path(__file__).parents[2]
    libraries = [sys.modules[name].__file__ for name in ("torch", "torchao") if name in sys.modules]
    folders = (*(Path(str(file)).parent for file in libraries), package, *package.iterdir())
    own_places = tuple(os.path.join(path.resolve(), "") for path in folders)
    python = sysconfig.get_path("stdlib")
    outside = [
        frame
        for frame in frames
        if not str(Path(frame.filename).resolve()).startswith(own_places)
        and not frame.filename.startswith("<")
        and (not frame.filename.startswith(python) or "-packages" in frame.filename)
    ]
    if not outside:
        return ""
    return f" at {outside[-1].filename}:{outside[-1].lineno}, in {outside[-1].name}: {outside[-1].line}"

"""Whether example inputs are what a module's forward can be called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.schedule.facts.errors import PassError


def check_inputs(module: nn.Module, example: Any, giver: str = "the caller") -> None:
    """PassError for example inputs that `forward` cannot be called with; `giver` is who gives them."""
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
        given = ", ".join(map(str, example)) if by_name else f"{len(example)} by position"
        raise PassError(
            f"{giver} gives example inputs ({given}) that do not fit "
            f"{type(module).__name__}.forward({', '.join(signature.parameters)}): {error}"
        ) from error

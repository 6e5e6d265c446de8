"""What a module remembers of a call: a program forgets it, so that later calls would be other ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.integrations.emptied.watch import attributes, different

_TORCH = frozenset(vars(nn.Module()))

_AGAIN = ("long_inv_freq", "_output_capturing_hooks_installed")
"""Ends of the names of what transformers keeps, and would compute again to the same values."""


@contextmanager
def watch_memory(module: nn.Module) -> Iterator[list[str]]:
    """A list that gets the names of attributes and buffers that a call, made inside, changed.

    They are as before afterwards, so that each export begins with the module that was applied.
    """
    before, buffers, drawn = attributes(module), dict(module.named_buffers()), random.getstate()
    kept = [(child, _copies(vars(child))) for child in module.modules()]
    names: list[str] = []
    try:
        yield names
        names += [name for name in different(before, attributes(module)) if not name.endswith(_AGAIN)]
        now = dict(module.named_buffers())
        names += [name for name in {**buffers, **now} if buffers.get(name) is not now.get(name)]
        names += [] if random.getstate() == drawn else ["random numbers of Python's"]
    finally:
        for child, held in kept:
            _give_back(child, held)


def _copies(held: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes that are no state of torch's, with copies of those that may be changed in place."""
    return {
        key: (value, value.copy() if type(value) in (dict, list, set) else None)
        for key, value in held.items()
        if key not in _TORCH
    }


def _give_back(module: nn.Module, held: dict[str, tuple[Any, Any]]) -> None:
    kept = vars(module)
    for key in [key for key in kept if key not in held and key not in _TORCH and not key.endswith(_AGAIN[1])]:
        del kept[key]
    for key, (value, copied) in held.items():
        kept[key] = value
        if copied is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(copied)

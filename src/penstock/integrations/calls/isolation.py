"""Keeps an export from leaving traces in a module and its library, and finds what calls would remember."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.integrations.emptied.watch import MEMORY, attributes, different
from penstock.schedule.facts.errors import PassError

_TORCH = frozenset(vars(nn.Module()))

_AGAIN = ("long_inv_freq", "_output_capturing_hooks_installed")
"""Ends of the names of attributes that transformers keeps, and would compute again to the same values."""


_FLAT = ("_flat_weights", "_flat_weight_refs")
"""Lists of its own parameters that torch's LSTM, GRU and RNN make again in a call where these were replaced,
as they are in an export."""


class RememberedError(PassError):
    """A module keeps something of a call for another one, however it is exported."""


@contextmanager
def watch_memory(module: nn.Module) -> Iterator[list[str]]:
    """A list that is given the names of attributes and buffers that a call inside the body changed.

    They are put back afterwards, so that each export begins with the module as it was applied. What it knows
    of another call (`MEMORY`) cannot be read inside: PassError.
    """
    before, buffers, drawn = attributes(module), dict(module.named_buffers()), random.getstate()
    kept = [(child, _copies(vars(child))) for child in module.modules()]
    names: list[str] = []
    memory = [(child, name) for child in module.modules() for name in MEMORY & vars(child).keys()]
    try:
        for child, name in memory:
            vars(child)[name] = _Unreadable(name)
        yield names
        names += [name for child, name in memory if not isinstance(vars(child)[name], _Unreadable)]
        flat = tuple(_lists_of_weights(module))
        changed = [name for name in different(before, attributes(module)) if not name.endswith(_AGAIN)]
        names += [name for name in changed if not name.startswith(flat)]
        now = dict(module.named_buffers())
        names += [name for name in {**buffers, **now} if buffers.get(name) is not now.get(name)]
        names += [] if random.getstate() == drawn else ["random numbers of Python's"]
    finally:
        for child, held in kept:
            _give_back(child, held)


def _lists_of_weights(module: nn.Module) -> Iterator[str]:
    """Beginnings of the names of what torch's LSTM, GRU and RNN keep of their own parameters."""
    for path, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            yield from (f"{path}.{name}.".removeprefix(".") for name in _FLAT)


class _Unreadable:
    """Stands for what a module remembers of another call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        raise self._error()

    def __getitem__(self, _: object) -> Any:
        raise self._error()

    def __radd__(self, _: object) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def _error(self) -> RememberedError:
        return RememberedError(
            f"it reads {self._name}, which it remembers of another call: give it position_ids, as generate "
            "does"
        )


def _copies(held: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes that are not torch's own, with copies of those that can be changed in place."""
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

"""Kinds of calls, told apart by cheap facts, and calls that are refused.

A wrong guess of a kind costs reads on demand, never bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.passes.calls.tracers import tracer_of
from penstock.schedule.facts.errors import StreamError


def kind_of(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return a hashable value that is equal for calls which probably run the same steps.

    It has the dimensions of tensors as 0, 1 or more, the values of flags and strings, and whether a cache is
    empty.
    """
    return method, tuple(map(_fact, args)), tuple((name, _fact(value)) for name, value in kwargs.items())


class KnownKinds:
    """The orders that calls of each kind have run in.

    The next one is expected to run in the order that came last behind the two calls before it: a step cache
    of diffusers has calls of one kind run whole, or in part, by turns.
    """

    def __init__(self) -> None:
        self.clear()

    def __contains__(self, kind: object) -> bool:
        return kind in self._last

    def clear(self) -> None:
        """Forget everything."""
        self._last: dict[object, int] = {}
        self._behind: dict[object, int] = {}
        self._before: tuple[int, ...] = ()

    def note(self, kind: object, order: int) -> None:
        """Remember the order of a call."""
        self._last[kind] = self._behind[kind, self._before] = order
        self._before = (*self._before[-1:], order)

    def last(self, kind: object) -> int | None:
        """Return the order of the last call of a kind; None if there was none."""
        return self._last.get(kind)

    def expected(self, kind: object, default: int | None) -> int | None:
        """Return the order that a call of a kind probably has; `default` if none has run."""
        return self._behind.get((kind, self._before), self._last.get(kind, default))


def _fact(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(min(size, 2) for size in value.shape)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_fact, value))
    if hasattr(value, "get_seq_length"):  # a cache of transformers
        return type(value), _is_filled(value)
    return type(value)


def _is_filled(cache: Any) -> object:
    """Tell whether a cache holds tokens; a cache of an encoder-decoder also has whether its encoder ran."""
    try:
        updated = getattr(cache, "is_updated", None)
        return bool(cache.get_seq_length() > 0), any(updated.values()) if updated else None
    except Exception:  # the class of a model's own may ask for more
        return None


IN_MEMORY = (
    "have the weights in memory for that (restore() what apply returned, or load the model with its library)"
)
"""What whoever came by `apply` and whoever came by `load` can do where weights that stream do not serve."""


def refuse_elsewhere(arguments: object, name: str, process: int) -> None:
    """Raise StreamError in a forked child, or in a tracer, whose record would run without the weights."""
    if os.getpid() != process:
        raise StreamError(f"a forked child cannot call the {name}: load it in the child")
    if tracer := tracer_of(pytree.tree_leaves(arguments)):
        raise StreamError(
            f"{tracer} cannot record a model whose weights come and go while it runs: {IN_MEMORY}"
        )


def refuse_grad(arguments: object) -> None:
    """Raise StreamError where the caller would expect gradients, which streaming does not give."""
    leaves = pytree.tree_leaves(arguments) if torch.is_grad_enabled() else ()
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise StreamError(
            "an input requires grad and grad mode is on: gradients through streamed weights are not "
            "supported, so call under torch.no_grad(), detach the input, or apply with train=True"
        )

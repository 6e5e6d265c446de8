"""Tensor subclasses taken apart into the plain tensors that they are made of, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.passes.graph.lines import caller
from penstock.schedule.facts.errors import PassError


def has_parts(value: object) -> bool:
    """Whether a tensor is one to its module and several in memory, and says which."""
    return is_traceable_wrapper_subclass(value)


def flattened(value: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors of a subclass, in the order in which torch takes it apart."""
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        part: torch.Tensor = getattr(value, name)
        if has_parts(part):
            yield from flattened(part, f"{prefix}{name}.")
        else:
            yield prefix + name, part


def plain_tensors(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What holds a tensor's bytes: itself under its name, or its parts, each as `NAME.PART`."""
    return {f"{name}.{part}": one for part, one in flattened(value)} if has_parts(value) else {name: value}


def each_part(value: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `other` makes of a tensor; for a subclass one like it, made of what `other` makes of its parts."""
    if not has_parts(value):
        return other(value)
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: each_part(getattr(value, name), other) for name in names}
    kind: Any = type(value)
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, value.shape, value.stride())
    return nn.Parameter(made, requires_grad=False) if isinstance(value, nn.Parameter) else made


def in_one_part(value: torch.Tensor) -> torch.Tensor:
    """A tensor that a constructor made, itself; PassError for one of several parts: those need values."""
    if has_parts(value):
        raise PassError(
            f"the constructor quantises{caller()}: it makes a {type(value).__name__}, which takes values; "
            "quantise the model in memory, or give the folder it was saved to to penstock.integrations.load"
        )
    return value

"""Which sizes of a call a program leaves open, tried in stages, each of which fixes more of them.

A program whose sizes are all open serves every call of its kind, and some models cannot be exported so: they
ask whether a picture's side is even, or torch looks for the answer to such a question for minutes. What is
fixed is part of the program then, and a call of another size is exported anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from penstock.integrations.calls.arguments import Collected, State, Tree
from penstock.integrations.calls.kinds import Call
from penstock.integrations.calls.values import Values, values_of
from penstock.schedule.facts.errors import PassError

LIMIT_S = 120.0
"""Processor time of an export with open sizes: as long as a model of a hundred layers may take."""

_PICTURE = 4
"""Dimensions of a tensor that counts as pictures, from which on all but the first one are fixed first."""


@dataclass(frozen=True)
class Stage:
    """A choice: `fixed` says in words what is part of the program, `sizes` is what export gets.

    `values` are those of tensors that say how large others are.
    """

    fixed: str
    sizes: tuple[dict[int, Any], ...]
    values: Values
    limit_s: float | None


def stages_of(call: Call) -> list[Stage]:
    """The stages of a call, from the one that serves most calls on; each fixes more than the one before."""
    inside, given = set(_tensors_in_states(call.tree, inside=False)), len(call.tensors) - len(call.trained)
    found: list[Stage] = []
    for values, fixed, opens in _STAGES:
        sizes = tuple(
            {
                d: Dim.AUTO
                for d, n in enumerate(one.shape)
                if k < given and n > 1 and opens(one, d, k in inside)
            }
            for k, one in enumerate(call.tensors)
        )
        stage = Stage(fixed, sizes, values_of(call) if values else (), LIMIT_S if any(sizes) else None)
        if not found or (sizes, stage.values) != (found[-1].sizes, found[-1].values):
            found.append(stage)
    return found


def _everything(_one: torch.Tensor, _d: int, _held: bool) -> bool:
    return True


def _no_pictures(one: torch.Tensor, d: int, held: bool) -> bool:
    return held or d == 0 or one.ndim < _PICTURE or not one.is_floating_point()


def _only_caches(_one: torch.Tensor, _d: int, held: bool) -> bool:
    return held


def _nothing(_one: torch.Tensor, _d: int, _held: bool) -> bool:
    return False


_STAGES: tuple[tuple[bool, str, Callable[[torch.Tensor, int, bool], bool]], ...] = (
    (False, "no size", _everything),
    (True, "numbers of patches", _everything),
    (True, "sides of pictures", _no_pictures),
    (True, "all sizes but those of caches", _only_caches),
    (True, "all sizes", _nothing),
)
"""Whether a stage fixes values, what it fixes in words, and whether it leaves open a dimension of a tensor,
which a cache may hold."""


def _tensors_in_states(tree: Tree, *, inside: bool) -> Iterator[int]:
    """The indices of the tensors that objects with a state hold, sizes of their own included."""
    for leaf in tree.leaves:
        if isinstance(leaf, State):
            yield from _tensors_in_states(leaf.held, inside=True)
        elif inside and (isinstance(leaf, Collected) or hasattr(leaf, "index")):
            yield leaf.index


@contextmanager
def within(limit_s: float | None) -> Iterator[None]:
    """Raise PassError where the body calls an operator after that much processor time of this thread."""
    if limit_s is None:
        yield
        return
    with _Deadline(limit_s):
        yield


class _Deadline(TorchFunctionMode):
    """Looks at the clock before each operator that Python calls."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self._limit_s, self._until = limit_s, time.thread_time() + limit_s

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if time.thread_time() > self._until:
            raise PassError(f"the export took more than {self._limit_s:.0f} s of processor time")
        return func(*args, **(kwargs or {}))

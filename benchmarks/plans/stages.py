"""The stages of the planner that can be left out, and what replaces each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

from penstock.schedule.search.contiguous import _Search
from penstock.schedule.search.paged import OneTrace

_SCHEDULE = "penstock.schedule"


@dataclass(frozen=True)
class Stage:
    """A stage by name; `swaps` stand in for names below `penstock.schedule`, written `module:name`.

    The stage takes part in a plan that calls the function `reached` (the first of the swaps unless another is
    given). Plans without it are made with the share `effort` of the search.
    """

    name: str
    swaps: Mapping[str, Any]
    reached: str = ""
    effort: float = 1.0

    @property
    def entry(self) -> str:
        return self.reached or next(iter(self.swaps))


def locate(path: str) -> tuple[Any, str]:
    """The module or class that has the name, and the name."""
    module, _, name = path.partition(":")
    owner: Any = import_module(f"{_SCHEDULE}.{module}")
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, last


@contextmanager
def replaced(swaps: Mapping[str, Any]) -> Iterator[None]:
    """Other values for these names, for as long as it lasts; AttributeError where there is no such name."""
    with ExitStack() as stack:
        for path, value in swaps.items():
            stack.enter_context(patch.object(*locate(path), value))
        yield


@contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[set[str]]:
    """The names of the stages that take part, collected while plans are made."""
    seen: set[str] = set()
    with ExitStack() as stack:
        for entry, some in itertools.groupby(
            sorted(stages, key=lambda one: one.entry), lambda one: one.entry
        ):
            owner, name = locate(entry)
            stack.enter_context(patch.object(owner, name, _noting(getattr(owner, name), list(some), seen)))
        yield seen


def _noting(function: Callable[..., Any], stages: Sequence[Stage], seen: set[str]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.update(stage.name for stage in stages)
        return function(*args, **kwargs)

    return noted


def _unrelaxed(self: OneTrace, relaxed: Any, best: Any = OneTrace.best) -> Any:
    return best(self, None)


def _one_margin(
    self: OneTrace, kept: Any, margin: int, *, quantum: int, most: int, timed: Any = OneTrace._time_rounded
) -> None:
    timed(self, kept, 0, quantum=quantum, most=most)


def _no_quanta(
    self: OneTrace, kept: Any, margin: int, *, quantum: int, most: int, timed: Any = OneTrace._time_rounded
) -> None:
    if not quantum:
        timed(self, kept, margin, quantum=quantum, most=most)


def _evenly(self: _Search, _: Any) -> list[float]:
    return [float(block.size) for block in self.blocks]


def _as_relaxed(self: _Search, wanted: Any, families: Any = _Search._families) -> Iterator[Any]:
    if wanted != _evenly(self, None):
        yield from families(self, wanted)


def _no_ends(self: _Search, wanted: Any, families: Any = _Search._families) -> Iterator[Any]:
    return (family for family in families(self, wanted) if not family.ends)


def _by_size(sizes: Sequence[int], alive: Any) -> Iterator[list[int]]:
    yield sorted(range(len(sizes)), key=lambda block: -sizes[block])


_CONTIGUOUS = "search.contiguous"
_REACHED = f"{_CONTIGUOUS}:search"

STAGES = (
    Stage("a quarter of the search", {}, "planner:_fastest", 0.25),
    Stage("ladder of budgets", {"planner:_rungs_below": lambda *_: []}, "planner:pass_ns"),
    # Paged arenas.
    Stage("relaxation", {"search.paged:OneTrace.best": _unrelaxed}),  # an equal share of every gap is kept
    Stage("memory left free", {"search.paged:OneTrace._time_rounded": _one_margin}),
    Stage("rounding in copies", {"search.paged:OneTrace._time_rounded": _no_quanta}),
    Stage("joining by size", {"search.paged:in_sizes": lambda pieces, **_: list(pieces)}),
    Stage("joining", {"clock.transfers:Joiner.fastest": lambda self, pieces: list(pieces)}),
    Stage("runs", {"search.paged:Runs.choices": lambda *_: iter(())}),
    Stage("ends moved", {"search.paged:OneTrace._improve": lambda *_: None}),
    Stage(
        "ends moved in pairs", {"search.paged:_shuffled_pairs": lambda _: []}, "search.paged:Runs.neighbours"
    ),
    Stage("plans by age", {"search.paged:_search_runs": lambda *_: None}),
    # Contiguous arenas.
    Stage("small storages outside", {"planner:_small": lambda *_: frozenset()}, _REACHED),
    Stage("largest sizes", {f"{_CONTIGUOUS}:_SIZES": 1}, _REACHED),
    Stage("smallest sizes", {f"{_CONTIGUOUS}:_SMALLEST": (0.0,)}, _REACHED),
    Stage("spread as the relaxation copies", {f"{_CONTIGUOUS}:_Search._copied": _evenly}, _REACHED),
    Stage("spread evenly", {f"{_CONTIGUOUS}:_Search._families": _as_relaxed}, _REACHED),
    Stage("large blocks at the ends", {f"{_CONTIGUOUS}:_Search._families": _no_ends}, _REACHED),
    Stage("columns", {f"{_CONTIGUOUS}:_Search._columns": lambda _: iter(())}, _REACHED),
    Stage("sizes of parts", {f"{_CONTIGUOUS}:_LEAST_PARTS": (16,)}, _REACHED),
    Stage("joining parts of blocks", {"search.draft:_joined": lambda pieces, *_: iter(pieces)}, _REACHED),
    Stage("fewest young bytes", {"space.addresses:_Room._bytes_of": lambda *_: 0}, _REACHED),
    # Memory for blocks.
    Stage("orders", {"space.addresses:_orders": _by_size}, "space.addresses:_squeaked"),
    Stage("squeaky wheel", {"space.addresses:_tries": lambda *_: 0}, "space.addresses:_squeaked"),
    Stage("branch and bound", {"space.addresses:_EXACT": -1}, "space.addresses:_BranchAndBound.run"),
)
"""In the order of the table. Those of the search for a contiguous arena are left out of its plans only."""

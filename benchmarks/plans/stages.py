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
    """A stage by name: what the planner does in its place, and how it is made to.

    `swaps` has what stands in for names below `penstock.schedule`, written `module:name`. The stage takes
    part in a plan that calls the function `reached` (the first of the swaps unless another is given). It
    changes what the function `within` returns, if it is a part of one that the benchmark remembers.
    """

    name: str
    instead: str
    swaps: Mapping[str, Any]
    reached: str = ""
    effort: float = 1.0
    within: str = ""

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


def _as_relaxed(self: _Search, wanted: Any, families: Any = _Search._families) -> Iterator[Any]:
    if wanted != [float(block.size) for block in self.blocks]:
        yield from families(self, wanted)


def _no_ends(self: _Search, wanted: Any, families: Any = _Search._families) -> Iterator[Any]:
    return (family for family in families(self, wanted) if not family.ends)


def _by_size(sizes: Sequence[int], alive: Any) -> Iterator[list[int]]:
    yield sorted(range(len(sizes)), key=lambda block: -sizes[block])


_ONE_TRACE, _CONTIGUOUS = "search.paged", "search.contiguous"

STAGES = (
    Stage("a quarter of the search", "`effort=0.25`", {}, "planner:_fastest", 0.25),
    Stage(
        "ladder of budgets",
        "small problems are planned for the given budget alone",
        {"planner:_rungs_below": lambda *_: []},
        "planner:pass_ns",
    ),
    # Paged arenas.
    Stage("relaxation", "an equal share of every gap is kept", {f"{_ONE_TRACE}:OneTrace.best": _unrelaxed}),
    Stage(
        "memory left free",
        "none is left for rounding and for copies on their way",
        {f"{_ONE_TRACE}:OneTrace._time_rounded": _one_margin},
    ),
    Stage(
        "rounding in copies",
        "rounded to single spans only",
        {f"{_ONE_TRACE}:OneTrace._time_rounded": _no_quanta},
    ),
    Stage(
        "joining by size",
        "the roundings' copies stay apart",
        {f"{_ONE_TRACE}:in_sizes": lambda pieces, **_: list(pieces)},
    ),
    Stage(
        "joining",
        "the copies of runs stay apart",
        {"clock.transfers:Joiner.fastest": lambda self, pieces: list(pieces)},
    ),
    Stage(
        "runs",
        "no choice of runs is tried, only the roundings",
        {"search.paged:Runs.choices": lambda *_: iter(())},
    ),
    Stage("ends moved", "runs stay as rounded", {f"{_ONE_TRACE}:OneTrace._improve": lambda *_: None}),
    Stage(
        "ends moved in pairs",
        "one end at a time, where spans are few too",
        {"search.paged:_shuffled_pairs": lambda _: []},
        "search.paged:Runs.neighbours",
    ),
    Stage(
        "plans by age",
        "the search for a contiguous arena is not asked",
        {"search.paged:_search_runs": lambda *_: None},
    ),
    # Contiguous arenas.
    Stage(
        "largest sizes",
        "blocks up to the smallest or the largest size stream",
        {f"{_CONTIGUOUS}:_SIZES": 1},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "smallest sizes",
        "blocks from any size on stream",
        {f"{_CONTIGUOUS}:_SMALLEST": (0.0,)},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "spread as the relaxation copies",
        "spread evenly only",
        {f"{_CONTIGUOUS}:_Search._copied": lambda self, _: [float(block.size) for block in self.blocks]},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "spread evenly",
        "spread as the relaxation copies only",
        {f"{_CONTIGUOUS}:_Search._families": _as_relaxed},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "large blocks at the ends",
        "they stay or stream as others do",
        {f"{_CONTIGUOUS}:_Search._families": _no_ends},
        f"{_CONTIGUOUS}:search",
    ),
    Stage("pairs", "no pairs are tried", {f"{_CONTIGUOUS}:_PAIRS": ()}, f"{_CONTIGUOUS}:search"),
    Stage(
        "sizes of parts",
        "parts are joined up to one size",
        {f"{_CONTIGUOUS}:_LEAST_PARTS": (16,)},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "joining parts of blocks",
        "each is copied by itself",
        {"search.draft:_joined": lambda pieces, *_: iter(pieces)},
        f"{_CONTIGUOUS}:search",
    ),
    Stage(
        "fewest young bytes",
        "of equal places the lowest is taken",
        {"space.addresses:_Room._bytes_of": lambda *_: 0},
        f"{_CONTIGUOUS}:search",
        within=f"{_CONTIGUOUS}:place_oldest",
    ),
    # Memory for blocks.
    Stage(
        "orders",
        "first fit by size alone is improved",
        {"space.addresses:_orders": _by_size},
        "space.addresses:_squeaked",
    ),
    Stage(
        "squeaky wheel",
        "the best of the orders",
        {"space.addresses:_tries": lambda *_: 0},
        "space.addresses:_squeaked",
    ),
    Stage(
        "branch and bound",
        "few blocks as many",
        {"space.addresses:_EXACT": -1},
        "space.addresses:_BranchAndBound.run",
    ),
)
"""In the order of the tables. Those of the search for a contiguous arena are left out of its plans only."""

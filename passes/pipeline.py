"""Passes, and the pipeline that orders and runs them.

A pass is a function that takes a program and returns a program, and changes nothing that its caller still
holds. `declare` states which facts the pass requires of its program and which facts it ensures; a pipeline
runs a pass behind those that ensure what it requires. A pipeline is a literal tuple of passes, and is itself
a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import fx

from penstock.schedule.facts.errors import PassError

Value = TypeVar("Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def declare(
    *, requires: tuple[str, ...] = (), ensures: tuple[str, ...] = ()
) -> Callable[[_Function], _Function]:
    """Return a decorator that says which facts a pass requires of its program, and which hold of its result.

    A fact is a name, such as "plain parts". A fact that holds of a program holds after every other pass too.

    Args:
        requires: Facts that hold of the program before the pass.
        ensures: Facts that hold of the program after it.

    Raises:
        PassError: The facts are one text, not a tuple.

    Example:
        >>> @penstock.declare(ensures=("even",))
        ... def double(number):
        ...     return 2 * number
    """
    declared: tuple[object, ...] = (requires, ensures)
    for facts in declared:
        if isinstance(facts, str):
            raise PassError(f"facts are a tuple of names, got {facts!r}: give ({facts!r},)")

    def mark(function: _Function) -> _Function:
        vars(function).update(requires=requires, ensures=ensures)
        return function

    return mark


@dataclass(frozen=True)
class Pipeline(Generic[Value]):
    """Applies passes to a value, each pass behind those that ensure what it requires.

    Passes keep their order wherever their declarations allow it, and none moves across a pass that declares
    nothing. Every pass returns a value of the type it was given. An error that a pass raises goes through,
    with a note that names the pass and its position, counted from 1.

    Args:
        passes: Functions of a value that return a value.
        requires: Facts that hold of the value from the start.

    Raises:
        PassError: No pass or two passes ensure a fact, or passes wait for each other; when it runs, a pass
            returned a value of another type.

    Example:
        >>> penstock.Pipeline((abs, float))(-3.0)
        3.0
    """

    passes: tuple[Callable[[Value], Value], ...]
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes[k] for k in _order(self.passes, self.requires)))

    @property
    def ensures(self) -> tuple[str, ...]:
        """The facts that the passes ensure together."""
        return tuple(fact for run in self.passes for fact in _facts(run, "ensures"))

    def __call__(self, program: Value) -> Value:
        for position, run in enumerate(self.passes, start=1):
            program = self._apply(run, program, position)
        return program

    def _apply(self, run: Callable[[Value], Value], program: Value, position: int) -> Value:
        where = f"pass {position} of {len(self.passes)} ({_name(run)})"
        try:
            result = run(program)
        except Exception as error:
            error.add_note(f"in {where}")
            raise
        # Every graph module is of a class of its own.
        expected = fx.GraphModule if isinstance(program, fx.GraphModule) else type(program)
        if not isinstance(result, expected):
            got = "None" if result is None else type(result).__name__
            raise PassError(
                f"{where} returned {got} instead of {expected.__name__}: "
                "let it return the program it was given, changed or not"
            )
        return result


def _facts(run: Callable[..., Any], attribute: str) -> tuple[str, ...]:
    facts: tuple[str, ...] | None = getattr(run, attribute, None)
    if facts is None and isinstance(run, partial):
        facts = getattr(run.func, attribute, None)
    return facts or ()


def _name(run: Callable[..., Any]) -> str:
    run = run.func if isinstance(run, partial) else run
    return getattr(run, "__qualname__", None) or type(run).__name__


def _order(passes: tuple[Callable[..., Any], ...], known: tuple[str, ...]) -> list[int]:
    makers: dict[str, int] = {}
    for k, run in enumerate(passes):
        for fact in _facts(run, "ensures"):
            if makers.setdefault(fact, k) != k:
                first = _name(passes[makers[fact]])
                raise PassError(f"passes {first} and {_name(run)} both ensure {fact!r}: leave one out")
    edges = []
    for k, run in enumerate(passes):
        for fact in set(_facts(run, "requires")).difference(known):
            if fact not in makers:
                raise PassError(
                    f"pass {_name(run)} requires {fact!r}, which no pass of the pipeline ensures: add one "
                    f"that does, or Pipeline(..., requires=({fact!r},)) where it holds of the program already"
                )
            edges.append((makers[fact], k))
    if all(first < second for first, second in edges):
        return list(range(len(passes)))
    return _sorted(passes, edges)


def _sorted(passes: tuple[Callable[..., Any], ...], edges: list[tuple[int, int]]) -> list[int]:
    import networkx

    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(range(len(passes)))
    for k, run in enumerate(passes):
        if not _facts(run, "requires") and not _facts(run, "ensures"):
            graph.add_edges_from((before, k) for before in range(k))
            graph.add_edges_from((k, behind) for behind in range(k + 1, len(passes)))
    try:
        return list(networkx.lexicographical_topological_sort(graph))
    except networkx.NetworkXUnfeasible:
        circle = ", ".join(_name(passes[first]) for first, _ in networkx.find_cycle(graph))
        raise PassError(
            f"the passes {circle} wait for each other, the last for the first: let one of them require "
            "less, or move a pass that declares nothing"
        ) from None

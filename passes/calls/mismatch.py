"""Says in words how the arguments of a call differ from those that the program was exported with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from torch.utils import _pytree as pytree


def describe_mismatch(expected: pytree.TreeSpec, got: pytree.TreeSpec, leaves: Sequence[str]) -> str:
    """Returns which arguments of a call are missing, too many or of another structure, and what it takes.

    `expected` and `got` are the trees of (args, kwargs) at export and of the call, `leaves` the names of the
    leaves of `expected`.
    """
    names, keywords = _names(expected, leaves), _keywords(expected)
    takes = ", ".join(names) + (", *, " if names else "*, ") * bool(keywords) + ", ".join(keywords)
    wrong = [*_positional(expected, got, names), *_by_keyword(expected, got, names)]
    return f"the call does not fit the program: {'; '.join(wrong)}. It takes ({takes}), as it was exported"


def _names(expected: pytree.TreeSpec, leaves: Sequence[str]) -> list[str]:
    """The names of positional arguments; of one that is a tree, what the names of its leaves begin with."""
    names, begin = [], 0
    for position, child in enumerate(expected.children()[0].children()):
        own = leaves[begin : begin + child.num_leaves]
        begin += child.num_leaves
        words = zip(*(name.split("_") for name in own), strict=False)
        shared = "_".join(word[0] for word in takewhile(lambda word: len(set(word)) == 1, words))
        name = shared if child.is_leaf() else shared.rstrip("_0123456789")
        names.append(name or f"argument {position + 1}")
    return names


def _keywords(spec: pytree.TreeSpec) -> list[str]:
    return list(spec.children()[1].context or ())


def _positional(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    given = got.children()[0].children()
    by_keyword = set(_keywords(got)) - set(_keywords(expected))
    for name in names[len(given) :]:
        yield f"{name} is given by keyword, and is positional" if name in by_keyword else f"{name} is missing"
    if len(given) > len(names):
        yield f"{len(given)} positional arguments are given, and it takes {len(names)}"
    for name, one, other in zip(names, expected.children()[0].children(), given, strict=False):
        yield from _differences(name, one, other)


def _by_keyword(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    wanted = dict(zip(_keywords(expected), expected.children()[1].children(), strict=True))
    given = dict(zip(_keywords(got), got.children()[1].children(), strict=True))
    for name, tree in wanted.items():
        if name not in given:
            yield f"{name} is missing"
        else:
            yield from _differences(name, tree, given[name])
    late = names[len(got.children()[0].children()) :]
    for name in given.keys() - wanted.keys() - set(late):
        yield f"{name} is given twice" if name in names else f"{name} is no argument of it"


def _differences(name: str, expected: pytree.TreeSpec, got: pytree.TreeSpec) -> Iterator[str]:
    """The differences of one argument, down to the first trees that are of another kind or length."""
    if expected == got:
        return
    same = expected.type is got.type and expected.context == got.context
    if expected.is_leaf() or got.is_leaf() or not same or expected.num_children != got.num_children:
        yield f"{name} is {_kind(got)}, expected {_kind(expected)}"
        return
    for key, one, other in zip(_keys(expected), expected.children(), got.children(), strict=True):
        yield from _differences(f"{name}[{key!r}]", one, other)


def _kind(spec: pytree.TreeSpec) -> str:
    """What a tree is: one value, or a class with its length and, of a dictionary, its keys."""
    if spec.is_leaf():
        return "one value"
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        return f"a {spec.type.__name__} of {', '.join(map(repr, _keys(spec))) or 'nothing'}"
    return f"a {spec.type.__name__} of {spec.num_children}"


def _keys(spec: pytree.TreeSpec) -> list[Any]:
    """What leads from a tree to each of its children: keys of a dictionary, else positions."""
    if isinstance(spec.context, list) and len(spec.context) == spec.num_children:
        return spec.context
    return list(range(spec.num_children))

"""Turns the arguments of a call into checked leaves, and flat outputs into the result of the call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import InputChecks, Leaf, TensorLeaf
from penstock.passes.calls.signature import CallSignature
from penstock.passes.calls.tracers import refuse_tracers
from penstock.schedule.facts.errors import StreamError


class CallingConvention:
    """Turns a call's arguments into checked leaves, and flat values into the call's result.

    `names` are the names of the leaves. Leaves that were on the exported program's device must be on
    `target`.
    """

    def __init__(self, signature: CallSignature, target: torch.device) -> None:
        self._in_spec = signature.in_spec
        self._out_spec = signature.out_spec
        self._flat = _is_flat(self._in_spec)
        self._keywords: list[str] = list(self._in_spec.children()[1].context or ()) if self._in_spec else []
        leaves = [_moved(leaf, signature.device, target) for leaf in signature.leaves]
        self.names = [leaf.name for leaf in leaves]
        self._checks = InputChecks(leaves, signature.guards)
        self._to_leaf, self._to_weight = signature.to_leaf, signature.to_weight

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves in the graph's order.

        Keyword arguments may come in any order. Raises StreamError for arguments of another structure than
        the exported ones, for a leaf that `InputChecks` refuses, and within a tracer of torch's.
        """
        if self._flat and not kwargs and all(type(arg) is torch.Tensor for arg in args):
            leaves = list(args)
            if len(leaves) == self._flat:
                refuse_tracers(leaves)
                self._checks.check(leaves)
                return leaves
        if kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, received = pytree.tree_flatten((args, dict(kwargs)))
        if self._in_spec is not None and received != self._in_spec:
            raise StreamError(_describe_mismatch(self._in_spec, received, self.names))
        refuse_tracers(leaves)
        self._checks.check(leaves)
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments from leaves in the graph's order."""
        if self._in_spec is None:
            return tuple(leaves), {}
        args, kwargs = pytree.tree_unflatten(list(leaves), self._in_spec)
        return args, kwargs

    def finish(
        self, values: Sequence[Any], leaves: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> Any:
        """Writes mutated inputs and weights back, and returns the results in the caller's structure.

        `values` are the flat outputs of a functional program, and `tensors` the bound weights by FQN.
        """
        results = []
        for position, value in enumerate(values):
            if position in self._to_leaf:
                leaves[self._to_leaf[position]].copy_(value)
            elif position in self._to_weight:
                tensors[self._to_weight[position]].copy_(value)
            else:
                results.append(value)
        return self.unflatten_results(results)

    def unflatten_results(self, results: list[Any]) -> Any:
        """Returns flat results in the structure of the exported module's result."""
        return pytree.tree_unflatten(results, self._out_spec)


def _moved(leaf: Leaf, source: torch.device, target: torch.device) -> Leaf:
    if isinstance(leaf, TensorLeaf) and leaf.device == source.type:
        return replace(leaf, device=target.type)
    return leaf


def _is_flat(spec: pytree.TreeSpec | None) -> int:
    """The number of positional arguments if all are leaves and there are no keyword arguments; else 0."""
    if spec is None:
        return 0
    positional, keywords = spec.children()
    nested = keywords.num_children or any(not child.is_leaf() for child in positional.children())
    return 0 if nested else positional.num_children


def _describe_mismatch(expected: pytree.TreeSpec, got: pytree.TreeSpec, leaves: Sequence[str]) -> str:
    """Returns a sentence: which arguments are missing, too many or of another structure, and what fits.

    `expected` and `got` are the trees of (args, kwargs) at export and of the call, `leaves` the names of the
    leaves of `expected`.
    """
    names, keywords = _names(expected, leaves), _keywords(expected)
    takes = ", ".join(names) + (", *, " if names else "*, ") * bool(keywords) + ", ".join(keywords)
    wrong = [*_positional(expected, got, names), *_by_keyword(expected, got, names)]
    return f"the call does not fit the program: {'; '.join(wrong)}. It takes ({takes}), as it was exported"


def _names(expected: pytree.TreeSpec, leaves: Sequence[str]) -> list[str]:
    """The names of positional arguments. An argument with several leaves is named by their common prefix."""
    names, begin = [], 0
    for position, child in enumerate(expected.children()[0].children()):
        own_leaves = leaves[begin : begin + child.num_leaves]
        begin += child.num_leaves
        words = zip(*(name.split("_") for name in own_leaves), strict=False)
        shared = "_".join(word[0] for word in takewhile(lambda word: len(set(word)) == 1, words))
        name = shared if child.is_leaf() else shared.rstrip("_0123456789")
        names.append(name or f"argument {position + 1}")
    return names


def _keywords(spec: pytree.TreeSpec) -> list[str]:
    return list(spec.children()[1].context or ())


def _positional(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    by_position = got.children()[0].children()
    by_keyword = set(_keywords(got)) - set(_keywords(expected))
    for name in names[len(by_position) :]:
        yield f"{name} is given by keyword, and is positional" if name in by_keyword else f"{name} is missing"
    if len(by_position) > len(names):
        many = (
            f"{len(by_position)} positional arguments are"
            if len(by_position) > 1
            else "a positional argument is"
        )
        yield f"{many} given, and it takes {len(names) or 'none'}"
    for name, wanted_tree, other in zip(names, expected.children()[0].children(), by_position, strict=False):
        yield from _differences(name, wanted_tree, other)


def _by_keyword(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    wanted = dict(zip(_keywords(expected), expected.children()[1].children(), strict=True))
    by_name = dict(zip(_keywords(got), got.children()[1].children(), strict=True))
    for name, tree in wanted.items():
        if name not in by_name:
            yield f"{name} is missing"
        else:
            yield from _differences(name, tree, by_name[name])
    late = names[len(got.children()[0].children()) :]
    for name in by_name.keys() - wanted.keys() - set(late):
        yield f"{name} is given twice" if name in names else f"{name} is no argument of it"


def _differences(name: str, expected: pytree.TreeSpec, got: pytree.TreeSpec) -> Iterator[str]:
    """Yield the differences in one argument, down to the first trees that differ in kind or length."""
    if expected == got:
        return
    same = expected.type is got.type and expected.context == got.context
    if expected.is_leaf() or got.is_leaf() or not same or expected.num_children != got.num_children:
        yield f"{name} is {_kind(got)}, expected {_kind(expected)}"
        return
    for key, wanted_tree, other in zip(_keys(expected), expected.children(), got.children(), strict=True):
        yield from _differences(f"{name}[{key!r}]", wanted_tree, other)


def _kind(spec: pytree.TreeSpec) -> str:
    """A tree in words: one value, or a class with its length, or with its keys if it is a dictionary."""
    if spec.is_leaf():
        return "one value"
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        return f"a {spec.type.__name__} of {', '.join(map(repr, _keys(spec))) or 'nothing'}"
    return f"a {spec.type.__name__} of {spec.num_children}"


def _keys(spec: pytree.TreeSpec) -> list[Any]:
    """The keys of a tree's children: those of a dictionary, and positions otherwise."""
    if isinstance(spec.context, list) and len(spec.context) == spec.num_children:
        return spec.context
    return list(range(spec.num_children))

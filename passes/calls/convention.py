"""Turns the arguments of a call into checked leaves, and flat outputs into its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import InputChecks, Leaf, TensorLeaf
from penstock.passes.calls.mismatch import describe_mismatch
from penstock.passes.calls.signature import CallSignature
from penstock.schedule.facts.errors import StreamError


class CallingConvention:
    """Turns a call's arguments into checked leaves, and flat values into the call's result.

    `names` are those of the leaves. Leaves of the device that the program was exported for are expected on
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

        Keyword arguments may come in any order. Raises StreamError for another tree than the exported one,
        and for a leaf that `InputChecks` refuses.
        """
        if self._flat and not kwargs and all(type(arg) is torch.Tensor for arg in args):
            leaves = list(args)
            if len(leaves) == self._flat:
                self._checks.check(leaves)
                return leaves
        if kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, received = pytree.tree_flatten((args, dict(kwargs)))
        if self._in_spec is not None and received != self._in_spec:
            raise StreamError(describe_mismatch(self._in_spec, received, self.names))
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
        """Writes the mutations of a functional program back, and returns its results as the caller's tree.

        `tensors` holds the bound weights by FQN.
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
        """Returns the caller's tree of results."""
        return pytree.tree_unflatten(results, self._out_spec)


def _moved(leaf: Leaf, source: torch.device, target: torch.device) -> Leaf:
    if isinstance(leaf, TensorLeaf) and leaf.device == source.type:
        return replace(leaf, device=target.type)
    return leaf


def _is_flat(spec: pytree.TreeSpec | None) -> int:
    """The number of positional arguments, where all are leaves and nothing else is asked for; else 0."""
    if spec is None:
        return 0
    positional, keywords = spec.children()
    nested = keywords.num_children or any(not child.is_leaf() for child in positional.children())
    return 0 if nested else positional.num_children

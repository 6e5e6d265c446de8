"""Takes the arguments of a call apart into tensors and a tree of the rest, and builds them again.

The tensors change from call to call; the tree is part of the kind of call. Objects that hold state (the
caches of transformers) are taken apart too. The number of tokens that they have seen changes with every call,
so it becomes the size of a tensor without elements, and one exported program serves all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.schedule.facts.errors import PassError

STATE_MODULES = ("transformers.cache_utils", "diffusers.models.autoencoders.vae")
"""The modules whose classes hold tensors: caches between calls, and distributions."""


@dataclass(frozen=True)
class Collected:
    """The tensor with number `index` of those that were collected."""

    index: int


@dataclass(frozen=True)
class Given:
    """In an output: the input, or the state, with number `index`."""

    index: int
    state: bool = False


@dataclass(frozen=True)
class Count:
    """A whole number in a state: the first size of the collected tensor `index`, which has no elements."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A value that is part of the kind of call."""

    value: Any


@dataclass(frozen=True)
class Tree:
    """Nested containers: torch's description of their structure, and their leaves."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def key(self) -> str:
        """A string that is equal for trees of the same structure with the same constants."""
        return f"{self.spec} {[_key(leaf) for leaf in self.leaves]}"


@dataclass(frozen=True)
class State:
    """An object that holds state: its class, and the tree of its attributes."""

    kind: type
    held: Tree


def _key(leaf: Any) -> str:
    if isinstance(leaf, State):
        return f"{leaf.kind.__qualname__} {leaf.held.key}"
    return f"{type(leaf.value).__name__} {leaf.value!r}" if isinstance(leaf, Constant) else repr(leaf)


def is_state(value: object) -> bool:
    """Whether a value is an object that a library keeps between calls, and not one that it returns."""
    known = type(value).__module__ in STATE_MODULES and hasattr(value, "__dict__")
    return known and not isinstance(value, dict)


class Collector:
    """Takes values apart and collects their tensors and states; refers to those that were given before."""

    def __init__(self, tensors: Sequence[torch.Tensor] = (), states: Sequence[object] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.states: list[object] = list(states)
        self._inputs = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._known = {id(state): index for index, state in enumerate(states)}
        self._leaves: dict[int, Collected] = {}

    def take(self, value: Any) -> Tree:
        """The tree of a value. Raises PassError for what is neither a tensor nor a plain constant."""
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_state)
        return Tree(spec, tuple(self._leaf(leaf) for leaf in leaves))

    def state(self, value: Any) -> State:
        """The class and the attributes of an object that holds state."""
        return State(type(value), self._held(vars(value)))

    def _held(self, held: dict[str, Any]) -> Tree:
        numbered = {
            key: _Number(value) if key in _NUMBERS and _is_whole(value) else value
            for key, value in held.items()
            if key not in _BESIDE
        }
        leaves, spec = pytree.tree_flatten(numbered, is_leaf=is_state)
        return Tree(spec, tuple(self._in_state(leaf) for leaf in leaves))

    def _in_state(self, leaf: Any) -> Any:
        if isinstance(leaf, _Number):
            return self._add(torch.empty((leaf.value, 0)), Count)
        return self._leaf(leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return self._add(torch.empty((leaf, 0)), Count)
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._inputs:
                return Given(self._inputs[id(leaf)])
            if id(leaf) not in self._leaves:  # a tensor given twice stays one, as modules compare identities
                self._leaves[id(leaf)] = self._add(leaf, Collected)
            return self._leaves[id(leaf)]
        if is_state(leaf):
            return self._state(leaf)
        if leaf is None or isinstance(leaf, (*_PLAIN, torch.Generator)):
            return Constant(Unused.GENERATOR if isinstance(leaf, torch.Generator) else leaf)
        raise PassError(
            f"a {type(leaf).__name__} is neither a tensor nor a plain value, and what it holds cannot be "
            "part of an exported program: call the model without it"
        )

    def _state(self, leaf: object) -> Given | State:
        if id(leaf) in self._known:
            return Given(self._known[id(leaf)], state=True)
        self._known[id(leaf)] = len(self.states)
        self.states.append(leaf)
        return self.state(leaf)

    def _add(self, tensor: torch.Tensor, kind: Any) -> Any:
        self.tensors.append(tensor)
        return kind(len(self.tensors) - 1)


class Unused(enum.Enum):
    """Stands for an argument that a program cannot have; a module that uses it cannot be exported."""

    GENERATOR = "torch.Generator"


@dataclass(frozen=True)
class _Number:
    """A whole number in a state that changes from call to call."""

    value: int | torch.SymInt


def _is_whole(value: object) -> bool:
    return isinstance(value, torch.SymInt) or type(value) is int


_NUMBERS = frozenset({"cumulative_length", "cumulative_length_int", "max_cache_len"})
"""Attributes of states that count tokens: those seen so far, and those for which there is room."""

_BESIDE = frozenset({"_is_user_defined"})
"""Attributes of states that `generate` sets for itself."""

_PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    enum.Enum, type,
)  # fmt: skip


class Builder:
    """Puts values together again from tensors. `inputs` and `states` are what `Given` refers to."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        states: Sequence[object] = (),
    ) -> None:
        self._tensors, self._inputs = tensors, inputs
        self.states: list[Any] = list(states)

    def give(self, tree: Tree) -> Any:
        """The value that a tree describes."""
        return pytree.tree_unflatten([self._value(leaf) for leaf in tree.leaves], tree.spec)

    def update(self, target: Any, state: State) -> None:
        """Give an object the attributes that a state describes."""
        held = self.give(state.held)
        beside = {key: value for key, value in vars(target).items() if key in _BESIDE}
        vars(target).clear()
        vars(target).update(held | beside)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Collected):
            return self._tensors[leaf.index]
        if isinstance(leaf, Count):
            return self._tensors[leaf.index].shape[0]
        if isinstance(leaf, Given):
            return self.states[leaf.index] if leaf.state else self._inputs[leaf.index]
        if isinstance(leaf, State):
            target: Any = object.__new__(leaf.kind)
            self.states.append(target)
            self.update(target, leaf)
            return target
        return leaf.value

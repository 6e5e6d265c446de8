"""Notes what a call of a module may change besides its results, says what was changed, and puts it back.

That is state of Python: attributes of the module, of its parts and of the objects that these hold; attributes
of classes, and names outside of functions that their code uses; and generators of random numbers that any of
these hold.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.passes.building.deferred import join
from penstock.passes.building.state_holders import (
    DEFINITIONS,
    Holder,
    holder_of,
    is_of_library,
    of_class,
    of_closure,
    of_dict,
    of_names,
    of_object,
)

_DEPTH = 8
"""How deep values are followed: into a list of objects, or a configuration within a configuration."""

_NUMBERS = (bool, int, float, complex, str, bytes)

_BY_NAME = ("_parameters", "_buffers", "_modules")
"""The dictionaries of a module whose keys are attributes of it."""

_CALLABLES = (types.MethodType, functools.partial, type(functools.lru_cache(len)))

MISSING = object()
"""The value of a key that is not there."""


@dataclass(frozen=True)
class Change:
    """A key of a holder that has another value than before."""

    holder: Holder
    key: Any
    old: Any
    new: Any

    @property
    def name(self) -> str:
        """What a user calls it."""
        return self.holder.name(self.key)

    def give(self, value: Any) -> None:
        """Put a value there, `MISSING` for none."""
        contents = self.holder.read() | {self.key: value}
        self.holder.write({key: content for key, content in contents.items() if content is not MISSING})


class ModuleState:
    """The state of a module, and of what its code uses, as it is when this is made.

    That other tensors stand in the place of its parameters and buffers, as in an export, is no change of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[Holder] = []
        self._seen: dict[int, Any] = {}  # kept, so that no other object gets its id
        self._code: list[Any] = []
        self._own = {type(part).__module__ for part in module.modules()}
        self._weights = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        for path, part in module.named_modules():
            self._follow(path, part, _DEPTH)
        while self._code:
            self._follow_code(self._code.pop())
        self._before = [holder.read() for holder in self._holders]

    def changes(self) -> list[Change]:
        """Return what has another value now."""
        changes = []
        for holder, before in zip(self._holders, self._before, strict=True):
            now = holder.read()
            for key in {**before, **now}:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if not self._is_unchanged(old, new):
                    changes.append(Change(holder, key, old, new))
        return changes

    def _is_unchanged(self, old: Any, new: Any) -> bool:
        if id(old) in self._weights:
            return isinstance(new, torch.Tensor)
        if isinstance(old, weakref.ref):  # of which torch's LSTM keeps some to its weights
            return isinstance(new, weakref.ref)
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            return all(map(self._is_unchanged, old, new))
        return is_same(old, new)

    def restore(self) -> None:
        """Give everything the value that it had."""
        for holder, before in zip(self._holders, self._before, strict=True):
            now = holder.read()
            if [*now] != [*before] or not all(_is_at(now[key], value) for key, value in before.items()):
                holder.write(before)

    def _follow(self, path: str, value: Any, depth: int) -> None:
        """Note the contents of a value, and those of what it holds."""
        if isinstance(value, (*_NUMBERS, torch.Tensor)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, DEFINITIONS):
            self._code.append(value)
        elif isinstance(value, _CALLABLES):
            names = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords")
            for member in (getattr(value, name, None) for name in names):
                self._follow(path, member, depth)
        elif isinstance(value, tuple):
            for k, member in enumerate(value):
                self._follow(f"{path}[{k}]", member, depth - 1)
        else:
            self._follow_object(path, value, depth)

    def _follow_object(self, path: str, value: Any, depth: int) -> None:
        if (holder := holder_of(path, value)) is None:
            return
        self._code.append(type(value))
        for by_name in map(vars(value).get, _BY_NAME) if isinstance(value, nn.Module) else ():
            if isinstance(by_name, dict):  # a scripted module has none
                self._seen[id(by_name)] = by_name
                self._note(of_dict(partial(join, path), by_name), depth)
        self._note(holder, depth)

    def _note(self, holder: Holder, depth: int) -> None:
        self._holders.append(holder)
        for key, value in holder.read().items() if depth else ():
            self._follow(holder.name(key), value, depth - 1)

    def _follow_code(self, code: Any) -> None:
        """Note what a class or a function keeps, and the names outside of functions that it uses.

        Of the libraries that are installed, those modules alone count that define a part of the module.
        """
        if is_of_library(code) or (code.__module__ not in self._own and _is_installed(code.__module__)):
            return
        if isinstance(code, type):
            self._note(of_class(code), _DEPTH)
            for attribute in (*code.__mro__, *vars(code).values()):
                function = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
                if isinstance(function, (*DEFINITIONS, *_CALLABLES)):
                    self._follow("", function, _DEPTH)
        elif isinstance(code, types.FunctionType):
            self._note(of_object(code.__qualname__, code), _DEPTH)
            self._note(of_closure(code), _DEPTH)
            self._follow_names(code.__module__, code.__globals__, frozenset(_names(code.__code__)))

    def _follow_names(self, module: str, known: dict[str, Any], names: frozenset[str]) -> None:
        self._note(of_names(module, known, names), _DEPTH)
        for value in [known[name] for name in names if name in known]:
            if isinstance(value, types.ModuleType):
                if not (is_of_library(value) or _is_installed(value.__name__)):
                    self._note(of_names(value.__name__, vars(value), names), _DEPTH)
            elif isinstance(value, DEFINITIONS):
                self._follow("", value, _DEPTH)


def _is_installed(module: str) -> bool:
    return "-packages" in str(getattr(sys.modules.get(module), "__file__", ""))


def _is_at(now: Any, before: Any) -> bool:
    return now is before or (not isinstance(now, list | tuple | dict) and is_same(now, before))


def is_same(old: Any, new: Any) -> bool:
    """Tell whether a value is the same; numbers, texts, arrays and collections of these, where equal."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(map(is_same, old, new))
    if isinstance(old, dict):
        return [*old] == [*new] and all(map(is_same, old.values(), new.values()))
    if isinstance(old, _NUMBERS):
        return repr(old) == repr(new)
    return hasattr(old, "tobytes") and hasattr(old, "dtype") and old.tobytes() == new.tobytes()


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function, and functions within it, use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

"""Notices that functions of a module's classes, or of the files of these, were replaced since its export."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_FUNCTIONS = (FunctionType, property, classmethod, staticmethod)
_VALUES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Names:
    """Names of a class or of a Python file, where they are looked up, and the objects that they named."""

    where: str
    held: Mapping[str, object]
    names: tuple[str, ...]
    objects: tuple[object, ...]

    def changed(self) -> Iterator[str]:
        for name, one in zip(self.names, self.objects, strict=True):
            if self.held.get(name, self) is not one:
                yield f"{self.where}.{name}"


class Definitions:
    """What the classes of modules define, and the functions of their files that their methods name.

    Of each class but `nn.Module`, which tools replace methods of for a while, these are functions and
    properties; of those with a `forward` of their own also plain values, and what their methods call in the
    same file, directly or through other functions of that file. Looking at them is a comparison of objects.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = dict.fromkeys(kind for one in modules for kind in type(one).__mro__)
        self._seen: list[_Names] = []
        for kind in kinds:
            if kind not in (nn.Module, object):
                own = "forward" in vars(kind)
                watched = _FUNCTIONS + _VALUES if own and not _is_torch(kind) else _FUNCTIONS
                self._add(kind.__qualname__, vars(kind), watched, vars(kind))
        for kind in kinds:
            if "forward" in vars(kind) and not _is_torch(kind):
                for function in vars(kind).values():
                    if isinstance(function, FunctionType):
                        self._add_called(function, set())

    def changed(self) -> list[str]:
        """The names of what is not the object that it was."""
        return [name for one in self._seen for name in one.changed()]

    def _add(self, where: str, held: Mapping[str, Any], watched: Any, names: Iterable[str]) -> None:
        found = {name: held[name] for name in names if isinstance(held.get(name), watched)}
        plain = {name: one for name, one in found.items() if isinstance(one, _FUNCTIONS) or name[:2] != "__"}
        if plain:
            self._seen.append(_Names(where, held, tuple(plain), tuple(plain.values())))

    def _add_called(self, function: FunctionType, seen: set[str]) -> None:
        held = function.__globals__
        file = str(held.get("__name__"))
        names = [name for name in _names(function.__code__) if name not in seen]
        called = {name: held[name] for name in names if isinstance(held.get(name), FunctionType)}
        called = {name: one for name, one in called.items() if one.__module__ == file}
        seen.update(names)
        self._add(file, held, FunctionType, called)
        for one in map(inspect.unwrap, called.values()):
            if isinstance(one, FunctionType) and one.__globals__ is held:
                self._add_called(one, seen)


def _is_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _names(code: CodeType) -> dict[str, None]:
    """The names that code uses, of functions within it too."""
    found = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        found |= _names(inner) if isinstance(inner, CodeType) else {}
    return found

"""Objects of Python that keep something for a later call, and how their contents are read and put back."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.passes.building.deferred import join

Contents = dict[Any, Any]
"""The contents of an object by key: names of attributes, keys of a dictionary, positions in a list."""

DEFINITIONS = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)

LIBRARIES = frozenset({"torch", "numpy", "penstock", *sys.stdlib_module_names})
"""The packages whose classes and functions keep nothing of a model."""

_OBJECTS = (nn.Module, types.SimpleNamespace, UserDict, UserList)
"""Classes of libraries whose objects keep something all the same."""


@dataclass(frozen=True)
class Holder:
    """An object whose contents a call may change. `name` is what a user calls a part of them, by its key."""

    name: Callable[[Any], str]
    read: Callable[[], Contents]
    write: Callable[[Contents], None]


def is_of_library(code: Any) -> bool:
    """Tell whether a class, a function or a module is one of Python, torch, numpy or penstock."""
    name = code.__name__ if isinstance(code, types.ModuleType) else getattr(code, "__module__", "builtins")
    return str(name).partition(".")[0] in LIBRARIES


def holder_of(path: str, value: Any) -> Holder | None:
    """Return the holder of an object's contents, None for an object that has none that are known."""
    name_item = partial(_item, path)
    if isinstance(value, dict):
        return of_dict(name_item, value)
    if isinstance(value, list | deque):
        return Holder(name_item, lambda: dict(enumerate(value)), partial(_refill, value))
    if isinstance(value, set):
        return Holder(name_item, lambda: dict.fromkeys(value), partial(_refill, value))
    if (state := _state_of(value)) is not None:
        read, write = state
        return Holder(lambda _: path, lambda: {"": read()}, lambda was: write(was[""]))
    if isinstance(value, _OBJECTS) or not is_of_library(type(value)):
        return of_object(path, value)
    return None


def of_dict(name: Callable[[Any], str], value: dict[Any, Any]) -> Holder:
    """Return the holder of the items of a dictionary, whatever its class does to read and write them."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def write(was: Contents) -> None:
        kind.clear(value)
        for key, content in was.items():
            kind.__setitem__(value, key, content)

    return Holder(name, lambda: dict(kind.items(value)), write)


def of_object(path: str, value: Any) -> Holder:
    """Return the holder of an object's attributes."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = {name for names in kinds for name in ((names,) if isinstance(names, str) else names)} - {
        "__dict__"
    }

    def read() -> Contents:
        return {**attributes, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}

    def write(was: Contents) -> None:
        attributes.clear()
        attributes.update({name: content for name, content in was.items() if name not in slots})
        for name in slots & was.keys():
            object.__setattr__(value, name, was[name])

    return Holder(partial(join, path), read, write)


def of_class(kind: type) -> Holder:
    """Return the holder of the attributes of a class that are no methods."""

    def read() -> Contents:
        return {
            name: value
            for name, value in list(vars(kind).items())
            if not (
                name.startswith(("__", "_abc")) or hasattr(value, "__get__") or isinstance(value, DEFINITIONS)
            )
        }

    def write(was: Contents) -> None:
        for name in read().keys() - was.keys():
            delattr(kind, name)
        for name, value in was.items():
            setattr(kind, name, value)

    return Holder(partial(join, kind.__qualname__), read, write)


def of_names(module: str, known: dict[str, Any], names: Collection[str]) -> Holder:
    """Return the holder of global names of a module that are no definitions."""

    def read() -> Contents:
        return {
            name: known[name] for name in names if name in known and not isinstance(known[name], DEFINITIONS)
        }

    def write(was: Contents) -> None:
        for name in read().keys() - was.keys():
            del known[name]
        known.update(was)

    return Holder(partial(join, module), read, write)


def of_closure(function: types.FunctionType) -> Holder:
    """Return the holder of the variables of other functions that a function uses."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> Contents:
        contents = {}
        for name, cell in cells.items():
            with suppress(ValueError):  # a name that was never bound
                contents[name] = cell.cell_contents
        return contents

    def write(was: Contents) -> None:
        for name, value in was.items():
            cells[name].cell_contents = value

    return Holder(partial(join, function.__qualname__), read, write)


def _item(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _refill(container: Any, was: Contents) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(
        was if isinstance(container, set) else was.values()
    )


_State = tuple[Callable[[], Any], Callable[[Any], Any]]


def _state_of(value: Any) -> _State | None:
    """How what an object draws, counts or has in an array is read and written; None for any other object."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().tolist(), lambda was: value.set_state(
            torch.tensor(was, dtype=torch.uint8)
        )
    if isinstance(value, itertools.count):
        return lambda: repr(value), lambda was: None  # nothing sets it
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _state_in_numpy(numpy, value)


def _state_in_numpy(numpy: Any, value: Any) -> _State | None:
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return value.copy, lambda was: numpy.copyto(value, was)
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if isinstance(bits, numpy.random.BitGenerator):
        return lambda: bits.state, lambda was: setattr(bits, "state", was)
    return None

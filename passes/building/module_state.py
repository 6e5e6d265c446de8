"""Notes what a call of a module may change besides its results, says what was changed, and puts it back."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

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


def of_names(module: str, definitions: dict[str, Any], names: Collection[str]) -> Holder:
    """Return the holder of global names of a module that are no definitions."""

    def read() -> Contents:
        return {
            name: definitions[name]
            for name in names
            if name in definitions and not isinstance(definitions[name], DEFINITIONS)
        }

    def write(was: Contents) -> None:
        for name in read().keys() - was.keys():
            del definitions[name]
        definitions.update(was)

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


_CACHE = type(functools.lru_cache(len))


@contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """Empty the caches (`functools.lru_cache`) in and beside a model's classes, before and after."""
    caches = list(_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[Any]:
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds} - {"builtins"}
    own_names = {name for name in names if not name.startswith("torch.")}
    modules = [sys.modules[name] for name in own_names if name in sys.modules]
    modules += [value for module in modules for value in vars(module).values() if _is_of(own_names, value)]
    holders = [kind for kind in kinds if kind.__module__ in own_names] + modules
    for holder in holders:
        for value in list(vars(holder).values()):
            cells = getattr(value, "__closure__", None) or ()
            for candidate in (value, *(_content(cell) for cell in cells)):
                if isinstance(candidate, _CACHE):
                    yield candidate


def _is_of(names: set[str], value: object) -> bool:
    """Whether a value is a module of one of these libraries."""
    libraries = {name.partition(".")[0] for name in names}
    return type(value) is ModuleType and value.__name__.partition(".")[0] in libraries


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return None


_NANOSECONDS = ("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns")
_SECONDS = ("time", "perf_counter", "monotonic", "process_time")

_LATER = 123_456_789_012_345
"""The nanoseconds by which clocks go on from one export to the next: more than a day, and no round number."""


@contextmanager
def noted_clocks(exports: int) -> Iterator[list[str]]:
    """A list that is given the names of what code besides torch's reads in the body, in this thread.

    Clocks show it a time that is later the more `exports` there were before.
    """
    read: list[str] = []
    thread = threading.get_ident()

    def noted(name: str, known: Callable[..., Any], later: float) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if threading.get_ident() != thread or _is_torch(sys._getframe(1)):
                return known(*args)
            read.append(name)
            return known(*args) + later if later else known(*args)

        return called

    with ExitStack() as entered:
        for names, later in ((_SECONDS, exports * _LATER / 1e9), (_NANOSECONDS, exports * _LATER)):
            for name in names:
                instead = noted(f"time.{name}", getattr(time, name), later)
                entered.enter_context(patch.object(time, name, instead))
        for owner, name in ((os, "urandom"), (random, "_urandom")):
            entered.enter_context(patch.object(owner, name, noted("os.urandom", os.urandom, 0)))
        yield read


def _is_torch(frame: FrameType | None) -> bool:
    """Tell whether the innermost code that is not Python's own is torch's or penstock's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("torch", "penstock"):
            return True
        if package not in LIBRARIES:
            return False
        frame = frame.f_back
    return True


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

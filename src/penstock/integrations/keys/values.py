"""Says in a hash what values are: the same in every process, and refused where that is not sure."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import os
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from penstock.passes.weights.subclasses import flattened, has_parts
from penstock.schedule.facts.errors import PassError

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, re.Pattern),
    }
)
"""Types whose `repr` says all that there is."""

_NAMED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ModuleType,
)
"""What has a name and no state, such as a function in C."""

_BESIDE = (
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock())),
    type(os.environ),
)
"""Objects that decide nothing about what is computed; of the environment, single variables are said."""

_CACHED = type(functools.lru_cache(len))

_MADE_IN_PYTHON = 1 << 9
"""The flag of classes that are defined in Python, whose objects have no state but their attributes."""

_BASES = (object, types.SimpleNamespace)
"""Classes in C whose objects have no state but their attributes either."""

_DEPTH = 5
"""How deep a value is followed where it need not be known for sure."""

_UNORDERED = frozenset({"_use_default_values"})
"""Lists of libraries that were made of sets, in an order that is another one in each process."""


@dataclass(frozen=True)
class Found:
    """Where a value was found, in words. Unless it must be `sure`, it may be said in part.

    That is for globals of libraries: among them are registries that fill up as more of the library is used,
    so classes and modules in containers do not count there, nor does what lies deep in objects.
    """

    where: str
    sure: bool = True
    depth: int = 0

    def inside(self, where: str) -> Found:
        return Found(where, self.sure, self.depth + 1)


class Words:
    """A hash of what was said. A subclass follows the functions and classes that are `found` among it.

    `parts` are objects that are said elsewhere; of these only the place among them is.
    """

    def __init__(self, parts: Iterable[object] = ()) -> None:
        self._digest = hashlib.sha256()
        held = {id(one): one for one in parts}  # they are held, so that no other object gets their id
        self._seen: dict[int, tuple[int, object]] = {n: (k, held[n]) for k, n in enumerate(held)}

    def say(self, *words: object) -> None:
        """Add plain values."""
        self._digest.update(repr(words).encode("utf-8", "backslashreplace"))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def found(self, code: Any) -> object:
        """Called for each function and class that a value holds; returns plain values that tell it apart."""
        return code.__module__, code.__qualname__

    def value(self, value: Any, place: Found) -> None:
        """Say what a value is, and what it holds.

        Raises PassError, which names the place, for one of which that is not known for sure: of a class in
        C, or without attributes.
        """
        kind = type(value)
        if kind in _PLAIN:
            self.say(kind.__name__, value)
        elif id(value) in self._seen:
            self.say("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            deep = not place.sure and place.depth == _DEPTH
            if deep or not any(say(self, value, place) for say in _SAYERS):
                self._say_kind(value, place)

    def tensor(self, value: torch.Tensor, where: str, *, values: bool) -> None:
        """Say what a tensor looks like, which memory it shares with those before, and its `values`."""
        kind = type(value)
        self.say("tensor", kind.__module__, kind.__qualname__, value.dtype, tuple(value.shape), value.device)
        if has_parts(value):
            names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            self.value(context, Found(f"{where} (what its class adds to {', '.join(names)})"))
            for name, part in flattened(value):
                self.tensor(part, f"{where}.{name}", values=values)
            return
        storage = value.untyped_storage()
        number, _ = self._seen.setdefault(-1 - storage._cdata, (len(self._seen), storage))
        self.say(value.stride(), value.storage_offset(), number, storage.nbytes())
        if values:
            if value.device.type == "meta" or isinstance(value, FakeTensor):
                raise PassError(f"{where} is a tensor without values")
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._digest.update(memoryview(plain.numpy()))  # type: ignore[arg-type]

    def _say_kind(self, value: object, place: Found) -> None:
        kind = type(value)
        if place.sure:
            raise PassError(
                f"{place.where} is a {kind.__module__}.{kind.__qualname__}, and what that holds is not known"
            )
        self.say(kind.__module__, kind.__qualname__)


def _say_code(words: Words, value: Any, place: Found) -> bool:
    if isinstance(value, types.FunctionType | type):
        words.say("code", words.found(value))
    elif isinstance(value, types.MethodType):
        words.say("method")
        words.value(value.__func__, place.inside(place.where))
        words.value(value.__self__, place.inside(f"{place.where} (what it is a method of)"))
    elif isinstance(value, functools.partial):
        words.say("partial")
        for held in (value.func, value.args, value.keywords):
            words.value(held, place.inside(place.where))
    elif inner := _wrapped(value):
        words.say(type(value).__name__)
        for held in inner:
            words.value(held, place.inside(place.where))
    else:
        return False
    return True


def _wrapped(value: Any) -> list[Any]:
    """The functions that a cache, a property or a method's decorator is made of; none for other values."""
    if isinstance(value, _CACHED):
        return [value.__wrapped__]
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset) if one]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    return [value.func] if isinstance(value, functools.cached_property) else []


def _say_named(words: Words, value: Any, place: Found) -> bool:
    if isinstance(value, enum.Enum):
        words.say("enum", words.found(type(value)), value.name)
    elif isinstance(value, _NAMED):
        words.say("named", getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
        if isinstance(owner := getattr(value, "__self__", None), type):
            words.say(owner.__module__, owner.__qualname__)
        elif owner is not None and not isinstance(owner, types.ModuleType):
            words.value(owner, place.inside(f"{place.where} (what it is a method of)"))
    elif isinstance(value, _BESIDE):
        words.say("beside")
    elif isinstance(value, OpOverload | OpOverloadPacket | PurePath):
        words.say(type(value).__name__, str(value))
    else:
        return False
    return True


def _say_data(words: Words, value: Any, place: Found) -> bool:
    if isinstance(value, torch.Tensor):
        words.tensor(value, place.where, values=True)
    elif isinstance(value, np.ndarray | np.generic):
        words.say("numpy", str(value.dtype), value.shape)
        held = value.tolist() if value.dtype == object else value.tobytes()
        words.value(held, place.inside(place.where))
    elif isinstance(value, weakref.ref):
        words.say("weakref")
        words.value(value(), place.inside(place.where))
    else:
        return False
    return True


def _say_container(words: Words, value: Any, place: Found) -> bool:
    kind = type(value)
    if not isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        return False
    words.say("container", kind.__module__, kind.__qualname__)
    if isinstance(value, Mapping):
        items = [(k, held) for k, held in value.items() if _counts(k, place) and _counts(held, place)]
        for key, held in items:
            words.value(key, place.inside(f"a key of {place.where}"))
            where = f"{place.where}[{key!r}]" if type(key) in _PLAIN else place.where
            words.value(_steady(key, held), place.inside(where))
    elif isinstance(value, set | frozenset):
        words.say(sorted(_alone(held, place) for held in value if _counts(held, place)))
    else:
        for index, held in enumerate(value):
            if _counts(held, place):
                words.value(held, place.inside(f"{place.where}[{index}]"))
    _say_attributes(words, value, place)
    return True


def _counts(held: object, place: Found) -> bool:
    """Whether a key, a value or an element is not what a registry has of a class or a module."""
    named = isinstance(held, str) and held.startswith("<class ")
    return place.sure or not (named or isinstance(held, type | types.ModuleType))


def _steady(name: object, held: object) -> object:
    """What is held under a name, and as a set where its order is another one in each process."""
    return frozenset(held) if name in _UNORDERED and isinstance(held, list) else held


def _alone(value: object, place: Found) -> str:
    """What an element of a set is, whatever the others are."""
    words = Words()
    words.value(value, place.inside(f"an element of {place.where}"))
    return words.hexdigest()


def _say_object(words: Words, value: Any, place: Found) -> bool:
    """An object of a class that is defined in Python is its attributes."""
    kind = type(value)
    if not all(one in _BASES or one.__flags__ & _MADE_IN_PYTHON for one in kind.__mro__):
        return False
    words.say("object", words.found(kind))
    _say_attributes(words, value, place)
    return True


def _say_attributes(words: Words, value: Any, place: Found) -> None:
    """Say the attributes of an object, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    for name in sorted(held):
        if _counts(held[name], place):
            words.say("attribute", name)
            words.value(_steady(name, held[name]), place.inside(f"{place.where}.{name}"))


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return tuple(n for n in ([names] if isinstance(names, str) else names) if not n.startswith("__"))


_SAYERS = (_say_code, _say_named, _say_data, _say_container, _say_object)

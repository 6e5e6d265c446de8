"""Reads pickles of strangers: no code runs, and the time grows with their bytes alone.

A pickle may use a value again wherever it likes, so that a hundred bytes can describe a tuple of tuples with
2^50 leaves. Python walks all of them to hash such a tuple, in C, where nothing can end it. What torch writes
nests tuples three times at most, of few numbers each; others are refused when they are made.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any, ClassVar

_DEEPEST, _LARGEST = 3, 512
"""The most levels of a tuple, and the most leaves of it."""

Name = Callable[[str, str], Any]
"""What stands for a name in a module; raises pickle.UnpicklingError for one that is not admitted."""


def load(file: IO[bytes], find: Name) -> Any:
    """The object that a pickle describes, made of what `find` returns for each name.

    Raises whatever error there is for bytes that are no pickle, or one that is not admitted.
    """
    return _Unpickler(file, find).load()


def check(file: IO[bytes]) -> None:
    """Raises whatever error there is for a pickle that could not be read in time."""
    _Unpickler(file, lambda module, name: Inert).load()


class Inert(dict[Any, Any]):
    """Stands for any object of a pickle, and takes whatever state that gives it."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Takes an item, and forgets it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


# Python's own unpickler in Python: that in C makes its table of values as large as a pickle says.
_Base: Any = pickle._Unpickler


class _Unpickler(_Base):  # type: ignore[misc]
    dispatch: ClassVar = dict(_Base.dispatch)

    def __init__(self, file: IO[bytes], find: Name) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: object) -> Any:
        return Inert()

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"it names the extension {code}")


def _limited(opcode: int) -> Callable[[Any], None]:
    make = _Base.dispatch[opcode]

    def load_tuple(self: Any) -> None:
        make(self)
        if _leaves(self.stack[-1], _DEEPEST) > _LARGEST:
            raise pickle.UnpicklingError("it nests tuples as no checkpoint does")

    return load_tuple


def _leaves(value: tuple[Any, ...], levels: int) -> int:
    """The leaves of a tuple; more than any may have, if it has more levels."""
    if levels == 0:
        return _LARGEST + 1
    count = len(value)
    for element in value:
        if type(element) is tuple:
            count += _leaves(element, levels - 1)
            if count > _LARGEST:
                break
    return count


def _refused(self: Any) -> None:
    raise pickle.UnpicklingError("it takes memory as no checkpoint does")


for _opcode in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
    _Unpickler.dispatch[_opcode[0]] = _refused
for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Unpickler.dispatch[_opcode[0]] = _limited(_opcode[0])

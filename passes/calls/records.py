"""Records that were read from JSON: each field is of its type, however wrong the JSON was."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.schedule.facts.errors import PassError
from penstock.schedule.payload.text import short

_Record = TypeVar("_Record")


def checked(record: _Record) -> _Record:
    """The record, a dataclass. Raises PassError where a field has a value of another type than it says."""
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        if not _fits(value := getattr(record, name), hint):
            refuse(value, f"{name} of a {kind.__name__}")
    return record


def refuse(value: object, kind: str) -> NoReturn:
    """Raises PassError for a stored value that is not what it should be."""
    raise PassError(f"{short(value)} is no {kind}: compile again")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        each = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if origin is Mapping:
        key, content = inner
        return isinstance(value, dict) and all(_fits(k, key) and _fits(v, content) for k, v in value.items())
    if hint is type:
        return value in (bool, int, float)
    return hint is Any or (type(value) is int if hint is int else isinstance(value, hint))

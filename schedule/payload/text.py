"""Frozen dataclasses as JSON text, and back, by the rules of docs/payload.md that hold for every file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.schedule.facts.errors import PayloadError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_WIDTH = 100
_T = TypeVar("_T")


def encode(value: Any) -> bytes:
    """A dataclass as UTF-8 JSON, equal for equal values. Raises PayloadError for text that is no Unicode."""
    try:
        return (_render(_plain(value), "") + "\n").encode()
    except UnicodeEncodeError as error:
        raise PayloadError(f"the payload holds text that is not Unicode: {error}") from None


def _plain(value: Any) -> Any:
    """A dataclass as a dictionary in field order. Values of float fields are floats, whole ones too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: float(v) if f.type == "float" else _plain(v) for f, v in items}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _render(value: Any, indent: str) -> str:
    """JSON that a person can read: a list of numbers, or a value of up to 100 columns, takes one line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    numbers = isinstance(value, list) and all(isinstance(v, int) for v in value)
    if not isinstance(value, dict | list) or numbers or len(flat) + len(indent) <= _WIDTH:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(k)}: {_render(v, inner)}" for k, v in value.items()]
    else:
        lines = [_render(v, inner) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}{closing}"


class _Pairs(dict[str, Any]):
    """A JSON object that remembers a key that occurred twice."""

    twice: str | None = None


def _pairs(items: list[tuple[str, Any]]) -> _Pairs:
    pairs = _Pairs(items)
    if len(pairs) < len(items):
        keys = [key for key, _ in items]
        pairs.twice = next(key for key in keys if keys.count(key) > 1)
    return pairs


def parse(data: str | bytes, source: str) -> tuple[str, Any]:
    """The text and its JSON tree. Raises PayloadError for no JSON, repeated keys and NaN."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        tree = json.loads(text, object_pairs_hook=_pairs)
        _check_tree(tree, "$", source)
    except UnicodeDecodeError as error:
        raise PayloadError(f"{source}: expected UTF-8, got {error}; write the file again") from None
    except RecursionError:
        raise PayloadError(f"{source}: lists and objects are nested too deeply for any payload") from None
    except ValueError as error:
        raise PayloadError(
            f"{source}: expected one whole JSON object ({error}); is the file cut off?"
        ) from None
    return text, tree


def _check_tree(value: Any, path: str, source: str) -> None:
    if isinstance(value, _Pairs):
        if value.twice is not None:
            raise PayloadError(f"{source}: {path} has the key {value.twice!r} twice, expected each key once")
        for key, inner in value.items():
            _check_tree(inner, f"{path}.{key}", source)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_tree(inner, f"{path}[{i}]", source)
    elif isinstance(value, int) and not _LEAST_INT <= value <= _MOST_INT:
        raise PayloadError(
            f"{source}: {path}: expected an integer from -2^63 to 2^64 - 1, got {short(value)}"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise PayloadError(f"{source}: {path}: expected a finite number, got {value}")


@functools.cache  # building one takes longer than reading a small payload
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def decode(kind: type[_T], text: str, tree: Any, source: str, *, page: str = "docs/payload.md") -> _T:
    """The dataclass that `text`, of the JSON `tree`, holds; `page` specifies it. Raises PayloadError."""
    from pydantic import ValidationError

    try:
        # Validated from the text, not from the tree: in strict mode only a list in JSON may become a tuple.
        value: _T = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        raise PayloadError(f"{source}: {_first_problem(error, tree, page)}") from None
    return value


def _first_problem(error: ValidationError, tree: Any, page: str) -> str:
    """The first problem as a sentence with its path in the tree, what was expected and what was found."""
    problem = error.errors(include_url=False)[0]
    path, value = "$", tree
    for place in problem["loc"]:
        # pydantic's location also has the member of a union that it tried, which is no part of the path.
        if isinstance(place, int) and isinstance(value, list):
            path, value = f"{path}[{place}]", value[place] if place < len(value) else None
        elif isinstance(place, str) and isinstance(value, dict):
            path, value = f"{path}.{place}", value.get(place)
    if problem["type"] == "missing":
        return f"{path} is missing, expected a field of that name"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{path} is not a field of the format, got {short(value)}; see {page}"
    return f"{path}: {problem['msg'].replace('Input should be', 'expected')}, got {short(value)}"


def short(value: Any) -> str:
    """A value as JSON of at most 80 characters, for messages."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= 80 else text[:77] + "..."

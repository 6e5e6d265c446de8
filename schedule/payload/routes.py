"""The file of recorded routes, as docs/sparse.md specifies it: a line for the reads, then one a call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from penstock.schedule.bounded_file import CEILINGS
from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.text import decode, parse, short
from penstock.schedule.sparse.routes import Ask, Route, RoutedRead, Routes

MOST_BYTES = CEILINGS["a file of routes"]
"""A larger file is neither written nor read."""

_PAGE = "docs/sparse.md"
_MOST_READS, _MOST_UNITS = 1 << 16, 1 << 40


@dataclass(frozen=True, kw_only=True)
class _Header:
    __pydantic_config__: ClassVar = STRICT
    format: Literal["penstock-routes"] = "penstock-routes"
    version: Literal[1] = 1
    reads: tuple[RoutedRead, ...]
    calls: int


def routes_to_bytes(routes: Routes) -> bytes:
    """The routes as the bytes of a file; equal routes give equal bytes.

    Raises PayloadError for routes that `routes_from_bytes` would refuse.
    """
    header = _Header(reads=routes.reads, calls=len(routes.calls))
    lines = [_line(asdict(header))]
    lines += (_line([[ask.read, *ask.units] for ask in call]) for call in routes.calls)
    data = b"".join(lines)
    _check_size(data, "the routes to be written")
    for fault in _faults(routes):
        raise PayloadError(f"the routes to be written: {fault}")
    return data


def routes_from_bytes(data: bytes, *, source: str = "routes") -> Routes:
    """Read and check routes; `source` names them in messages. Raises PayloadError."""
    _check_size(data, source)
    first, _, lines = data.partition(b"\n")
    header = _header(first, f"{source}, line 1")
    count = lines.count(b"\n")
    if count != header.calls or not data.endswith(b"\n"):
        raise PayloadError(
            f"{source}: expected a line for each of {header.calls} calls, and got {count}; is "
            "the file cut off?"
        )
    calls = tuple(_call(line, f"{source}, line {k}") for k, line in enumerate(BytesIO(lines), 2))
    routes = Routes(header.reads, calls)
    for fault in _faults(routes):
        raise PayloadError(f"{source}: {fault}")
    return routes


def _header(line: bytes, source: str) -> _Header:
    text, tree = parse(line, source)
    if not isinstance(tree, dict) or (tree.get("format"), tree.get("version")) != ("penstock-routes", 1):
        raise PayloadError(
            f"{source}: expected the format 'penstock-routes', version 1, got {short(tree)}; give a file "
            "that `recorder.save` wrote"
        )
    return decode(_Header, text, tree, source, page=_PAGE)


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _check_size(data: bytes, source: str) -> None:
    if len(data) > MOST_BYTES:
        raise PayloadError(
            f"{source}: expected {format_size(MOST_BYTES)} at most, got {format_size(len(data))}; record "
            "fewer calls"
        )


def _call(line: bytes, source: str) -> Route:
    """The route of one call, of numbers that are not checked yet."""
    from pydantic import Strict

    kind = tuple[tuple[Annotated[int, Strict()], ...], ...]
    try:
        asks = decode(kind, line.decode("utf-8", "replace"), None, source)
    except PayloadError:  # once more, with the tree that the message needs
        asks = decode(kind, *parse(line, source), source, page=_PAGE)
    if not all(asks):
        raise PayloadError(f"{source}: expected a read at the start of each list, got an empty list")
    return tuple(Ask(ask[0], ask[1:]) for ask in asks)


def _faults(routes: Routes) -> Iterator[str]:
    """What is wrong with routes beyond the types of their fields."""
    yield from _read_faults(routes.reads)
    for k, call in enumerate(routes.calls):
        for ask in call:
            if not 0 <= ask.read < len(routes.reads):
                yield f"call {k}: expected one of {len(routes.reads)} reads, got {ask.read}"
                return
            count, units = routes.reads[ask.read].count, ask.units
            ascending = all(unit < other for unit, other in pairwise(units))
            if units and not (ascending and units[0] >= 0 and units[-1] < count):
                yield (
                    f"call {k}: expected different units of read {ask.read} in ascending order, from 0 to "
                    f"{count - 1}, got {short(list(units))}"
                )


def _read_faults(reads: Sequence[RoutedRead]) -> Iterator[str]:
    if len(reads) > _MOST_READS:
        yield f"$.reads: expected {_MOST_READS} reads at most, got {len(reads)}"
    if len({(read.graph, read.step) for read in reads}) < len(reads):
        yield "$.reads: expected each step of a graph once"
    for i, read in enumerate(reads):
        limits = (("graph", 0), ("step", 0), ("count", 1), ("unit_nbytes", 1))
        for name, least in limits:
            if not least <= getattr(read, name) <= _MOST_UNITS:
                yield f"$.reads[{i}].{name}: expected a number from {least} on, got {getattr(read, name)}"

"""Routes: which units the reads of recorded calls asked for, in memory and in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from penstock.schedule.bounded_file import CEILINGS
from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT, Pool, SparseRead, Storage, Trace
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.text import decode, parse, short
from penstock.schedule.sparse.pool import smallest_pool, units_layout


@dataclass(frozen=True)
class RoutedRead:
    """A read whose units were recorded.

    Attributes:
        method: The name of the method.
        graph: The number that the method's probes carry.
        step: The number of the step.
        name: The name of the step.
        weight: The weight that is read.
        count: The number of its units.
        unit_nbytes: Bytes of a unit.
    """

    __pydantic_config__: ClassVar = STRICT
    method: str
    graph: int
    step: int
    name: str
    weight: str
    count: int
    unit_nbytes: int


class Ask(NamedTuple):
    """The `units` (numbers, ascending) that a call asked for by read number `read` of the routes."""

    read: int
    units: tuple[int, ...]


_PAGE_BYTES = 4096

Route = tuple[Ask, ...]
"""What one call asked for, in the order of its reads."""


@dataclass(frozen=True)
class Routes:
    """What recorded `calls` asked for, in their order, by the recorded `reads`."""

    reads: tuple[RoutedRead, ...]
    calls: tuple[tuple[Ask, ...], ...]

    def __repr__(self) -> str:
        return f"Routes({len(self.calls)} calls of {len(self.reads)} reads by units)"


@dataclass(frozen=True)
class Profile:
    """Routes with the facts of their program, whose traces here have the recorded reads by units alone."""

    routes: Routes
    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]

    def pool(self, nbytes: int) -> Pool:
        """A pool for the recorded tables, of `nbytes` bytes, or those of the largest unit if that is more."""
        smallest = smallest_pool(self.traces, _layout(self.storages, self.traces, _PAGE_BYTES), _PAGE_BYTES)
        return replace(smallest, nbytes=max(smallest.nbytes, nbytes // _PAGE_BYTES * _PAGE_BYTES))

    def reads(self) -> list[SparseRead]:
        """The reads by units in the order in which the routes number them."""
        steps = {trace.graph: trace.steps for trace in self.traces}
        return [steps[read.graph][read.step].sparse[0] for read in self.routes.reads]


def routed_reads(
    traces: Sequence[Trace], layout: Sequence[int], names: Sequence[str]
) -> dict[RoutedRead, SparseRead]:
    """The reads that a pool of that layout serves; `names` are those of the storages."""
    # Every call asks for all tiles.
    return _reads_of(traces, lambda read: layout[read.storage] >= 0 and not read.tiles, names)


def _reads_of(
    traces: Sequence[Trace], served: Callable[[SparseRead], bool], names: Sequence[str]
) -> dict[RoutedRead, SparseRead]:
    return {
        RoutedRead(
            *(trace.method, trace.graph, k, step.name),
            weight=names[read.storage],
            count=read.count,
            unit_nbytes=read.unit_nbytes,
        ): read
        for trace in traces
        for k, step in enumerate(trace.steps)
        for read in step.sparse
        if served(read)
    }


def profile_of(
    routes: Routes, storages: Sequence[Storage], traces: Sequence[Trace], names: Sequence[str]
) -> Profile:
    """The routes with the facts of the program, whose storages are called `names`.

    Raises PayloadError for routes of another program, and for those in which no call asks for a unit.
    """
    if not any(ask.units for call in routes.calls for ask in call):
        raise PayloadError(
            f"none of the {len(routes.calls)} calls of these routes asks for a unit: call the module within "
            "`with module.record_routes() as recorder:`, and save what was recorded then"
        )
    of_program = routed_reads(traces, _layout(storages, traces, 1), names)
    for read in routes.reads:
        if read not in of_program:
            raise PayloadError(
                f"the routes are of another program: step {read.step} ({read.name}) of {read.method!r} "
                f"reads {read.count} units of {read.unit_nbytes} bytes of {read.weight!r}, and none of this "
                "program does: record routes of this one"
            )
    read_of = {(key.graph, key.step): of_program[key] for key in routes.reads}
    return Profile(routes, tuple(storages), tuple(_with_reads(trace, read_of) for trace in traces))


def served_profile(profile: Profile, traces: Sequence[Trace], pool: Pool, names: Sequence[str]) -> Profile:
    """The profile with all that a pool serves of the traces of a plan, and with nothing else.

    Tiles, which are not recorded, are added to each call, since every call asks for all of them. A call of
    which nothing was recorded has none: nobody knows what it was a call of.

    Raises PayloadError if the pool serves reads of which nothing is known.
    """
    served = _reads_of(traces, pool.has, names)
    unknown = [key for key, read in served.items() if not read.tiles and key not in profile.routes.reads]
    if unknown:
        raise PayloadError(
            f"the plan reads units of {unknown[0].weight!r} in step {unknown[0].name}, of which the routes "
            "tell nothing: record routes with a plan that keeps the same weights, on the same kind of machine"
        )
    reads = tuple(served)
    numbers = {key: number for number, key in enumerate(reads)}
    tiles = [(key, Ask(numbers[key], tuple(range(key.count)))) for key, read in served.items() if read.tiles]
    calls: list[Route] = []
    for call in profile.routes.calls:
        asked = [(profile.routes.reads[ask.read], ask.units) for ask in call]
        asks = [Ask(numbers[key], units) for key, units in asked if key in numbers]
        added = [ask for key, ask in tiles if asked and key.graph == asked[0][0].graph]
        calls.append(tuple(sorted([*asks, *added], key=lambda ask: reads[ask.read].step)))
    read_of = {(key.graph, key.step): read for key, read in served.items()}
    narrowed = tuple(_with_reads(trace, read_of) for trace in traces)
    return Profile(Routes(reads, tuple(calls)), profile.storages, narrowed)


def _layout(storages: Sequence[Storage], traces: Sequence[Trace], granule: int) -> tuple[int, ...]:
    return units_layout(storages, traces, granule=granule) or (-1,) * len(storages)


def _with_reads(trace: Trace, read_of: dict[tuple[int, int], SparseRead]) -> Trace:
    """The trace with the reads that were found, by method and step, as its only ones by units."""
    steps = []
    for k, step in enumerate(trace.steps):
        read = read_of.get((trace.graph, k))
        steps.append(replace(step, sparse=(read,) if read else ()))
    return replace(trace, steps=tuple(steps))


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
    """The routes as a file; equal routes give equal bytes. Raises PayloadError for impossible routes."""
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

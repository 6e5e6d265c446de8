"""Routes: which units the reads of recorded calls asked for, and the program that they were recorded of.

A recorded trace of routes tells what any policy and any size of pool would have moved (`replay.py`).
`payload/routes.py` reads and writes the file, which docs/sparse.md specifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT, Pool, SparseRead, Storage, Trace
from penstock.schedule.sparse.division import smallest_pool, units_layout


@dataclass(frozen=True)
class RoutedRead:
    """A read whose units were recorded: of `count` units of `unit_nbytes` bytes of the weight named `weight`.

    It is step number `step`, called `name`, of the method `method`, whose probes carry the number `graph`.
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
    """What one read of a call asked for: the number of the read in the routes, and units, ascending."""

    read: int
    units: tuple[int, ...]


Route = tuple[Ask, ...]
"""What one call asked for, in the order of its reads."""


@dataclass(frozen=True)
class Routes:
    """The routes of calls in their order, and the reads that they were recorded of."""

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

    def pool(self, nbytes: int, *, granule: int = 4096) -> Pool:
        """A pool for the recorded tables, of `nbytes` bytes, or those of the largest unit if that is more."""
        layout = _layout(self.storages, self.traces, granule)
        smallest = smallest_pool(self.traces, layout, granule)
        return replace(smallest, nbytes=max(smallest.nbytes, nbytes // granule * granule))

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
    known = routed_reads(traces, _layout(storages, traces, 1), names)
    for read in routes.reads:
        if read not in known:
            raise PayloadError(
                f"the routes are of another program: step {read.step} ({read.name}) of {read.method!r} "
                f"reads {read.count} units of {read.unit_nbytes} bytes of {read.weight!r}, and none of this "
                "program does: record routes of this one"
            )
    read_of = {(key.graph, key.step): known[key] for key in routes.reads}
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

"""How a budget is divided: an arena for what is read whole, and a pool for what is read by units."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.schedule.bound.relaxation import copied_bytes, pass_ns
from penstock.schedule.facts.model import Hardware, Pool, SparseRead, Storage, Trace
from penstock.schedule.facts.problem import NEARLY, Problem, pass_counts

LEAST = 1 << 20
"""Bytes. A storage that is smaller is read whole: that takes a disk no longer than some reads of units."""

LEAST_UNIT = 256
"""Bytes. A storage of smaller units is read whole: what is noted of each unit takes 35 bytes."""

_PLACES = 2 << 20
"""Storages begin at such multiples in a pool, as huge pages do."""

_READERS = 4
"""Reads of units that are on their way at once."""


def units_layout(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    *,
    granule: int,
    keep: Collection[int] = (),
    tiles: bool = False,
    dense: bool = True,
) -> tuple[int, ...] | None:
    """The places in a pool of the storages that are worth reading by units; None if there are none.

    Without `tiles`, reads by tiles do not count, and without `dense`, those of all units do not. A storage of
    which methods read different units has no place. Each place agrees with the first file offset of its
    storage modulo `granule` where the phases allow, so that whole granules can be read directly.
    """
    named: dict[int, set[tuple[int, int, int, int]]] = {}
    reads = (read for trace in traces for step in trace.steps for read in step.sparse)
    for read in (read for read in reads if (tiles or not read.tiles) and (dense or not read.dense)):
        named.setdefault(read.storage, set()).add(read.units)
    layout, end = [-1] * len(storages), 0
    for s in sorted(named.keys() - set(keep)):
        storage = storages[s]
        small = storage.nbytes < LEAST or any(nbytes < LEAST_UNIT for *_, nbytes in named[s])
        if storage.kind != "streamable" or small or len(named[s]) > 1:
            continue
        offset = storage.extents[0].file_offset if storage.extents else storage.phase
        within = offset % granule if (offset - storage.phase) % 64 == 0 else storage.phase
        layout[s] = -(-end // _PLACES) * _PLACES + within
        end = layout[s] + storage.nbytes
    return tuple(layout) if end else None


def without_units(trace: Trace, pool: Pool) -> Trace:
    """The trace of what has to be in the arena where a pool serves the rest."""
    steps = []
    for step in trace.steps:
        served = {read.storage for read in step.sparse if pool.has(read)}
        steps.append(replace(step, reads=tuple(s for s in step.reads if s not in served)))
    return replace(trace, steps=tuple(steps))


def served_reads(trace: Trace, pool: Pool) -> Iterator[SparseRead]:
    """The reads of a trace that a pool serves, in their order."""
    return (read for step in trace.steps for read in step.sparse if pool.has(read))


def smallest_pool(
    traces: Sequence[Trace], layout: tuple[int, ...], granule: int, *, tiles: bool = False, dense: bool = True
) -> Pool:
    """The pool that holds one unit, whichever it is."""
    pool = Pool(0, granule, layout, tiles=tiles, dense=dense)
    most = max(_widest(pool, read) for trace in traces for read in served_reads(trace, pool))
    return replace(pool, nbytes=most)


def _widest(pool: Pool, read: SparseRead) -> int:
    """The most bytes that a unit of a read takes; where a unit begins in its granule repeats."""
    period = pool.granule // math.gcd(pool.granule, read.unit_stride)
    edges = (pool.granules(read, number) for number in range(min(read.count, period)))
    return max(stop - first for first, stop in edges) * pool.granule


@dataclass(frozen=True)
class Table:
    """What is read of one storage by units: bytes of a unit and of all, and how many one pass asks for.

    `cut` of those are asked for by reads that do not fit into the pool.
    """

    unit_nbytes: int
    nbytes: int
    count: int
    asked: int
    cut: int = 0

    def missed(self, pool_bytes: int) -> float:
        """Units that a pass misses with a pool of `pool_bytes` bytes, if all are asked for equally often.

        A read that does not fit into the pool finds none, since each of its rounds takes the whole pool.
        """
        return self.cut + (self.asked - self.cut) * (1 - min(1.0, pool_bytes / self.nbytes))


def tables_of(trace: Trace, pool: Pool) -> list[Table]:
    """The tables that a pass of a method reads, those first of which a byte is asked for most often."""
    tables: dict[int, Table] = {}
    for read in served_reads(trace, pool):
        taken = _widest(pool, read)
        nbytes = min(taken, max(read.unit_stride, 1)) * read.count + taken
        before = tables.get(read.storage)
        fits = read.asked * taken <= pool.nbytes
        tables[read.storage] = Table(
            *(taken, nbytes, read.count),
            asked=read.asked + (before.asked if before else 0),
            cut=(0 if fits else read.asked) + (before.cut if before else 0),
        )
    return sorted(tables.values(), key=lambda table: -table.asked / table.count)


class Missed(NamedTuple):
    """Units that a pass of a method does not find in a pool, and their bytes."""

    units: float
    nbytes: int

    def ns(self, hardware: Hardware) -> int:
        """Nanoseconds until they are there, if nothing else is read."""
        waits = self.units * hardware.link_latency_ns / _READERS
        return round(waits + self.nbytes * 1e9 / hardware.link_bytes_per_s)


Expectation = Callable[[Pool], Sequence[Missed]]
"""What a pass of each method is expected to miss, by pool."""


def evenly(traces: Sequence[Trace]) -> Expectation:
    """Calls ask for as many units as at the exported sizes, for each as often as for any other."""
    return lambda pool: [missed(trace, pool) for trace in traces]


def missed(trace: Trace, pool: Pool, *, cold: bool = False) -> Missed:
    """What a pass misses if the units asked for most are there, as many as fit, or (`cold`) none."""
    left, units, nbytes = 0 if cold else pool.nbytes, 0.0, 0.0
    for table in tables_of(trace, pool):
        some = table.missed(left)
        left = max(0, left - table.nbytes)
        units += some
        nbytes += some * table.unit_nbytes
    return Missed(units, round(nbytes))


def timed_pool(
    pool: Pool, traces: Sequence[Trace], hardware: Hardware, expected: Sequence[Missed] = ()
) -> Pool:
    """The pool with the times that a pass of each method is expected to wait, and waits at worst."""
    usual = [misses.ns(hardware) for misses in expected or evenly(traces)(pool)]
    worst_ns = tuple(missed(trace, pool, cold=True).ns(hardware) for trace in traces)
    return replace(pool, expected_ns=tuple(map(min, usual, worst_ns)), worst_ns=worst_ns)


class Division(NamedTuple):
    """How a budget is divided: a pool, with its times.

    No plan takes less than `ns` nanoseconds, summed over passes of all methods (`pass_counts`), of which the
    units are as expected; `missed` are the bytes of these units.
    """

    ns: int
    pool: Pool
    missed: int


def divide(
    problem: Problem, nbytes: int, least: int, expect: Expectation | None = None, divisions: int = 64
) -> list[Division]:
    """The best division of `nbytes`, and the one beside whose pool all the rest just fits, if there is one.

    The traces of the problem are those of what is read whole, for which an arena has at least `least` bytes,
    and its pool is the smallest. `divisions` sizes of the pool are compared, by what calls are expected to
    miss, evenly by default. Of divisions that are about as fast the one counts that copies fewest bytes:
    copies that hide behind compute by these times still take the disk from reads that a call waits for.
    """
    smallest = problem.pool
    assert smallest is not None
    expect = expect or evenly(problem.traces)
    everything = sum(problem.storages[s].nbytes for s in smallest.storages)
    largest = min(max(nbytes - least, smallest.nbytes), everything + smallest.nbytes)
    sizes = {
        smallest.nbytes + (largest - smallest.nbytes) * k // divisions // smallest.granule * smallest.granule
        for k in range(divisions + 1)
    }
    remaining = min(largest, (nbytes - problem.streamed_bytes) // smallest.granule * smallest.granule)
    if remaining >= smallest.nbytes:
        sizes.add(remaining)
    pools = [replace(smallest, nbytes=size) for size in sorted(sizes)]
    weighed = [_weighed(problem, pool, nbytes - pool.nbytes, expect(pool)) for pool in pools]
    enough = NEARLY * min(division.ns for division in weighed)
    # Of those that copy as little, the largest pool keeps most where calls do not ask for all units alike.
    best = min(
        (division for division in weighed if division.ns <= enough),
        key=lambda division: (division.copied, -division.pool.nbytes),
    )
    chosen = [division for division in weighed if division is best or division.pool.nbytes == remaining]
    divided = []
    for division in chosen:
        timed = timed_pool(division.pool, problem.traces, problem.hardware, division.missed)
        counted = zip(pass_counts(problem.traces), division.missed, strict=True)
        divided.append(Division(division.ns, timed, sum(count * misses.nbytes for count, misses in counted)))
    return divided


class _Weighed(NamedTuple):
    """A division: its time, the bytes that it copies, its pool, and what a pass of each method misses."""

    ns: int
    copied: int
    pool: Pool
    missed: Sequence[Missed]


def _weighed(problem: Problem, pool: Pool, room: int, expected: Sequence[Missed]) -> _Weighed:
    """The division in which `room` bytes are left for the arena."""
    ns = copied = 0
    for count, trace, some in zip(pass_counts(problem.traces), problem.traces, expected, strict=True):
        ns += count * (pass_ns(problem, trace, room) + some.ns(problem.hardware))
        copied += count * (copied_bytes(problem, trace, room) + some.nbytes)
    return _Weighed(ns, copied, pool, expected)

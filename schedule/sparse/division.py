"""How a budget is divided: an arena for what is read whole, and a pool for what is read by units.

A byte of arena saves a copy in each pass, unless copies hide behind compute; a byte of pool saves one as
often as the unit in it is asked for. Times here are those of bytes over rates, and of compute: enough to
compare divisions, of which only the chosen one is planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.schedule.facts.model import Hardware, Pool, SparseRead, Storage, Trace
from penstock.schedule.facts.problem import Problem

LEAST = 1 << 20
"""Bytes. A storage that is smaller is read whole: that takes a disk no longer than some reads of units."""

_PLACES = 2 << 20
"""Storages begin at such multiples in a pool, as huge pages do."""

_DIVISIONS = 64
"""The number of sizes of a pool that are compared."""

_NEARLY = 1.05
"""Divisions that take at most so many times as long as the fastest one are about as fast."""

_READERS = 4
"""Reads of units that are on their way at once."""


def units_layout(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    *,
    granule: int,
    keep: Collection[int] = (),
    tiles: bool = False,
) -> tuple[int, ...] | None:
    """The places in a pool of the storages that are worth reading by units; None if there are none.

    Without `tiles`, reads by tiles do not count. A storage of which methods read different units has no
    place. Each place agrees with the first file offset of its storage modulo `granule` where the phases
    allow, so that whole granules can be read directly.
    """
    named: dict[int, set[object]] = {}
    reads = (one for trace in traces for step in trace.steps for one in step.sparse)
    for one in (one for one in reads if tiles or not one.tiles):
        named.setdefault(one.storage, set()).add(one.units)
    layout, end = [-1] * len(storages), 0
    for s in sorted(named.keys() - set(keep)):
        storage = storages[s]
        if storage.kind != "streamable" or storage.nbytes < LEAST or len(named[s]) > 1:
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
        served = {one.storage for one in step.sparse if pool.has(one)}
        steps.append(replace(step, reads=tuple(s for s in step.reads if s not in served)))
    return replace(trace, steps=tuple(steps))


def served_reads(trace: Trace, pool: Pool) -> Iterator[SparseRead]:
    """The reads of a trace that a pool serves, in their order."""
    return (one for step in trace.steps for one in step.sparse if pool.has(one))


def smallest_pool(
    traces: Sequence[Trace], layout: tuple[int, ...], granule: int, *, tiles: bool = False
) -> Pool:
    """The pool that holds one unit, whichever it is."""
    pool = Pool(0, granule, layout, tiles=tiles)
    most = max(_widest(pool, one) for trace in traces for one in served_reads(trace, pool))
    return replace(pool, nbytes=most)


def _widest(pool: Pool, read: SparseRead) -> int:
    """The most bytes that a unit of a read takes; where a unit begins in its granule repeats."""
    period = pool.granule // math.gcd(pool.granule, read.unit_stride)
    edges = (pool.granules(read, number) for number in range(min(read.count, period)))
    return max(stop - first for first, stop in edges) * pool.granule


@dataclass(frozen=True)
class Table:
    """What is read of one storage by units: bytes of a unit and of all, and how many one pass asks for."""

    unit_nbytes: int
    nbytes: int
    count: int
    asked: int

    def missed(self, held: int) -> float:
        """Units that a pass misses where `held` bytes are in a pool and all are asked for equally often."""
        return self.asked * (1 - min(1.0, held / self.nbytes))


def tables_of(trace: Trace, pool: Pool) -> list[Table]:
    """The tables that a pass of a method reads, those first of which a byte is asked for most often."""
    found: dict[int, Table] = {}
    for read in served_reads(trace, pool):
        taken = _widest(pool, read)
        nbytes = min(taken, max(read.unit_stride, 1)) * read.count + taken
        before = found.get(read.storage)
        asked = read.asked + (before.asked if before else 0)
        found[read.storage] = Table(taken, nbytes, read.count, asked)
    return sorted(found.values(), key=lambda table: -table.asked / table.count)


def waiting_ns(trace: Trace, pool: Pool, hardware: Hardware, *, cold: bool = False) -> int:
    """Nanoseconds that a pass waits for the units that it does not find (`_missed`)."""
    units, nbytes = _missed(trace, pool, cold=cold)
    waits = units * hardware.link_latency_ns / _READERS
    return round(waits + nbytes * 1e9 / hardware.link_bytes_per_s)


def timed_pool(pool: Pool, traces: Sequence[Trace], hardware: Hardware) -> Pool:
    """The pool with the times that a pass of each method is expected to wait, and waits at worst."""
    return replace(
        pool,
        expected_ns=tuple(waiting_ns(trace, pool, hardware) for trace in traces),
        worst_ns=tuple(waiting_ns(trace, pool, hardware, cold=True) for trace in traces),
    )


def divide(problem: Problem, nbytes: int, least: int) -> tuple[Pool, int]:
    """The best division of `nbytes`, and its time in nanoseconds, summed over a pass of each method.

    The traces of the problem are those of what is read whole, for which an arena has at least `least` bytes,
    and its pool is the smallest. Of divisions that are about as fast the one counts that copies fewest bytes:
    copies that hide behind compute by these times still take the disk from reads that a call waits for.
    """
    smallest = problem.pool
    assert smallest is not None
    everything = sum(problem.storages[s].nbytes for s in smallest.storages)
    largest = min(max(nbytes - least, smallest.nbytes), everything + smallest.nbytes)
    sizes = {
        smallest.nbytes + (largest - smallest.nbytes) * k // _DIVISIONS // smallest.granule * smallest.granule
        for k in range(_DIVISIONS + 1)
    }
    found = [_weighed(problem, replace(smallest, nbytes=size), nbytes - size) for size in sizes]
    enough = _NEARLY * min(ns for ns, _, _ in found)
    # Of those that copy as little, the largest pool keeps most where calls do not ask for all units alike.
    ns, _, pool = min((one for one in found if one[0] <= enough), key=lambda one: (one[1], -one[2].nbytes))
    return timed_pool(pool, problem.traces, problem.hardware), ns


def _weighed(problem: Problem, pool: Pool, room: int) -> tuple[int, int, Pool]:
    """The time of a division in which `room` bytes are left for the arena, and the bytes that it copies."""
    ns = copied = 0
    for trace in problem.traces:
        ns += pass_ns(problem.storages, trace, problem.hardware, room)
        ns += waiting_ns(trace, pool, problem.hardware)
        copied += max(0, _read_bytes(problem.storages, trace) - max(0, room)) + _missed(trace, pool)[1]
    return ns, copied, pool


def _missed(trace: Trace, pool: Pool, *, cold: bool = False) -> tuple[float, int]:
    """The units that a pass does not find, and their bytes.

    All are asked for equally often, and those of the pool's size are there, or (`cold`) none is.
    """
    left, units, nbytes = 0 if cold else pool.nbytes, 0.0, 0.0
    for table in tables_of(trace, pool):
        missed = table.missed(left)
        left = max(0, left - table.nbytes)
        units += missed
        nbytes += missed * table.unit_nbytes
    return units, round(nbytes)


def _read_bytes(storages: Sequence[Storage], trace: Trace) -> int:
    read = {s for step in trace.steps for s in step.reads if storages[s].kind == "streamable"}
    return sum(storages[s].nbytes for s in read)


def pass_ns(storages: Sequence[Storage], trace: Trace, hardware: Hardware, room: int) -> int:
    """Nanoseconds of a pass of a method of which `room` bytes stay: those of compute, or of copies."""
    copied = _read_bytes(storages, trace) - max(0, room)
    return max(trace.compute_ns, hardware.copy_ns(copied) if copied > 0 else 0)

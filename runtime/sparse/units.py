"""The pool of units in memory, in Python and native, and the recorder of what was asked for."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from penstock.passes.lowering.method_code import MethodGraph
from penstock.passes.pipeline import declare
from penstock.passes.sparse.calls import SparseCall, call_by_units, sparse_calls
from penstock.runtime.arena.reading import tensor_at
from penstock.runtime.capabilities import Need, Share, Way
from penstock.runtime.device.opening import device_kind
from penstock.runtime.files.source import FileRanges, Source
from penstock.runtime.sparse.trust import check_experts, check_trusted, repeats_bits, trusted
from penstock.runtime.stream.engine import Counters, PooledReads
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.system.memory import (
    HUGE_PAGE,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    PAGE,
    PROT_NONE,
    Reservation,
    drop_pages,
    hint,
    move,
    protect,
    round_up,
    supports_move,
)
from penstock.runtime.system.threads import WorkerPool
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import PlanError, SourceError, StreamError
from penstock.schedule.facts.model import Pool, Range, SparseRead, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.payload.codec import Payload, ProbeOrder
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor
from penstock.schedule.space.spans import merged, subtract
from penstock.schedule.sparse.pool import divide, smallest_pool, units_layout, without_units
from penstock.schedule.sparse.replay import expectation
from penstock.schedule.sparse.residency import Residency, Unit
from penstock.schedule.sparse.routes import (
    Ask,
    Routes,
    profile_of,
    routed_reads,
    routes_from_bytes,
    routes_to_bytes,
    served_profile,
)


class PooledUnits(PooledReads):
    """The units of a plan's pool, each at its address in memory of its storage when a call needs it.

    One call at a time runs; `recorder` is told what it asks for. `names` are those of the storages.
    """

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        if plan.pool is None:
            raise PlanError("the plan has no pool: nothing of it is read by units")
        self.pool = plan.pool
        self.routed = routed_reads(plan.traces, self.pool.layout, names)
        self.recorder: Recorder | None = None

    def tensor(self, read: SparseRead) -> torch.Tensor:
        """Returns the tensor of a read, of which only the units have content that `hold` holds."""
        with torch.inference_mode(False):
            return tensor_at(self._address(read.storage), read.view)

    @declare(requires=("probes",), ensures=("units",))
    def rewrite(self, graph: MethodGraph, trace: Trace) -> MethodGraph:
        call_by_units(graph.graph, graph.bodies, trace, self)
        return graph

    def calls(self, trace: Trace, order: ProbeOrder) -> dict[int, SparseCall]:
        return sparse_calls(trace, order.units, self)

    def open_recorder(self) -> Recorder:
        return Recorder(self)

    def begin(self) -> None:
        if self.recorder is not None:
            self.recorder.begin()

    def ask(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        """Note all units that a step's read asks for, ascending, and cut them into parts that fit."""
        if self.recorder is not None:
            self.recorder.ask(graph, step, units)
        return self._parts(graph, step, units)

    def certify(self, read: SparseRead, parts: Sequence[Sequence[int]], arguments: Sequence[Any]) -> None:
        """Return if a product in these parts has the bits of the whole. Raises StreamError if it has not."""
        inputs, bias = arguments[0], len(arguments) > 2 and arguments[2] is not None
        rows = inputs.numel() // inputs.shape[-1] if inputs.numel() else 0
        edges = [*(part[0] for part in parts), read.count]
        if rows and not repeats_bits(read, edges, rows, bias=bias):
            raise StreamError(
                f"a product of {rows} rows with a weight of {prod(read.view.shape)} elements cannot be "
                "computed by tiles with the bits of the whole: give a budget that holds this weight, or "
                "fewer rows"
            )

    @abstractmethod
    def hold(
        self, graph: int, step: int, units: Sequence[int], *, alone: bool
    ) -> AbstractContextManager[None]:
        """Have the units of one part in memory; `alone` tells that there is no other part.

        Raises SourceError where a unit cannot be read; the next call reads it again.
        """

    @abstractmethod
    def _parts(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        """Note what a step's read asks for, and cut it into parts that fit."""

    @abstractmethod
    def _address(self, storage: int) -> int:
        """The address of a storage's first byte."""

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """The address space of the units, from its start to its stop."""


class NativeUnits(PooledUnits):
    """The pool of the plan that a native streamer runs, whose passes begin and end those of the pool."""

    in_reader = False  # the readers run no Python, so that nothing is collected on them

    def __init__(self, streamer: NativeStreamer, plan: Plan, names: Sequence[str]) -> None:
        super().__init__(plan, names)
        self._streamer = streamer

    @contextmanager
    def hold(self, graph: int, step: int, units: Sequence[int], *, alone: bool) -> Iterator[None]:
        numbers = array("q", units)
        part = graph, step, numbers.buffer_info()[0], len(numbers)
        self._streamer.call("ps_units_hold", *part, alone)
        try:
            yield
        finally:
            self._streamer.call("ps_units_release", *part)

    @property
    def counters(self) -> Counters:
        now = self._streamer.statistics("ps_units_stats")
        return Counters(now.bytes_moved, now.bytes_read, stall_ns=now.stall_ns)

    @property
    def held_bytes(self) -> int:
        return int(self._streamer.statistics("ps_units_stats").held_bytes)

    @property
    def peak_bytes(self) -> int:
        return int(self._streamer.statistics("ps_units_stats").peak_bytes)

    @property
    def memory(self) -> tuple[int, int]:
        return self._streamer.memory()[-1]

    def close(self) -> None:
        """Do nothing: the streamer's end is that of the pool."""

    def _parts(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        numbers, ends, count = array("q", units), array("q", bytes(8 * len(units))), ctypes.c_int64()
        asked = numbers.buffer_info()[0], len(numbers), ends.buffer_info()[0], ctypes.byref(count)
        self._streamer.call("ps_units_ask", graph, step, *asked)
        return [list(units[start:stop]) for start, stop in pairwise([0, *ends[: count.value]])]

    def _address(self, storage: int) -> int:
        return self._streamer.address_of_units(storage)


class Recorder:
    """Records which units the calls of a streamed module ask for, within a `with` statement.

    A call that fails is recorded as far as it came. `penstock replay` computes what pools of other sizes, and
    other policies, would have moved for these calls. Entering raises StreamError while another recorder is
    open.
    """

    def __init__(self, units: PooledUnits) -> None:
        self._units = units
        self._reads = tuple(units.routed)
        self._numbers = {(read.graph, read.step): number for number, read in enumerate(self._reads)}
        self._calls: list[list[Ask]] = []

    def __enter__(self) -> Recorder:
        if self._units.recorder is not None:
            raise StreamError("another recorder is open on this module: close it first")
        self._units.recorder = self
        return self

    def __exit__(self, *error: object) -> None:
        self._units.recorder = None

    @property
    def routes(self) -> Routes:
        """What all calls so far asked for."""
        return Routes(self._reads, tuple(tuple(call) for call in self._calls))

    def save(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write the routes to a file, for `penstock replay` and `Program.plan(routes=...)`.

        Args:
            path: The file.
            force: Replace a file that exists.

        Raises:
            SourceError: The file exists, or cannot be written.
            PayloadError: The routes take more than 64 MiB.
        """
        data = routes_to_bytes(self.routes)
        with replace_file(Path(path), force=force) as fd:
            write_all(fd, data)

    # What the units call.

    def begin(self) -> None:
        """Begin a call."""
        self._calls.append([])

    def ask(self, graph: int, step: int, units: Sequence[int]) -> None:
        """Note what a step of the call asks for; tiles are left out, as every call asks for all of them."""
        number = self._numbers.get((graph, step))
        if number is not None:
            self._calls[-1].append(Ask(number, tuple(units)))


def read_routes(path: Path) -> Routes:
    """The routes in a file. Raises SourceError if it cannot be read, PayloadError if it holds no routes."""
    try:
        data = read_bounded(path, "a file of routes")
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read ({error.strerror}): give a file that `recorder.save` wrote"
        ) from error
    return routes_from_bytes(data, source=str(path))


FEW, MANY = 4, 16
"""Readers of up to `_SOME` pieces, and of more: a disk answers many small reads as fast as few."""

_SOME = 128

PIECE = 2 << 20
"""Bytes that one reader reads at a time of a large unit."""

_MOVED = 256 << 10
"""Bytes. Memory moves to the next unit in runs of this size or more, as fresh memory is slower to fill."""


class LoadedUnits(PooledUnits):
    """The pool of a plan: address space for its storages, the units in it, and the readers that bring them.

    With `debug`, a read of a unit that is not in memory kills the process.
    """

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        source: Source,
        *,
        names: Sequence[str],
        debug: bool = False,
    ) -> None:
        super().__init__(plan, names)
        if self.pool.granule % PAGE:
            raise PlanError(
                f"the pool has granules of {self.pool.granule} bytes, and this system pages of {PAGE}: "
                "make a plan on this machine"
            )
        self._source, self._debug = source, debug
        self.residency = Residency(self.pool, plan.traces)
        self._counters = Counters()
        self._reads = {
            (trace.graph, k): read
            for trace in plan.traces
            for k, step in enumerate(trace.steps)
            for read in step.sparse
            if self.pool.has(read)
        }
        self._read_of = {read.storage: read for read in self._reads.values()}
        self._nbytes = [storage.nbytes for storage in storages]
        self._coming: dict[Unit, Future[int]] = {}
        self._edges: dict[int, Future[int]] = {}  # granules on their way that another unit may share
        self._spare: dict[Range, None] = {}  # memory of dropped units, still where they were
        self._unclear = False
        self._closed = False
        self._moves = supports_move() and not debug
        ends = (
            place + nbytes for place, nbytes in zip(self.pool.layout, self._nbytes, strict=True) if place >= 0
        )
        self._memory = Reservation(max(ends, default=0))
        try:
            self._map(storages)
            layout = self.pool.layout
            self._ranges = FileRanges.of(storages, layout, layout, base=self._memory.address)
            self._workers = WorkerPool(MANY, "unit")
        except BaseException:
            self._memory.close()
            raise

    def _map(self, storages: Sequence[Storage]) -> None:
        self._memory.map_anonymous(0, self._memory.nbytes)
        for s, place in enumerate(self.pool.layout):
            if place >= 0:
                read = self._read_of.get(s)
                edges = (place + read.unit(0)[0], read.unit_stride, read.unit_nbytes) if read else (1,)
                # Huge pages take what they count for, and leave as a whole, if units begin and end at them.
                whole = not any(edge % HUGE_PAGE for edge in edges)
                start = place // self.pool.granule * self.pool.granule
                nbytes = round_up(place + storages[s].nbytes, self.pool.granule) - start
                advice = MADV_HUGEPAGE if whole else MADV_NOHUGEPAGE
                hint(self._memory.address + start, min(nbytes, self._memory.nbytes - start), advice)
        if self._debug:
            protect(self._memory.address, self._memory.nbytes, PROT_NONE)

    # What a program calls.

    def begin(self) -> None:
        if self._unclear:
            self._start_over()
        self.residency.begin()
        super().begin()

    def _parts(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        self.residency.ask(graph, step, units)
        return self.residency.parts(self._reads[graph, step].storage, units)

    @contextmanager
    def hold(self, graph: int, step: int, units: Sequence[int], *, alone: bool) -> Iterator[None]:
        if self._closed:
            raise StreamError("the weights' memory has been closed; load the program again")
        storage = self._reads[graph, step].storage
        self._unclear = True
        change = self.residency.acquire(graph, step, units, alone=alone)
        self._drop(change.drop)
        self._move_to(change.bring)
        self._move_to(change.ahead)
        self._trim()
        self._bring(change.bring, change.granules)
        self._bring(change.ahead, change.granules)
        self._wait([(storage, number) for number in units])
        self._unclear = False
        try:
            yield
        finally:
            self.residency.release(graph, step, units)

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def held_bytes(self) -> int:
        return self.residency.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self.residency.peak_bytes

    @property
    def memory(self) -> tuple[int, int]:
        return self._memory.address, self._memory.address + self._memory.nbytes

    @property
    def in_reader(self) -> bool:
        return self._workers.includes_caller

    def close(self) -> None:
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._memory.close()

    def _address(self, storage: int) -> int:
        return self._memory.address + self.pool.layout[storage]

    # Bytes.

    def _bring(self, units: Sequence[Unit], granules: Mapping[Unit, tuple[int, int]]) -> None:
        """Have readers read the granules of units, neighbours together.

        A granule that holds bytes of a unit in memory is not among them, and never read again: kernels may be
        reading it, and a read that is moved into place is wrong until it ends.
        """
        own_granules = {unit: granules[unit] for unit in units if granules[unit][0] < granules[unit][1]}
        if not own_granules:
            return
        places = [
            Range(*self.pool.bytes_in(some, s, self._nbytes[s])) for (s, _), some in own_granules.items()
        ]
        pieces = [
            Range(start, min(start + PIECE, whole.stop))
            for whole in merged(places)
            for start in range(whole.start, whole.stop, PIECE)
        ]
        for place in places if self._debug else ():
            self._protect(place, mmap.PROT_READ | mmap.PROT_WRITE)
        lanes = min(len(pieces), FEW if len(pieces) <= _SOME else MANY)
        batch = _Batch(pieces, lanes)
        self._coming |= dict.fromkeys(own_granules, batch.done)
        for first, stop in own_granules.values():
            self._edges |= dict.fromkeys((first, stop - 1), batch.done)
        for _ in range(lanes):
            self._workers.submit(batch.read, self.read)

    def read(self, piece: Range) -> int:
        """Read the bytes of a piece; a reader calls this."""
        return self._ranges.read(self._source, piece.start, piece.stop)

    def _wait(self, units: Sequence[Unit]) -> None:
        """Return when units are there, and raise what kept one of them from being read."""
        wanted = {self._coming[unit] for unit in units if unit in self._coming}
        for storage, number in units if self._edges else ():
            first, stop = self.pool.granules(self._read_of[storage], number)
            wanted |= {self._edges[edge] for edge in (first, stop - 1) if edge in self._edges}
        if not wanted:
            return
        began = time.perf_counter_ns()
        wait(wanted)
        self._counters.stall_ns += time.perf_counter_ns() - began
        for future in wanted:
            self._settle(future)

    def _settle(self, future: Future[int]) -> None:
        """Count what a finished read has brought; raise its error, once all units are forgotten.

        Others may share granules with those that did not come.
        """
        error = future.exception()
        if error is not None:
            self._start_over()
            raise error
        self._coming = {unit: pending for unit, pending in self._coming.items() if pending is not future}
        self._edges = {edge: pending for edge, pending in self._edges.items() if pending is not future}
        self._counters.bytes_moved += future.result()
        self._counters.bytes_read += future.result()

    def _drop(self, units: Sequence[Unit]) -> None:
        for future in {self._coming[unit] for unit in units if unit in self._coming}:
            wait([future])
            self._settle(future)
        self._give_back(units)

    def _give_back(self, units: Sequence[Unit]) -> None:
        """Give back the granules of units in which no unit that is held has bytes."""
        granules: list[Range] = []
        for unit in units:
            inner = self._inner(unit)
            if inner is not None:
                self._spare[inner] = None
            granules += subtract(self._own(unit), [inner] if inner else [])
        for place in merged(granules):
            self._discard(place)

    def _own(self, unit: Unit) -> list[Range]:
        """The granules of a dropped unit in which no unit that is held has bytes."""
        first, stop = self.pool.granules(self._read_of[unit[0]], unit[1])
        last = stop - 1
        start = first + self.residency.in_use(first)
        end = stop - (last > first and self.residency.in_use(last))
        return [Range(start * self.pool.granule, end * self.pool.granule)] if start < end else []

    def _inner(self, unit: Unit) -> Range | None:
        """The granules that only this unit has bytes in, if they are many and may move."""
        first, stop = self.pool.granules(self._read_of[unit[0]], unit[1])
        inner = Range((first + 1) * self.pool.granule, (stop - 1) * self.pool.granule)
        return inner if self._moves and inner.nbytes >= _MOVED else None

    def _move_to(self, units: Sequence[Unit]) -> None:
        """Give units the memory of dropped ones of their size, which need not be zeroed and mapped again.

        A unit that was dropped itself keeps its own, so that no memory in use is ever taken for spare.
        """
        for unit in units:
            inner = self._inner(unit)
            if inner is None:
                continue
            if inner in self._spare:
                del self._spare[inner]
                continue
            spare_memory = next((spare for spare in self._spare if spare.nbytes == inner.nbytes), None)
            if spare_memory is None:
                continue
            del self._spare[spare_memory]
            base = self._memory.address
            try:
                move(base + spare_memory.start, base + inner.start, inner.nbytes)
            except OSError:  # no more mappings are allowed: fresh memory will do
                self._discard(spare_memory)

    def _trim(self) -> None:
        """Give back what is spare beyond what the pool may hold beside its units."""
        left = self.pool.nbytes - self.residency.held_bytes
        for spare in list(self._spare):
            left -= spare.nbytes
            if left < 0:
                del self._spare[spare]
                self._discard(spare)

    def _discard(self, place: Range) -> None:
        nbytes = min(place.stop, self._memory.nbytes) - place.start
        drop_pages(self._memory.address + place.start, nbytes)
        if self._debug:
            protect(self._memory.address + place.start, nbytes, PROT_NONE)

    def _protect(self, place: Range, protection: int) -> None:
        granule = self.pool.granule
        start = place.start // granule * granule
        nbytes = min(round_up(place.stop, granule), self._memory.nbytes) - start
        protect(self._memory.address + start, nbytes, protection)

    def _start_over(self) -> None:
        """Drop every unit, once nothing is on its way, whatever an interrupt has left."""
        self._unclear = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._workers = WorkerPool(MANY, "unit")
        self._coming.clear()
        self._edges.clear()
        self._spare.clear()
        self.residency.reset()
        drop_pages(self._memory.address, self._memory.nbytes)
        if self._debug:
            protect(self._memory.address, self._memory.nbytes, PROT_NONE)
        self._unclear = False


class _Batch:
    """Pieces that several readers take in turn. `done` has the bytes read, or the first error, at the end."""

    def __init__(self, pieces: Sequence[Range], readers: int) -> None:
        self.done: Future[int] = Future()
        self._left = iter(pieces)
        self._readers = readers
        self._nbytes = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def read(self, read: Callable[[Range], int]) -> None:
        """Read pieces until none is left; the last reader to end completes `done`."""
        nbytes, error = 0, None
        try:
            while True:
                with self._lock:
                    piece = next(self._left, None)
                if piece is None:
                    break
                nbytes += read(piece)
        except BaseException as raised:  # raised again on the caller's thread
            error = raised
        with self._lock:
            self._nbytes += nbytes
            self._error = self._error or error
            self._readers -= 1
            if self._readers:
                return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(self._nbytes)


_REPLAYED = 12
"""The number of pools for which recorded routes are replayed."""


class ByUnits(Way):
    """Reads by units, which come and go in a pool as calls ask for them; in Python, products by tiles too."""

    def needs(self, payload: Payload, keep: frozenset[int], device: str) -> Iterator[Need]:
        """Yield the facts for the smallest pool, with reads of all units in it and then without."""
        reads, tiles = _sparse(payload.traces), self.in_python
        if (
            device_kind(device) != "cpu"
            or not _can_bring(payload)
            or (tiles and not any(r.tiles for r in reads))
        ):
            return
        traces = trusted(payload.traces)
        doubted = reads - _sparse(traces)
        kept_whole = keep | {read.storage for read in doubted if tiles or not read.tiles}
        for dense in sorted({True, *(not read.dense for read in reads)}, reverse=True):
            layout = units_layout(
                payload.storages, traces, granule=PAGE, keep=kept_whole, tiles=tiles, dense=dense
            )
            if layout is not None:
                pool = smallest_pool(traces, layout, PAGE, tiles=tiles, dense=dense)
                whole = replace(payload, traces=self.whole_reads(payload.traces, pool))
                yield Need(self, whole, keep, pool, rank=1 if dense else 2)

    def whole_reads(self, traces: Sequence[Trace], pool: Pool | None) -> tuple[Trace, ...]:
        return tuple(traces if pool is None else (without_units(trace, pool) for trace in traces))

    def shares(self, problem: Problem, budget: int, routes: Any, names: Sequence[str]) -> list[Share]:
        assert problem.pool is not None
        least = floor(problem).upper_bytes - problem.outside_bytes
        nbytes = budget - (problem.outside_bytes - problem.pool.nbytes)
        if routes is None:
            divisions = divide(problem, nbytes, least)
        else:
            recorded = profile_of(routes, problem.storages, problem.traces, names)
            profile = served_profile(recorded, problem.traces, problem.pool, names)
            expect = expectation(profile, [trace.graph for trace in problem.traces])
            divisions = divide(problem, nbytes, least, expect, _REPLAYED)
        return [Share(some.ns, replace(problem, pool=some.pool), some.missed) for some in divisions]

    def check(self, trace: Trace) -> None:
        if not self.in_python:  # once for all ways
            check_experts(trace)

    def open(
        self, plan: Plan, payload: Payload, source: Source, streamer: Any, *, debug: bool
    ) -> PooledUnits | None:
        if plan.pool is None or plan.pool.tiles != self.in_python:
            return None
        if not _can_bring(payload):
            raise StreamError(
                f"the plan reads weights by units, and a program of lowering {payload.lowering!r} cannot: "
                "make a plan for it"
            )
        check_trusted(plan)
        names = payload.storage_names()
        if isinstance(streamer, NativeStreamer):
            return NativeUnits(streamer, plan, names)
        return LoadedUnits(plan, payload.storages, source, names=names, debug=debug)


def _can_bring(payload: Payload) -> bool:
    """Tells whether calls of the program can bring units."""
    return payload.lowering in ("eager", "inductor")


def _sparse(traces: Sequence[Trace]) -> set[SparseRead]:
    return {read for trace in traces for step in trace.steps for read in step.sparse}

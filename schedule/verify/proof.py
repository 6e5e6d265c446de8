"""The proof that a plan is safe, from storages, traces and plan alone, without any code of the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import (
    ALIGNMENT,
    IN_ARENA,
    ITEM_SIZES,
    Decisions,
    Pool,
    Range,
    Schedule,
    SparseRead,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.verify.walk import ABSENT, Memory, Walk, dropped_or_written, lay

_MANY = 1 << 16


def arena_reads(step: Step, pool: Pool | None) -> tuple[int, ...]:
    """The storages that a step of the program reads from the arena: all but those that the pool serves."""
    served = {read.view.storage for read in step.sparse if pool is not None and _served(read, pool)}
    return tuple(s for s in step.reads if s not in served)


def check_pool(storages: tuple[Storage, ...], plan: Decisions) -> None:
    """Raise PlanError unless the pool of a plan can serve every read that it is to serve."""
    pool = plan.pool
    if pool is None:
        return
    if pool.granule < 1 or len(pool.layout) != len(storages):
        raise PlanError(
            f"expected a pool of granules with {len(storages)} offsets, got granules of {pool.granule} bytes "
            f"and {len(pool.layout)} offsets"
        )
    _check_places(storages, pool)
    units: dict[int, tuple[int, ...]] = {}
    for trace in plan.traces:
        for k, step in enumerate(trace.steps):
            where = f"graph {trace.graph}: step {k} ({step.name})"
            served = [read for read in step.sparse if _served(read, pool)]
            if len(served) > 1:
                raise PlanError(f"{where} reads units of {len(served)} storages, expected one at most")
            for read in served:
                stride, nbytes = _check_read(storages, pool, read, where)
                same = (read.view.shape[0], read.view.offset, stride, nbytes)
                if units.setdefault(read.view.storage, same) != same:
                    raise PlanError(
                        f"{where} reads other units of storage {read.view.storage} than an earlier step, and "
                        "the pool has one kind of them"
                    )


def _served(read: SparseRead, pool: Pool) -> bool:
    if not 0 <= read.view.storage < len(pool.layout) or pool.layout[read.view.storage] < 0:
        return False
    return pool.tiles if read.tiles else pool.dense or read.asked < (*read.view.shape, 0)[0]


def _check_places(storages: tuple[Storage, ...], pool: Pool) -> None:
    """Storages are at their phases, and no two have bytes in one granule."""
    end = 0
    for place, s in sorted((place, s) for s, place in enumerate(pool.layout) if place >= 0):
        if storages[s].kind != "streamable" or place % ALIGNMENT != storages[s].phase:
            raise PlanError(
                f"storage {s}, which is {storages[s].kind}, lies at byte {place} of the pool, expected a "
                f"streamable one at {storages[s].phase} modulo {ALIGNMENT}"
            )
        if place // pool.granule < end:
            raise PlanError(f"storage {s} lies in a granule of the pool that another storage has bytes in")
        end = -(-(place + storages[s].nbytes) // pool.granule)


def _most_taken(granule: int, first: int, stride: int, nbytes: int, count: int) -> int:
    """Bytes of the granules that the widest of some units takes; more, if units begin at very many places.

    The places at which units begin in their granules repeat, equal modulo the common divisor of stride and
    granule.
    """
    common = math.gcd(granule, stride)
    period = granule // common
    begins = [(first + k * stride) % granule for k in range(min(count, period))] if period < _MANY else []
    latest = max(begins, default=granule - common + first % common)
    return -(-(latest + nbytes) // granule) * granule


def _check_read(storages: tuple[Storage, ...], pool: Pool, read: SparseRead, where: str) -> tuple[int, int]:
    """Check the units of a read; return the bytes from a unit to the next, and those of a unit."""
    view, item_bytes = read.view, ITEM_SIZES.get(read.view.dtype, 0)
    if not item_bytes or len(view.shape) != len(view.stride) or min(view.shape, default=0) < 1:
        raise PlanError(f"{where} reads units of a tensor of {view.dtype} {view.shape}, which has none")
    slices = read.computed.shape[:1] if read.computed else view.shape[:1]
    if slices != view.shape[:1] or (read.computed and (read.tiles or read.slices != 1)):
        raise PlanError(
            f"{where} computes {(*slices, 0)[0]} slices from {view.shape[0]} units: expected as many"
        )
    stride = view.stride[0] * item_bytes
    nbytes = (1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride[1:], strict=True))) * item_bytes
    count, end = view.shape[0], view.offset + (view.shape[0] - 1) * stride + nbytes
    if min(view.offset, *view.stride) < 0 or end > storages[view.storage].nbytes:
        raise PlanError(
            f"{where} reads bytes {view.offset}:{end} of storage {view.storage}, which has "
            f"{storages[view.storage].nbytes}"
        )
    if stride < nbytes:
        raise PlanError(f"{where} reads units of {nbytes} bytes every {stride}: they overlap")
    taken = _most_taken(pool.granule, pool.layout[view.storage] + view.offset, stride, nbytes, count)
    if taken > pool.nbytes:
        raise PlanError(
            f"{where} needs {taken} bytes for one unit of storage {view.storage}, and the pool has "
            f"{pool.nbytes}"
        )
    return stride, nbytes


def verify_plan(storages: tuple[Storage, ...], traces: tuple[Trace, ...], plan: Decisions) -> None:
    """Return when `plan` is safe for every method of the program, at any speed of any copy.

    Raises PlanError with one sentence, which names the graph, the transfer or step, and the bytes. The time
    taken is linear in transfers and steps, except where a range is cut by the edges of many others.
    """
    _check_traces(storages, traces, plan)
    _check_budget(storages, plan)
    check_pool(storages, plan)
    for schedule, trace in _paired(plan):
        _check_schedule(schedule, trace, _before(plan, trace))
    memory = Memory(storages, plan)
    _check_host(plan, memory)
    _check_resident(memory, plan)
    _check_produced(memory, plan)
    for _, trace in _paired(plan):
        Walk(memory, plan, _calls(plan, trace)).run()


def _paired(plan: Decisions) -> list[tuple[Schedule, Trace]]:
    traces = {t.graph: t for t in plan.traces}
    return [(s, traces[s.graph]) for s in plan.schedules]


def _before(plan: Decisions, trace: Trace) -> Trace:
    """The trace of the call that comes before a call of `trace` as planned."""
    return trace if trace.follows is None else next(t for t in plan.traces if t.graph == trace.follows)


def _calls(plan: Decisions, first: Trace) -> list[tuple[Schedule, Trace]]:
    """The calls that come in turn from one of `first` on, until it would come again."""
    calls: list[tuple[Schedule, Trace]] = []
    now = first
    while not calls or now is not first:
        calls.append((next(s for s in plan.schedules if s.graph == now.graph), now))
        now = next(t for t in plan.traces if _before(plan, t) is now)
    return calls


def _check_traces(storages: tuple[Storage, ...], traces: tuple[Trace, ...], plan: Decisions) -> None:
    """The plan has a schedule and a trace for each of the program's traces, with the same reads."""
    if plan.wrap not in ("overlap", "barrier"):
        raise PlanError(f"expected wrap to be overlap or barrier, got {plan.wrap!r}")
    graphs = sorted(t.graph for t in traces)
    for title, entries in (("traces", plan.traces), ("schedules", plan.schedules)):
        if sorted(entry_of.graph for entry_of in entries) != graphs:
            raise PlanError(
                f"expected {title} of the program's graphs {graphs}, got {sorted(i.graph for i in entries)}: "
                "the plan was made for another program"
            )
    program = {t.graph: t for t in traces}
    for trace in plan.traces:
        reads = [(s.reads, s.writes, s.sparse) for s in trace.steps]
        steps = program[trace.graph].steps
        expected = [(arena_reads(s, plan.pool), s.writes, s.sparse) for s in steps]
        if reads != expected:
            step = next((k for k, (a, b) in enumerate(zip(reads, expected, strict=False)) if a != b), None)
            where = (
                f"{len(reads)} steps for {len(expected)}" if step is None else f"other reads in step {step}"
            )
            raise PlanError(f"graph {trace.graph}: the plan was made for another program, which has {where}")
        _check_trace(storages, trace)
    _check_turns(plan)
    _check_writes(storages, plan)


def _check_turns(plan: Decisions) -> None:
    """Each trace is followed by one, itself or another, and those that follow another have steps."""
    graphs = sorted(t.graph for t in plan.traces)
    followed = sorted(t.graph if t.follows is None else t.follows for t in plan.traces)
    if followed != graphs:
        raise PlanError(f"expected each of the graphs {graphs} to be followed once, got {followed}")
    for trace in plan.traces:
        if trace.follows is not None and (trace.follows == trace.graph or not trace.steps):
            raise PlanError(
                f"graph {trace.graph}: expected steps, and to follow another graph, got {len(trace.steps)} "
                f"steps that follow graph {trace.follows}"
            )
    if plan.wrap == "barrier" and any(trace.follows is not None for trace in plan.traces):
        raise PlanError("expected no trace to follow another where copies may not cross the end of a call")


def _check_writes(storages: tuple[Storage, ...], plan: Decisions) -> None:
    written: set[int] = set()
    for trace in plan.traces:
        for k, step in enumerate(trace.steps):
            for s in step.writes:
                if not 0 <= s < len(storages) or storages[s].kind != "produced" or s in written:
                    raise PlanError(
                        f"graph {trace.graph}: step {k} ({step.name}) writes storage {s}, expected a "
                        f"produced one of {len(storages)} that no other step writes"
                    )
                written.add(s)


def _check_trace(storages: tuple[Storage, ...], trace: Trace) -> None:
    if min(trace.tail_ns, trace.gap_ns, *(min(s.lead_ns, s.read_ns) for s in trace.steps), 0) < 0:
        raise PlanError(f"graph {trace.graph}: expected times of 0 ns or more, got a negative one")
    for k, step in enumerate(trace.steps):
        for s in step.reads:
            if not 0 <= s < len(storages) or storages[s].kind not in IN_ARENA:
                raise PlanError(
                    f"graph {trace.graph}: step {k} ({step.name}) reads storage {s}, which is not a "
                    f"streamable one of {len(storages)}"
                )


def _check_budget(storages: tuple[Storage, ...], plan: Decisions) -> None:
    """Storages that are not streamable are outside the arena; they and the arena fit into the budget."""
    outside = set(plan.outside)
    if len(outside) < len(plan.outside) or not outside <= set(range(len(storages))):
        raise PlanError(
            f"expected indices of {len(storages)} storages outside the arena, each once, got {plan.outside}"
        )
    for s, storage in enumerate(storages):
        if storage.kind not in IN_ARENA and s not in outside:
            raise PlanError(
                f"storage {s} is {storage.kind} and must be outside the arena, but the plan does not list it"
            )
    taken = sum(storages[s].nbytes for s in outside) + (plan.pool.nbytes if plan.pool else 0)
    if plan.arena_bytes < 0 or plan.arena_bytes + taken > plan.budget:
        raise PlanError(
            f"the arena of {plan.arena_bytes} bytes and {taken} bytes beside it do not fit into the budget "
            f"of {plan.budget} bytes"
        )


def _check_schedule(schedule: Schedule, trace: Trace, before: Trace) -> None:
    """Transfers and drops name steps; no transfer waits for more than `before`, the pass before."""
    steps = len(trace.steps)
    if schedule.predicted_ns < 0:
        raise PlanError(
            f"graph {schedule.graph}: expected a predicted time of 0 ns or more, got {schedule.predicted_ns}"
        )
    for name, move in dropped_or_written(schedule):
        if not 0 <= move.step < steps:
            raise PlanError(f"graph {schedule.graph}: {name} names a step that is not one of {steps}")
    for i, transfer in enumerate(schedule.transfers):
        where = f"graph {schedule.graph}: transfer {i} for step {transfer.step}"
        least = transfer.step - steps if before is trace else -len(before.steps)
        if not least <= transfer.after < transfer.step:
            raise PlanError(
                f"{where} waits for step {transfer.after}, expected one from {least} to "
                f"{transfer.step - 1}: before its own, and one pass back at most"
            )
        if transfer.direction not in ("in", "out") or transfer.link != 0:
            raise PlanError(
                f"{where} has direction {transfer.direction!r} and link {transfer.link}, expected 'in' or "
                "'out' and 0, the only ones there are"
            )


def _check_resident(memory: Memory, plan: Decisions) -> None:
    """Resident bytes are in the boundary, and nothing drops or overwrites them."""
    resident = lay(plan.resident, memory, "resident range")
    for items in map(plan.boundary_of, plan.schedules):
        boundary = lay(items, memory, "boundary range")
        for cell, content in enumerate(resident):
            if content not in (ABSENT, boundary[cell]):
                extent = memory.extent(cell)
                raise PlanError(
                    f"bytes {extent.start}:{extent.stop} are resident but missing from the boundary"
                )
        if memory.paged and sum(r.nbytes for r in items) > plan.arena_bytes:
            raise PlanError(
                f"the boundary of {sum(r.nbytes for r in items)} bytes does not fit into the arena of "
                f"{plan.arena_bytes} bytes"
            )
    for schedule in plan.schedules:
        for name, move in dropped_or_written(schedule):
            _, lo, hi = memory.place(move)
            if resident[lo:hi].count(ABSENT) < hi - lo:
                raise PlanError(f"graph {schedule.graph}: {name} takes bytes that are resident")


def _check_produced(memory: Memory, plan: Decisions) -> None:
    """Produced bytes are never resident, cross to the next call alone, and nothing else is copied out."""
    for piece in plan.resident:
        if memory.produced(piece) is not None:
            raise PlanError(f"bytes {piece.start}:{piece.stop} are produced, and cannot be resident")
    for schedule, trace in _paired(plan):
        written, before = ({s for k in t.steps for s in k.writes} for t in (trace, _before(plan, trace)))
        for piece in plan.boundary_of(schedule):
            s = memory.produced(piece)
            if s is not None and s not in before - written:
                raise PlanError(
                    f"bytes {piece.start}:{piece.stop} of the boundary of graph {schedule.graph} are of "
                    f"storage {s}, which the call before does not write"
                )
        for name, move in dropped_or_written(schedule):
            if isinstance(move, Transfer) and move.direction == "out" and memory.produced(move) is None:
                raise PlanError(f"graph {schedule.graph}: {name} copies out bytes that no step writes")


def _check_host(plan: Decisions, memory: Memory) -> None:
    """The host holds the bytes of every transfer, or they pass through its ring, and both fit its memory."""
    rings = {schedule.staging_bytes for schedule in plan.schedules} - {0}
    if plan.host is None:
        if rings or any(schedule.staged for schedule in plan.schedules):
            raise PlanError("transfers are staged through a host of which the plan says nothing; plan again")
        return
    _check_held(plan.host.resident, plan.arena.segments)
    host_bytes = sum(r.stop - r.start for r in plan.host.resident)
    if host_bytes + max(rings, default=0) > plan.host.nbytes or len(rings) > 1:
        raise PlanError(
            f"the host holds {host_bytes} bytes and rings of {sorted(rings)}, expected one ring and "
            f"{plan.host.nbytes} bytes in all; plan again"
        )
    for schedule in plan.schedules:
        for piece in plan.boundary_of(schedule):
            weights = memory.produced(piece) is None
            if weights and not rings and _lacks(piece, plan.host.resident, plan.resident):
                raise PlanError(
                    f"bytes {piece.start}:{piece.stop} of the boundary of graph {schedule.graph} are neither "
                    "on the device nor with the host, which has no ring; plan again"
                )
        for fault in _staging_faults(schedule, plan.host.resident):
            raise PlanError(f"schedule of graph {schedule.graph}: {fault}; plan again")


def _check_held(host_ranges: Sequence[Range], segments: Sequence[Range]) -> None:
    end = 0
    for piece in host_ranges:
        inside = any(s.start <= piece.start and piece.stop <= s.stop for s in segments)
        if not (end <= piece.start < piece.stop) or not inside:
            raise PlanError(
                f"the host holds bytes {piece.start}:{piece.stop}, expected ranges of the layout's segments, "
                "ascending and disjoint; plan again"
            )
        end = piece.stop


def _staging_faults(schedule: Schedule, host_ranges: Sequence[Range]) -> Iterator[str]:
    staged = schedule.staged or (0,) * len(schedule.transfers)
    if len(staged) != len(schedule.transfers):
        yield f"expected {len(schedule.transfers)} counts of staged bytes, got {len(staged)}"
        return
    for transfer, nbytes in zip(schedule.transfers, staged, strict=True):
        missing = _missing(transfer, host_ranges)
        if transfer.direction == "out" and missing:
            yield f"the host has no memory for the bytes {transfer.start}:{transfer.stop} that are copied out"
        if nbytes != missing:
            yield (
                f"the host lacks {missing} of the bytes {transfer.start}:{transfer.stop}, "
                f"and {nbytes} are staged"
            )
        if nbytes > schedule.staging_bytes:
            yield f"{nbytes} bytes are staged at once in a ring of {schedule.staging_bytes}"


def _lacks(piece: Range, host_ranges: Sequence[Range], resident: Sequence[Range]) -> bool:
    """Tell whether a byte of `piece` is in none of the ranges `host_ranges` and `resident`."""
    position = piece.start
    for covering in sorted((*host_ranges, *resident)):
        if covering.start > position:
            break
        position = max(position, covering.stop)
    return position < piece.stop


def _missing(transfer: Transfer, host_ranges: Sequence[Range]) -> int:
    """Bytes of a transfer in none of the ranges `host_ranges` by the host, which are sorted and disjoint."""
    position, missing = transfer.start, 0
    for piece in host_ranges:
        if piece.stop <= position:
            continue
        if piece.start >= transfer.stop:
            break
        missing += max(0, piece.start - position)
        position = min(piece.stop, transfer.stop)
    return missing + max(0, transfer.stop - position)

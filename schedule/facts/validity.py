"""The rules that plans, traces and machines must satisfy beyond the types of their fields.

Every function yields a sentence for each fault, which begins with `path`, the place of the faulty value.
`payload/codec.py` has the rules of the other parts of a payload.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import (
    ITEM_SIZES,
    Computed,
    Decisions,
    Drop,
    Hardware,
    Pool,
    Range,
    SparseRead,
    Storage,
    Trace,
    Transfer,
)

LARGEST_SIZE = 1 << 50
"""The most bytes that a file, a storage or an arena may have: far above any model, and far below overflow."""

_LONGEST = (1 << 63) - 1
"""The most nanoseconds that a payload says: 292 years."""

_WHOLE = ("link_latency_ns", "link_in_flight_bytes", "memory_nbytes", "disk_latency_ns", "host_step_ns")
"""The figures of a machine that are whole numbers."""

_UNKNOWN = ("disk_bytes_per_s", "write_bytes_per_s")
"""The rates of a machine that may be missing."""


def range_faults(value: int, least: int, most: int, path: str) -> Iterator[str]:
    if not least <= value <= most:
        yield f"{path}: expected {least} to {most}, got {value}"


def size_faults(value: int, path: str, least: int = 0) -> Iterator[str]:
    return range_faults(value, least, LARGEST_SIZE, path)


def negative_faults(path: str, **values: float) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(value, int):
            yield f"{path}.{name}: expected a whole number, got {value!r}"
        elif value < 0:
            yield f"{path}.{name}: expected 0 or more, got {value}"


def repeat_faults(values: Iterable[Hashable], path: str, title: str) -> Iterator[str]:
    seen = set()
    for i, value in enumerate(values):
        if value in seen:
            yield f"{path}[{i}]: expected {title} that no other has, got {value!r} again"
        seen.add(value)


def trace_faults(trace: Trace, path: str, storages: int) -> Iterator[str]:
    work = trace.tail_work
    yield from negative_faults(path, graph=trace.graph, tail_ns=trace.tail_ns, gap_ns=trace.gap_ns)
    yield from negative_faults(f"{path}.tail_work", flops=work.flops, nbytes=work.nbytes)
    for i, step in enumerate(trace.steps):
        here = f"{path}.steps[{i}]"
        yield from negative_faults(here, lead_ns=step.lead_ns, read_ns=step.read_ns)
        for name, spent in (("lead_work", step.lead_work), ("read_work", step.read_work)):
            yield from negative_faults(f"{here}.{name}", flops=spent.flops, nbytes=spent.nbytes)
        for name, named in (("reads", step.reads), ("writes", step.writes)):
            listed = list(named)[:8]
            if list(named) != sorted(set(named)) or not (step.reads or step.writes or step.sparse):
                yield f"{here}.{name}: expected one storage or more, ascending, got {listed}"
            elif named and (named[0] < 0 or named[-1] >= storages):
                yield f"{here}.{name}: expected indices of {storages} storages, got {listed}"
        if set(step.reads) & set(step.writes):
            yield f"{here}.writes: expected none of the storages {list(step.reads)[:8]} that the step reads"
        yield from repeat_faults((read.storage for read in step.sparse), f"{here}.sparse", "a storage")
        for j, read in enumerate(step.sparse):
            yield from _sparse_faults(read, f"{here}.sparse[{j}]", storages)


def _sparse_faults(read: SparseRead, path: str, storages: int) -> Iterator[str]:
    """The units of a read are slices of a tensor of a known dtype, none of which overlaps the next."""
    view = read.view
    yield from range_faults(read.storage, 0, storages - 1, f"{path}.view.storage")
    yield from negative_faults(path, route=read.route)
    if view.dtype not in ITEM_SIZES or not view.shape or len(view.shape) != len(view.stride):
        yield f"{path}.view: expected a tensor of a torch dtype, with dimensions and a stride for each"
        return
    for name, values in (("shape", view.shape), ("stride", view.stride), ("offset", (view.offset,))):
        for value in values:
            yield from size_faults(value, f"{path}.view.{name}", 1 if name == "shape" else 0)
    if view.name or view.offset % ITEM_SIZES[view.dtype]:
        yield f"{path}.view: expected no name, and whole items as offset, got {view.name!r} and {view.offset}"
    yield from range_faults(read.asked, 0, read.count, f"{path}.asked")
    joined = len(view.shape) > 1 and view.stride[0] == view.shape[1] * view.stride[1]
    if read.slices != 1 and not (joined and view.shape[1] == read.slices > 1):
        yield f"{path}.slices: expected 1, or {view.shape[1:2]}, one after another, got {read.slices}"
    if read.computed is not None:
        yield from _computed_faults(read, read.computed, f"{path}.computed")
    if read.unit_stride < read.unit_nbytes:
        yield f"{path}.view: expected slices on dimension 0 that do not overlap, got stride {view.stride}"


def _computed_faults(read: SparseRead, computed: Computed, path: str) -> Iterator[str]:
    """What is computed from the units of a read is a tensor with as many slices."""
    if computed.dtype not in ITEM_SIZES or not computed.shape or len(computed.shape) != len(computed.stride):
        yield f"{path}: expected a tensor of a torch dtype, with dimensions and a stride for each"
        return
    for name, values in (("shape", computed.shape), ("stride", computed.stride)):
        for value in values:
            yield from size_faults(value, f"{path}.{name}", 1 if name == "shape" else 0)
    if computed.shape[0] != read.count or read.slices > 1 or read.tiles:
        yield (
            f"{path}: expected a slice for each of {read.count} units, which are no tiles, "
            f"got {computed.shape}"
        )


def facts_faults(storages: Sequence[Storage], traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the faults of the sizes, times and reads that a plan is to be made for."""
    for i, storage in enumerate(storages):
        yield from negative_faults(f"storages[{i}]", nbytes=storage.nbytes)
    for i, trace in enumerate(traces):
        yield from trace_faults(trace, f"traces[{i}]", len(storages))
    yield from turn_faults(traces, "traces")
    yield from produced_faults(storages, traces, "traces")


def produced_faults(storages: Sequence[Storage], traces: Sequence[Trace], path: str) -> Iterator[str]:
    """A produced storage is written in one step, and read later in that call or in the next.

    The next call is that of the trace behind; after the last trace of a round comes the first.
    """
    written: dict[int, tuple[int, int]] = {}
    for i, trace in enumerate(traces):
        for k, step in enumerate(trace.steps):
            here = f"{path}[{i}].steps[{k}].writes"
            for s in step.writes:
                if storages[s].kind != "produced":
                    yield f"{here}: expected produced storages, got storage {s}, which is {storages[s].kind}"
                if s in written:
                    yield f"{here}: expected storages that no other step writes, got {s} again"
                written[s] = (i, k)
    for i, trace in enumerate(traces):
        before = next((j for j, other in enumerate(traces[:i]) if other.graph == trace.follows), None)
        for k, step in enumerate(trace.steps):
            for s in (s for s in step.reads if storages[s].kind == "produced"):
                by, at = written.get(s, (i, k))
                if not (at < k if by == i else by == before):
                    yield (
                        f"{path}[{i}].steps[{k}].reads: expected produced storages that an earlier step of "
                        f"this call, or a step of the call before, has written, got {s}"
                    )


def turn_faults(traces: Sequence[Trace], path: str) -> Iterator[str]:
    """Traces that follow others do so in turn, around to the first, and each has a step to wait for."""
    steps = {trace.graph: len(trace.steps) for trace in traces}
    followed = [trace.graph if trace.follows is None else trace.follows for trace in traces]
    for i, trace in enumerate(traces):
        here, before = f"{path}[{i}].follows", trace.follows
        if before is None:
            continue
        if before == trace.graph or before not in steps:
            yield f"{here}: expected the graph of another trace, one of {sorted(steps)}, got {before}"
        elif followed.count(before) > 1 or trace.graph not in followed:
            yield f"{here}: expected traces that follow one another in turn, got {followed}"
        elif not steps[trace.graph]:
            yield f"{here}: expected null, as the trace has no steps, got {before}"


def machine_faults(hardware: Hardware, path: str) -> Iterator[str]:
    for fault in _figure_faults(hardware):
        yield f"{path}.{fault}"


def check_machine(hardware: Hardware) -> None:
    """Raise PlanError for a machine with an impossible figure."""
    for fault in _figure_faults(hardware):
        raise PlanError(
            f"nothing can be planned for the hardware {hardware.name!r}: {fault}; "
            "give its figures, or measure it (hardware='auto')"
        )


def _figure_faults(hardware: Hardware) -> Iterator[str]:
    for name in _WHOLE:
        value = getattr(hardware, name)
        if value is None and name == "memory_nbytes":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            yield f"{name}: expected a whole number, got {value!r}"
        elif value < 0:
            yield f"{name}: expected 0 or more, got {value}"
    for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", *_UNKNOWN):
        rate = getattr(hardware, name)
        if rate is None and name in _UNKNOWN:
            continue
        if not (rate > 0 and math.isfinite(rate)):
            yield f"{name}: expected a rate above 0 and finite, got {rate}"


def plan_faults(plan: Decisions, path: str, storages: int) -> Iterator[str]:
    """Yield the faults in the form of a plan; whether the plan is safe, `verify/` decides."""
    yield from size_faults(plan.budget, f"{path}.budget")
    yield from size_faults(plan.arena_bytes, f"{path}.arena_bytes")
    yield from size_faults(plan.arena.granule, f"{path}.arena.granule", 1)
    yield from machine_faults(plan.hardware, f"{path}.hardware")
    addresses = storages if plan.arena.kind == "contiguous" else 0
    for name, values, expected in (
        ("arena.layout", plan.arena.layout, storages),
        ("addresses", plan.addresses, addresses),
    ):
        if len(values) != expected:
            yield f"{path}.{name}: expected {expected} offsets, got {len(values)}"
        for i, value in enumerate(values):
            yield from size_faults(value, f"{path}.{name}[{i}]", -1)
    for name, known in (("names", plan.names), ("sizes", plan.sizes)):
        if len(known) not in (0, storages):
            yield f"{path}.{name}: expected one for each of {storages} storages or none, got {len(known)}"
    for i, nbytes in enumerate(plan.sizes):
        yield from size_faults(nbytes, f"{path}.sizes[{i}]")
    for i, s in enumerate(plan.outside):
        yield from range_faults(s, 0, storages - 1, f"{path}.outside[{i}]")
    for i, trace in enumerate(plan.traces):
        yield from trace_faults(trace, f"{path}.traces[{i}]", storages)
    yield from turn_faults(plan.traces, f"{path}.traces")
    yield from repeat_faults((t.graph for t in plan.traces), f"{path}.traces", "a graph number")
    yield from repeat_faults((s.graph for s in plan.schedules), f"{path}.schedules", "a graph number")
    yield from _ranges(plan, path)
    if plan.pool is not None:
        yield from _pool_faults(plan.pool, f"{path}.pool", storages, len(plan.traces))


def _pool_faults(pool: Pool, path: str, storages: int, traces: int) -> Iterator[str]:
    yield from size_faults(pool.nbytes, f"{path}.nbytes", 1)
    yield from size_faults(pool.granule, f"{path}.granule", 1)
    if len(pool.layout) != storages:
        yield f"{path}.layout: expected {storages} offsets, got {len(pool.layout)}"
    for i, offset in enumerate(pool.layout):
        yield from size_faults(offset, f"{path}.layout[{i}]", -1)
    if not pool.storages:
        yield f"{path}.layout: expected the place of one storage or more, got none"
    if not len(pool.expected_ns) == len(pool.worst_ns) in (0, traces):
        yield (
            f"{path}: expected a time of both kinds for each of {traces} traces or none, got "
            f"{len(pool.expected_ns)} and {len(pool.worst_ns)}"
        )
    for i, (expected, worst) in enumerate(zip(pool.expected_ns, pool.worst_ns, strict=False)):
        yield from range_faults(worst, 0, _LONGEST, f"{path}.worst_ns[{i}]")
        yield from range_faults(expected, 0, worst, f"{path}.expected_ns[{i}]")


def _ranges(plan: Decisions, path: str) -> Iterator[str]:
    ranges: list[tuple[str, Sequence[Range | Transfer | Drop]]] = [
        ("arena.segments", plan.arena.segments),
        ("resident", plan.resident),
        ("boundary", plan.boundary),
    ]
    for i, schedule in enumerate(plan.schedules):
        here = f"{path}.schedules[{i}]"
        yield from negative_faults(here, predicted_ns=schedule.predicted_ns)
        yield from size_faults(schedule.staging_bytes, f"{here}.staging_bytes")
        for j, nbytes in enumerate(schedule.staged):
            yield from size_faults(nbytes, f"{here}.staged[{j}]")
        bound = schedule.lower_bound_ns or 0
        yield from range_faults(bound, 0, schedule.predicted_ns, f"{path}.schedules[{i}].lower_bound_ns")
        ranges += [
            (f"schedules[{i}].transfers", schedule.transfers),
            (f"schedules[{i}].drops", schedule.drops),
            (f"schedules[{i}].boundary", schedule.boundary or ()),
        ]
    if plan.host is not None:
        yield from size_faults(plan.host.nbytes, f"{path}.host.nbytes")
        ranges.append(("host.resident", plan.host.resident))
        if plan.hardware.disk_bytes_per_s is None:
            yield f"{path}.hardware.disk_bytes_per_s: expected the rate of the disk behind the host"
    for name, items in ranges:
        for i, piece in enumerate(items):
            yield from size_faults(piece.start, f"{path}.{name}[{i}].start")
            yield from range_faults(piece.stop, piece.start + 1, LARGEST_SIZE, f"{path}.{name}[{i}].stop")

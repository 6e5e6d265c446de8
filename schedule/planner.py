"""Facts in, plan out: what is on the device when, within a budget of bytes.

The budget pays for the storages outside the arena and for the arena. Candidates come from a fixed
family of residencies (paged) or placements (contiguous), each is timed on the exact event graph, and
the one with the shortest period wins. A larger budget widens the choice, but it also moves copies, which
can cost more than it saves where single storages count for much: so small problems are planned on lower
rungs of a fixed ladder of budgets too, and keep what is fastest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock.schedule.bound.period import relax, tier_of, usable_bytes
from penstock.schedule.bound.relaxation import Tier
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Decisions
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Arena, Hardware, Plan, Schedule, Storage, Trace, Wrap
from penstock.schedule.facts.problems import facts_problems
from penstock.schedule.host import with_host
from penstock.schedule.search import contiguous, paged
from penstock.schedule.space import addresses
from penstock.schedule.space.layout import first_uses
from penstock.schedule.space.spans import Group, Reads, read_runs, span_groups

RUNGS = 12
"""Rungs of the ladder of budgets, from the floor to that at which nothing streams."""

_SMALL = 32
"""Reads, at most, of a problem that is planned on lower rungs; larger ones are smooth, and slow to plan."""


@dataclass(frozen=True)
class Floor:
    """The smallest budget: no plan exists below `lower_bytes`, one is found from `upper_bytes` on.

    `step` names the step that sets it (empty where nothing is streamed), `reads` the storages that
    have to be in memory then, those outside the arena not counted.
    """

    lower_bytes: int
    upper_bytes: int
    step: str
    reads: tuple[int, ...]


def floor(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    keep: Collection[int] = frozenset(),
) -> Floor:
    """The floor for this kind of arena; `make_plan` accepts `upper_bytes` and not one byte less."""
    outside = sum(storages[s].nbytes for s in _outside(storages))
    everything = sum(storages[s].nbytes for s in first_uses(storages, traces))
    need = addresses.need if arena.kind == "contiguous" else paged.need
    lower, upper, which, k = need(storages, traces, arena, keep)
    if k is None:
        return Floor(outside, outside, "", ())
    step = traces[which].steps[k]
    reads = tuple(s for s in step.reads if arena.layout[s] >= 0 and storages[s].nbytes > 0)
    lower, upper = min(lower, everything), min(upper, everything)
    return Floor(outside + lower, outside + upper, step.name, reads)


def make_plan(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    budget: int,
    hardware: Hardware,
    keep: Collection[int] = frozenset(),
    wrap: Wrap = "overlap",
    names: Sequence[str] | None = None,
    host_memory: int | None = None,
    effort: float = 1.0,
) -> Plan:
    """The fastest plan found within `budget` bytes; `keep` lists storages that never leave.

    When all that is read fits, everything is held outside the arena and nothing moves. `names[s]` is what
    messages call storage s. What `host_memory` bytes of a host cannot hold of the rest comes from its disk.
    `effort` is the share of the usual search: a plan for one run need not be the best.

    Raises:
        BudgetError: the budget is below the floor, which the error names with its step and weights.
        PlanError: `hardware` has a rate that is not above 0 and finite, a negative size, or no disk; a
            time, size or read of the facts cannot be.
    """
    hardware.check()
    for problem in facts_problems(storages, traces):
        raise PlanError(f"nothing can be planned: {problem}")
    outside = _outside(storages)
    streamed = first_uses(storages, traces)
    cap = budget - sum(storages[s].nbytes for s in outside)
    if sum(storages[s].nbytes for s in streamed) <= cap:
        outside = tuple(sorted((*outside, *streamed)))
        found, schedules = _nothing_streamed(storages, traces, arena, hardware, wrap=wrap)
    else:
        _check_floor(storages, traces, arena, budget=budget, keep=keep, names=names)
        tiers = _Tiers(hardware, host_memory)
        found, schedules = _fastest(
            storages, traces, arena, cap=cap, tiers=tiers, keep=keep, wrap=wrap, effort=effort
        )
    plan = Plan(
        budget=budget,
        arena=arena,
        arena_bytes=found.arena_bytes,
        outside=outside,
        addresses=found.addresses,
        resident=found.resident,
        boundary=found.boundary,
        wrap=wrap,
        schedules=schedules,
        traces=tuple(traces),
        hardware=hardware,
        names=tuple(names or ()),
        sizes=tuple(storage.nbytes for storage in storages),
    )
    return plan if host_memory is None else with_host(plan, host_memory)


@dataclass(frozen=True)
class _Tiers:
    """The machine, and what its host may hold of the weights (None: all)."""

    hardware: Hardware
    host_memory: int | None

    def behind(self, device: Tier, cap: int) -> tuple[Tier, ...]:
        """The device's tier, and the host's where it is limited."""
        rate = self.hardware.disk_bytes_per_s
        if self.host_memory is None or rate is None:
            return (device,)
        return device, Tier(cap + self.host_memory, 1e9 / rate, self.hardware.disk_latency_ns)


def _fastest(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    cap: int,
    tiers: _Tiers,
    keep: Collection[int],
    wrap: Wrap,
    effort: float,
) -> tuple[Decisions, tuple[Schedule, ...]]:
    """The fastest decisions for `cap` bytes of arena and for the rungs below that can still be faster."""
    hardware = tiers.hardware
    search = contiguous.search if arena.kind == "contiguous" else paged.search
    groups = _relaxed_groups(storages, traces, arena, keep)
    granule = arena.granule if arena.kind == "paged" else 1
    best: tuple[Decisions, tuple[Schedule, ...]] | None = None
    bounds: tuple[int | None, ...] = ()
    for rung in (cap, *_rungs_below(cap, storages, traces, arena, keep)):
        if best and _least_ns(storages, traces, rung, hardware) >= _total_ns(best[1]):
            break
        device = tier_of(usable_bytes(groups, granule, rung), hardware, granule)
        device = _device(storages, traces, arena, keep=keep, groups=groups, tier=device)
        shapes = tiers.behind(device, rung)
        relaxed = [relax(groups, trace, shapes, wrap, which=which) for which, trace in enumerate(traces)]
        bounds = bounds or tuple(one.bound_ns if one else None for one in relaxed)
        found = search(
            storages,
            traces,
            arena,
            cap=rung,
            hardware=hardware,
            keep=keep,
            wrap=wrap,
            relaxed=relaxed,
            effort=effort,
        )
        schedules = _timed(traces, found, hardware, wrap)
        if best is None or _total_ns(schedules) < _total_ns(best[1]):
            best = found, schedules
    assert best is not None
    return best[0], tuple(
        replace(schedule, lower_bound_ns=bound) for schedule, bound in zip(best[1], bounds, strict=True)
    )


def _relaxed_groups(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[Group, ...]:
    """What is copied together: in a contiguous arena bytes of storages, in a paged one whole granules."""
    if arena.kind == "contiguous":
        arena = replace(arena, granule=1)
    return span_groups(read_runs(storages, traces, arena, keep=keep), arena.granule)


def _device(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    keep: Collection[int],
    groups: Sequence[Group],
    tier: Tier,
) -> Tier:
    """The device's tier with what fixed addresses mean for one trace: more copies, of a storage each."""
    if arena.kind == "paged" or len(traces) > 1:
        return tier
    blocks = addresses.blocks_of(storages, traces, arena, keep)
    largest: dict[Reads, int] = {}
    for block in blocks:
        largest[block.reads] = max(largest.get(block.reads, 1), block.range.nbytes)
    most = {g: largest[group.reads] for g, group in enumerate(groups)}
    return replace(tier, least_copied=addresses.least_copied(blocks, tier.nbytes), most_at_once=most)


def _rungs_below(
    cap: int, storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> list[int]:
    if sum(len(step.reads) for trace in traces for step in trace.steps) > _SMALL:
        return []
    outside = sum(storages[s].nbytes for s in _outside(storages))
    lowest = floor(storages, traces, arena, keep=keep).upper_bytes - outside
    highest = sum(storages[s].nbytes for s in first_uses(storages, traces))
    rungs = {lowest + (highest - lowest) * number // RUNGS for number in range(RUNGS)}
    return sorted((rung for rung in rungs if rung < cap), reverse=True)


def _least_ns(storages: Sequence[Storage], traces: Sequence[Trace], cap: int, hardware: Hardware) -> int:
    """No plan takes less time: what does not fit into `cap` bytes is copied in every pass."""
    total = 0
    for trace in traces:
        copied = sum(storages[s].nbytes for s in {s for step in trace.steps for s in step.reads}) - cap
        total += max(trace.compute_ns, hardware.copy_ns(copied) if copied > 0 else 0)
    return total


def _timed(traces: Sequence[Trace], found: Decisions, hardware: Hardware, wrap: Wrap) -> tuple[Schedule, ...]:
    """The schedules of some decisions with their steady periods."""
    schedules = []
    boundaries = found.boundaries or (None,) * len(traces)
    for trace, (transfers, drops), boundary in zip(traces, found.streams, boundaries, strict=True):
        schedule = Schedule(trace.graph, transfers, drops, 0, boundary=boundary)
        schedules.append(replace(schedule, predicted_ns=steady_period_ns(trace, schedule, hardware, wrap)))
    return tuple(schedules)


def _total_ns(schedules: Sequence[Schedule]) -> int:
    return sum(schedule.predicted_ns for schedule in schedules)


def _outside(storages: Sequence[Storage]) -> tuple[int, ...]:
    """The storages that are never in the arena, whoever reads them."""
    return tuple(s for s, storage in enumerate(storages) if storage.kind != "streamable")


def _check_floor(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    budget: int,
    keep: Collection[int],
    names: Sequence[str] | None,
) -> None:
    lowest = floor(storages, traces, arena, keep=keep)
    if budget >= lowest.upper_bytes:
        return
    called = [names[s] if names else f"storage {s}" for s in lowest.reads]
    problem = f"the budget of {budget} bytes is below the floor of {lowest.upper_bytes}"
    kept = [names[s] if names else f"storage {s}" for s in sorted(keep)]
    if kept:
        without = floor(storages, traces, arena).upper_bytes
        problem += f", of which keeping {', '.join(kept)} in memory takes {lowest.upper_bytes - without}"
    raise BudgetError(
        f"{problem}: step {lowest.step!r} needs {', '.join(called)} at once; "
        f"give at least {lowest.upper_bytes} bytes{' or keep fewer weights' if kept else ''}",
        floor_bytes=lowest.upper_bytes,
        step=lowest.step,
        weights=tuple(called) if names else (),
    )


def _nothing_streamed(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    hardware: Hardware,
    *,
    wrap: Wrap,
) -> tuple[Decisions, tuple[Schedule, ...]]:
    """No copies, and passes that take as long as their compute."""
    places = (-1,) * len(storages) if arena.kind == "contiguous" else ()
    found = Decisions(0, places, (), (), tuple(((), ()) for _ in traces))
    timed = _timed(traces, found, hardware, wrap)
    bounds = [trace.compute_ns for trace in traces]
    return found, tuple(replace(one, lower_bound_ns=ns) for one, ns in zip(timed, bounds, strict=True))

"""Facts in, plan out: what is on the device when, within a budget of bytes.

The budget pays for the storages outside the arena and for the arena. Candidates come from a fixed
family of residencies (paged) or placements (contiguous), each is timed on the exact event graph, and
the one with the shortest period wins; that a larger budget only widens the choice is what keeps it
from being slower.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.schedule import addresses, contiguous, paged
from penstock.schedule.errors import BudgetError
from penstock.schedule.layout import first_uses
from penstock.schedule.model import Arena, Hardware, Plan, Schedule, Storage, Trace, Wrap
from penstock.schedule.timeline import steady_period_ns
from penstock.schedule.transfers import Decisions


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
) -> Plan:
    """The fastest plan found within `budget` bytes; `keep` lists storages that never leave.

    When all that is read fits, everything is held outside the arena and nothing moves. `names[s]`
    is what messages call storage s.

    Raises:
        BudgetError: the budget is below the floor, which the error names with its step and weights.
    """
    outside = _outside(storages)
    streamed = first_uses(storages, traces)
    cap = budget - sum(storages[s].nbytes for s in outside)
    if sum(storages[s].nbytes for s in streamed) <= cap:
        found = _nothing_streamed(storages, traces, arena)
        outside = tuple(sorted((*outside, *streamed)))
    else:
        _check_floor(storages, traces, arena, budget=budget, keep=keep, names=names)
        search = contiguous.search if arena.kind == "contiguous" else paged.search
        found = search(storages, traces, arena, cap=cap, hardware=hardware, keep=keep, wrap=wrap)
    schedules = []
    for trace, (transfers, drops) in zip(traces, found.streams, strict=True):
        schedule = Schedule(trace.graph, transfers, drops, 0)
        period = steady_period_ns(trace, schedule, hardware, wrap)
        schedules.append(Schedule(trace.graph, transfers, drops, period))
    return Plan(
        budget=budget,
        arena=arena,
        arena_bytes=found.arena_bytes,
        outside=outside,
        addresses=found.addresses,
        resident=found.resident,
        boundary=found.boundary,
        wrap=wrap,
        schedules=tuple(schedules),
        traces=tuple(traces),
        hardware=hardware,
    )


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


def _nothing_streamed(storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena) -> Decisions:
    places = (-1,) * len(storages) if arena.kind == "contiguous" else ()
    return Decisions(0, places, (), (), tuple(((), ()) for _ in traces))

"""Recorded calls on the clock: what each of them moves within a plan, and how long it takes.

A call moves the transfers of its plan and the units that it misses, which the policy of the pool decides as
it does in a run. Both are events of one graph (`clock/units.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

from penstock.schedule.clock.event_graph import simulate, stalls_of
from penstock.schedule.clock.launches import launched_steps
from penstock.schedule.clock.units import UnitCopy
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions
from penstock.schedule.sparse.division import Missed
from penstock.schedule.sparse.replay import Driven, Moved
from penstock.schedule.sparse.residency import Change, Residency, Unit
from penstock.schedule.sparse.routes import Ask, Profile, Route, served_profile


@dataclass(frozen=True)
class Call:
    """A call: its number among the recorded ones, the units that it asks for, and those that it misses.

    `missed` has the bytes that are read for units, and `copied_bytes` are those of the plan's transfers.
    `rounds` are the parts in which its reads run, where a read that does not fit into the pool has several.
    `stall_ns` of its `total_ns` nanoseconds it waits.
    """

    number: int
    method: str
    asked: Moved
    missed: Moved
    copied_bytes: int
    rounds: int
    stall_ns: int
    total_ns: int


def simulated_calls(plan: Decisions, profile: Profile) -> tuple[Call, ...]:
    """The recorded calls, one after another, from a cold start on, with an empty pool.

    A call of another method than the one before it begins as cold as the first one, but for the pool. A call
    that asked for nothing is left out, since nobody knows what it was a call of.

    Raises:
        PlanError: the plan has no pool, or is of methods whose calls come in turn.
        PayloadError: the pool serves reads of which the routes tell nothing.
    """
    if plan.pool is None:
        raise PlanError(
            f"the plan within {plan.budget} bytes reads all weights whole, so routes change nothing: give a "
            "smaller budget"
        )
    if any(trace.follows is not None for trace in plan.traces):
        raise PlanError("routes are simulated for calls of one method at a time, and this program is trained")
    driven_by = served_profile(profile, plan.traces, plan.pool, plan.names)
    reads, driven = driven_by.routes.reads, Driven(driven_by, plan.pool)
    changes = driven.changes(Residency(plan.pool, driven_by.traces), ahead=True)
    numbered = zip(count(), driven_by.routes.calls, changes, strict=False)
    calls: list[Call] = []
    for graph, some in groupby(
        (numbered_call for numbered_call in numbered if numbered_call[1]),
        lambda numbered_call: reads[numbered_call[1][0].read].graph,
    ):
        calls += _in_a_row(plan, driven, graph, list(some))
    return tuple(calls)


_Changes = list[tuple[Ask, list[int], Change]]
_Made = tuple[int, Route, _Changes]


def _in_a_row(plan: Decisions, driven: Driven, graph: int, calls: Sequence[_Made]) -> Iterator[Call]:
    """Calls of one method, the first of which is cold."""
    index = next(k for k, trace in enumerate(plan.traces) if trace.graph == graph)
    trace, schedule = plan.traces[index], plan.schedules[index]
    copies = [tuple(_copies(plan, driven, changes)) for *_, changes in calls]
    facts = (trace, schedule, plan.hardware, plan.wrap)
    times = simulate(*facts, len(calls) + 1, launched=launched_steps(plan, index), units=copies)
    for (number, call, changes), now, behind in zip(calls, times, times[1:], strict=False):
        missed = [driven.moved_by(change, [*change.bring, *change.ahead]) for _, _, change in changes]
        yield Call(
            number,
            trace.method,
            driven.asked_by(call),
            Moved(sum(moved.units for moved in missed), sum(moved.nbytes for moved in missed)),
            schedule.moved_bytes("in"),
            len(changes),
            sum(stalls_of(trace, now)),
            behind.call_start - now.call_start,
        )


def _copies(plan: Decisions, driven: Driven, changes: _Changes) -> Iterator[UnitCopy]:
    """The copies of units of one call: what a part needs, and behind it what is brought ahead of need."""
    copies: list[tuple[int, int, set[int]]] = []  # the step that asks, nanoseconds, and the steps that wait
    coming: dict[Unit, int] = {}
    edges: dict[int, int] = {}  # granules that another unit may share, and the copy that brings them
    for ask, part, change in changes:
        step, storage = driven.read(ask)
        for units in (change.bring, change.ahead):
            moved = driven.moved_by(change, units)
            if not moved.nbytes:
                continue
            for unit in units:
                first, stop = change.granules[unit]
                coming[unit] = len(copies)
                edges |= dict.fromkeys((first, stop - 1) if first < stop else (), len(copies))
            copies.append((step, Missed(moved.units, moved.nbytes).ns(plan.hardware), set()))
        for number in part:
            first, stop = driven.granules((storage, number))
            needed = {edges.get(first), edges.get(stop - 1), coming.get((storage, number))}
            for copy in needed:
                if copy is not None:
                    copies[copy][2].add(step)
    return (UnitCopy(step, ns, tuple(sorted(waits))) for step, ns, waits in copies)

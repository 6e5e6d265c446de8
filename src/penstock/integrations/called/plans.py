"""Plans for the orders of a module's calls, and what a plan does with the weights of each module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.integrations.called.by_units.units import UnitReads
from penstock.integrations.called.facts import NO_FOLDER, Order
from penstock.integrations.called.measuring import CallSizes
from penstock.integrations.called.readers import StepWeights
from penstock.runtime.choice import PlanRequest, decide_to_load
from penstock.runtime.loading import LoadOptions
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.model import SparseRead
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan


@dataclass(frozen=True)
class Residency:
    """What a plan does with the weights that a module reads.

    Attributes:
        module: The path of the module.
        nbytes: Bytes of these weights.
        how: `"stays"` in memory, `"streams"`, comes `"by units"`, or is `"read at once"` by each operator
            that asks for it.
        why: The reason, in words.
    """

    module: str
    nbytes: int
    how: str
    why: str


@dataclass(frozen=True)
class PlannedOrders:
    """A plan for all orders of a module.

    Attributes:
        payload: What was planned.
        plan: The plan.
        traced: The orders as the plan has them.
        seen: The orders as passes of the plan show them.
        left_out: By order and path, the storages that operators read in place of the module's step.
    """

    payload: Payload
    plan: Plan
    traced: list[Order]
    seen: list[Order]
    left_out: list[dict[str, set[int]]]


def plan_calls(
    orders: Sequence[Order],
    options: LoadOptions,
    steps: StepWeights,
    units: UnitReads,
    *,
    sizes: CallSizes,
    memory: int,
    room: int,
    too_little: Callable[[int, int], BudgetError],
) -> tuple[PlannedOrders, int]:
    """Plan all orders within `room` bytes of `memory`; returned with the plan are the bytes that calls have.

    Raises what `too_little` makes of the least bytes of weights and those that calls take, if there is no
    room for both.
    """
    storages, beside, calls = steps.facts.storages, sizes.beside, sizes.room(memory)
    staying = sum(storages[s].nbytes for s in steps.learned.resident)
    plan = functools.partial(plan_orders, orders, options, steps, units, beside=beside)
    try:
        return plan(budget=max(1, min(steps.facts.nbytes, room - calls) - staying)), calls
    except BudgetError as error:
        floor = error.floor_bytes or 0
        if floor + staying + beside > room:
            raise too_little(floor + staying, beside) from error
        return plan(budget=floor), room - floor - staying


def plan_orders(
    orders: Sequence[Order],
    options: LoadOptions,
    steps: StepWeights,
    units: UnitReads,
    *,
    budget: int,
    beside: int,
) -> PlannedOrders:
    """Plan all orders within a budget; calls take `beside` bytes beside it.

    If the plan cannot read some storages by units, the steps of modules read these whole in the next try.
    """
    merged: set[tuple[int, str, int]] = set()
    if budget >= steps.facts.nbytes:
        merged |= {(g, *one) for g, order in enumerate(orders) for one in order.by_units()}
    while True:
        planned = _plan_merged(orders, steps, units, merged, options=options, budget=budget, beside=beside)
        plan = planned.plan
        unserved = {
            (graph, order.owners[k], read.storage)
            for graph, order in enumerate(planned.traced)
            for k, step in enumerate(planned.payload.traces[graph].steps)
            for read in step.sparse
            if plan.pool is None or not plan.pool.has(read)
            if steps.is_read_by(order.owners[k], read.storage)
        }
        if not unserved:
            away = functools.partial(units.keeps, merged=(), resident=set(plan.outside))
            planned.seen[:] = [order.reduced(away) for order in planned.seen]
            return planned
        merged |= unserved


def _plan_merged(
    orders: Sequence[Order],
    steps: StepWeights,
    units: UnitReads,
    merged: set[tuple[int, str, int]],
    *,
    options: LoadOptions,
    budget: int,
    beside: int,
) -> PlannedOrders:
    """Plan all orders; the steps of modules read whole what `merged` has: order, path and storage."""
    readers, small = steps.readers, steps.learned.small
    reads: list[dict[str, tuple[int, ...]]] = []
    traced: list[Order] = []
    seen: list[Order] = []
    left_out: list[dict[str, set[int]]] = []
    for graph, order in enumerate(orders):
        joined = {(path, s) for g, path, s in merged if g == graph}
        out = {
            path: units.left_out(path, storages, joined) | (small & set(storages))
            for path, storages in readers.storages.items()
        }
        reads.append(
            {
                path: tuple(s for s in storages if s not in out[path])
                for path, storages in readers.storages.items()
            }
        )
        own = order.reduced(functools.partial(units.keeps, merged=joined, resident=steps.resident))
        seen.append(own)
        traced.append(own.reduced(functools.partial(_has_reads, reads[-1])))
        left_out.append({path: storages for path, storages in out.items() if storages})
    payload = steps.facts.payload(traced, reads, readers.resident | small)
    by_units = any(order.by_units() for order in traced)
    request = PlanRequest(
        budget,
        device=options.device,
        arena=options.arena,
        by_units=by_units,
        # Kernels of other devices run long after the host has called them: their times are modelled.
        traces=payload.traces if options.device == "cpu" else (),
    )
    plan = decide_to_load(NO_FOLDER, payload, request, beside)
    return PlannedOrders(payload, plan, traced, seen, left_out)


def _has_reads(reads: Mapping[str, tuple[int, ...]], path: str, read: SparseRead | int | None) -> bool:
    return read is not None or bool(reads.get(path))


def residency_of(plan: Plan, steps: StepWeights, name: str) -> tuple[Residency, ...]:
    """Return what a plan does with the weights of each module; the model itself is called `name`."""
    layout, storages = plan.arena.layout, steps.facts.storages
    moved = [(one.start, one.stop) for schedule in plan.schedules for one in schedule.transfers]
    pooled = set(plan.pool.storages) if plan.pool is not None else set[int]()
    twins = {fqn: twin for twin, fqn in steps.places.names.items()}

    def of(module: str, fqns: Sequence[str]) -> Residency:
        own = set[int]().union(*(steps.storages_of(twins[fqn]) for fqn in fqns if fqn in twins))
        nbytes = sum(storages[s].nbytes for s in own)
        if own <= steps.learned.resident:
            return Residency(module, nbytes, "stays", "calls write it, or keep views of it")
        streams = any(
            start < layout[s] + storages[s].nbytes and layout[s] < stop
            for s in own
            for start, stop in moved
            if layout[s] >= 0
        )
        if own & pooled:
            return Residency(module, nbytes, "by units", "calls read some of it")
        if streams:
            return Residency(module, nbytes, "streams", "there is no room for all weights")
        return Residency(module, nbytes, "stays", "there is room for it")

    return tuple(of(path or name, fqns) for path, fqns in steps.readers.fqns.items())

"""Plans for the orders of a module's calls, and what a plan does with the weights of each module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.integrations.called.by_units.units import UnitReads
from penstock.integrations.called.facts import NO_FOLDER, Order
from penstock.integrations.called.measuring import CallSizes
from penstock.integrations.called.readers import StepWeights
from penstock.runtime.loading import LoadOptions
from penstock.runtime.planning import PlanRequest, decide_to_load
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.report.verdict import slow_launches


@dataclass(frozen=True)
class Residency:
    """What a plan does with the weights that a module reads.

    Attributes:
        module: The path of the module.
        nbytes: Bytes of these weights.
        how: `"stays"` in memory, `"streams"`, or comes `"by units"`.
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
    merged: set[tuple[int, str, int]] = set()  # what steps read whole: order, path and storage
    if budget >= steps.facts.nbytes:
        merged |= {(graph, *pair) for graph, order in enumerate(orders) for pair in order.by_units()}
    while True:
        parts = [
            _traced(order, steps, units, {(path, s) for g, path, s in merged if g == graph})
            for graph, order in enumerate(orders)
        ]
        traced = [part.order for part in parts]
        resident = steps.readers.resident | steps.learned.small
        payload = steps.facts.payload(traced, [part.reads for part in parts], resident)
        request = PlanRequest(
            budget,
            device=options.device,
            arena=options.arena,
            by_units=any(order.by_units() for order in traced),
            # Kernels of other devices run long after the host has called them: their times are modelled.
            traces=payload.traces if options.device == "cpu" else (),
        )
        plan = decide_to_load(NO_FOLDER, payload, request, beside)
        unserved = {
            (graph, order.owners[k], read.storage)
            for graph, order in enumerate(traced)
            for k, step in enumerate(payload.traces[graph].steps)
            for read in step.sparse
            if plan.pool is None or not plan.pool.has(read)
            if steps.is_read_by(order.owners[k], read.storage)
        }
        if not unserved:
            away = functools.partial(units.keeps, merged=(), resident=set(plan.outside))
            seen = [part.seen.reduced(away) for part in parts]
            return PlannedOrders(payload, plan, traced, seen, [part.left_out for part in parts])
        merged |= unserved


class _Traced(NamedTuple):
    """An order as a plan has it, and as passes show it; by path, what steps read, and what operators do."""

    order: Order
    seen: Order
    reads: dict[str, tuple[int, ...]]
    left_out: dict[str, set[int]]


def _traced(order: Order, steps: StepWeights, units: UnitReads, merged: set[tuple[str, int]]) -> _Traced:
    reads: dict[str, tuple[int, ...]] = {}
    left_out: dict[str, set[int]] = {}
    for path, storages in steps.readers.storages.items():
        if out := units.left_out(path, storages, merged) | (steps.learned.small & set(storages)):
            left_out[path] = out
        reads[path] = tuple(s for s in storages if s not in out)
    seen = order.reduced(functools.partial(units.keeps, merged=merged, resident=steps.resident))
    return _Traced(
        seen.reduced(lambda path, read: read is not None or bool(reads.get(path))), seen, reads, left_out
    )


def advice_on(plan: Plan) -> str:
    """Say that the calling thread is a plan's limit, and what would help; empty if it is not."""
    limit = slow_launches(plan)
    helps = "larger batches help, and penstock.compile, whose programs can be captured and replayed as graphs"
    return f"; {limit}: {helps}" if limit else ""


def residency_of(plan: Plan, steps: StepWeights, name: str) -> tuple[Residency, ...]:
    """Return what a plan does with the weights of each module; the model itself is called `name`."""
    layout, storages = plan.arena.layout, steps.facts.storages
    moved = [
        (transfer.start, transfer.stop) for schedule in plan.schedules for transfer in schedule.transfers
    ]
    pooled = set(plan.pool.storages) if plan.pool is not None else set[int]()
    twins = {fqn: twin for twin, fqn in steps.places.names.items()}

    def of(module: str, fqns: Sequence[str]) -> Residency:
        own_storages = set[int]().union(*(steps.storages_of(twins[fqn]) for fqn in fqns if fqn in twins))
        nbytes = sum(storages[s].nbytes for s in own_storages)
        if own_storages <= steps.learned.resident:
            return Residency(module, nbytes, "stays", "calls write it, or keep views of it")
        streams = any(
            start < layout[s] + storages[s].nbytes and layout[s] < stop
            for s in own_storages
            for start, stop in moved
            if layout[s] >= 0
        )
        if own_storages & pooled:
            return Residency(module, nbytes, "by units", "calls read some of it")
        if streams:
            return Residency(module, nbytes, "streams", "there is no room for all weights")
        return Residency(module, nbytes, "stays", "there is room for it")

    return tuple(of(path or name, fqns) for path, fqns in steps.readers.fqns.items())

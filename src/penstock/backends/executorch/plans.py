"""The ladder of plans that a `.pte` carries: arenas that reads fill, for where no planner is."""

from __future__ import annotations

from penstock.backends.executorch.options import Settings
from penstock.schedule.facts.model import Arena
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan, ladder
from penstock.schedule.planner import Floor, check_floor, floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import merged
from penstock.schedule.verify.proof import verify_plan

BLOCK = 4096
"""Bytes that named data in a `.ptd` is aligned to, and the unit of direct reads."""


def arena(payload: Payload) -> Arena:
    """The arena, in which a storage lies as its bytes in the `.ptd` do."""
    return packed_arena(payload.storages, payload.traces, kind="contiguous", granule=BLOCK, alignment=BLOCK)


def floor_of(payload: Payload, keep: frozenset[int] = frozenset()) -> Floor:
    """The least budget, and what needs it."""
    return floor(_demand(payload, keep))


def kept_by_all(payload: Payload) -> frozenset[int]:
    """The storages that no plan of a payload lets leave memory: those that its export was asked to keep.

    At the floor there may be others, for which there is room in its arena all the same.
    """
    staying = {
        s for s, storage in enumerate(payload.storages) if payload.plans and storage.kind == "streamable"
    }
    for plan in payload.plans:
        resident = merged(plan.resident)
        for s in staying - set(plan.outside):
            start, nbytes = plan.arena.layout[s], payload.storages[s].nbytes
            if not any(piece.start <= start and start + nbytes <= piece.stop for piece in resident):
                staying.discard(s)
    return frozenset(staying)


def make_plans(
    payload: Payload, keep: frozenset[int], settings: Settings
) -> tuple[tuple[Plan, ...], int | None]:
    """The ascending plans, and the bytes of the budget asked for. Raises BudgetError below the floor."""
    total = sum(storage.nbytes for storage in payload.storages)
    made: dict[int, Plan] = {}

    def make(budget: int) -> Plan:
        if budget not in made:
            made[budget] = _make(payload, keep, budget, settings)
        return made[budget]

    plans = ladder(make, max(1, floor_of(payload, keep).upper_bytes), max(1, total))
    if not settings.budget:
        return plans, None
    budget = parse_size(settings.budget, total=max(total, 100))
    check_floor(_demand(payload, keep), budget, payload.storage_names())
    asked = make(min(budget, max(1, total)))
    return tuple(sorted({*plans, asked}, key=lambda plan: plan.budget)), budget


def _demand(payload: Payload, keep: frozenset[int]) -> Demand:
    return Demand(payload.storages, payload.traces, arena(payload), keep)


def _make(payload: Payload, keep: frozenset[int], budget: int, settings: Settings) -> Plan:
    problem = Problem(payload.storages, payload.traces, arena(payload), keep, hardware=settings.hardware)
    plan = make_plan(problem, budget, names=payload.storage_names())
    verify_plan(payload.storages, payload.traces, plan)
    return plan

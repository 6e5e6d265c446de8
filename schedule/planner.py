"""Facts in, plan out: which bytes are on the device when, within a budget of bytes.

The budget pays for the storages outside the arena and for the arena. The search for the arena's kind proposes
decisions. Each is timed on the exact event graph, and the one with the shortest period wins. A larger budget
allows more choices, but the search may still find a slower plan for it, since copies move and a single
storage may count for much. Small problems are therefore also planned for the lower budgets of a fixed ladder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.schedule.bound.gaps import needed_bytes
from penstock.schedule.bound.relaxation import Relaxation, Tier, pass_ns, relax, tier_of, usable_bytes
from penstock.schedule.clock.turns import divided, joined, joined_traces, splits_of
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Pool, Schedule, Trace
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.facts.validity import check_machine, facts_faults
from penstock.schedule.host import with_host
from penstock.schedule.plan import Plan
from penstock.schedule.search import contiguous, paged
from penstock.schedule.search.climbing import climb
from penstock.schedule.search.draft import Draft, Task
from penstock.schedule.space.addresses import tight
from penstock.schedule.space.spans import Pieces

_D = TypeVar("_D", bound=Demand)

RUNGS = 12
"""The number of rungs of the ladder of budgets, which begins at the floor and ends where nothing streams."""

_LATE, _CARE = 4, 1.01
"""A plan that waits where bytes begin to flow `_LATE` times later than on average is searched for again.

The other plan is taken if it takes at most `_CARE` times as long. Beside computing some answers are much
later than most. On an emulated link of 2.2 GB/s that is never late itself, 512 products of 0.6 ms took 0.452
s with copies two steps ahead, which the average asks for, and 0.433 s with copies four or five steps ahead
(benchmarks/disk/depth.py of commit bc62d93e).
"""

_AT_BOUND, _NEAR, _AGAIN = 1.0001, 1.01, 0.25
"""A plan of more than `_AT_BOUND` times its bound gets the strong bound. In a paged arena, one of more than
`_NEAR` times that is searched for again, with `_AGAIN` times the effort. The first search does not know the
strong bound: ending there made some plans up to 1 % slower.
"""

_FAR, _CLIMB, _SMALL_CLIMB = 1.02, 15_000, 20
"""A plan of a contiguous arena that takes more than `_FAR` times its bound is improved by climbing.

`_CLIMB` is the most attempts from each start, times `_SMALL_CLIMB` and the number of blocks.
"""

_FEW, _SAVED = 4, 128
"""Storages below `_FEW` granules are tried outside of a contiguous arena, where they take no whole granules.

They are if that saves a `_SAVED`th of the bytes that do not fit, and the plan takes `_NEAR` times its bound.
"""

SMALL = 32
"""The most reads of a problem that is planned on lower rungs.

In larger problems a larger budget seldom gives a slower plan, and each rung takes long to plan.
"""


@dataclass(frozen=True)
class Floor:
    """The smallest budget, `upper_bytes`: a plan is found from it on.

    `step` names the step that sets the floor (empty if nothing is streamed), and `reads` are the storages of
    the arena that this step reads.
    """

    upper_bytes: int
    step: str
    reads: tuple[int, ...]


def floor(demand: Demand) -> Floor:
    """The smallest budget for a demand: `make_plan` accepts its `upper_bytes`, and not one byte less."""
    return _floor(Pieces(_in_turn(demand)))


def _floor(pieces: Pieces) -> Floor:
    demand, outside, most = pieces.demand, pieces.demand.outside_bytes, pieces.demand.streamed_bytes
    weighed = pieces.runs if demand.arena.kind == "paged" else pieces.copied
    steps = [
        (nbytes, step)
        for number, trace in enumerate(demand.traces)
        for nbytes, step in zip(
            needed_bytes(weighed, len(trace.steps), number=number), trace.steps, strict=True
        )
    ]
    if not steps:
        return Floor(outside, "", ())
    lower, step = max(steps, key=lambda needed: needed[0])
    upper = max(lower, tight(pieces.blocks).nbytes) if demand.arena.kind == "contiguous" else lower
    reads = tuple(
        s
        for s in (*step.reads, *step.writes)
        if demand.arena.layout[s] >= 0 and demand.storages[s].nbytes > 0
    )
    return Floor(outside + min(upper, most), step.name, reads)


def check_floor(demand: Demand, budget: int, names: Sequence[str] | None) -> None:
    """Raise the BudgetError that `make_plan` would, without making a plan."""
    _check_floor(Pieces(_in_turn(demand)), budget, names)


def make_plan(
    problem: Problem, budget: int, *, names: Sequence[str] | None = None, effort: float = 1.0
) -> Plan:
    """The fastest plan that the search finds within `budget` bytes.

    Methods whose calls come in turn are planned as one, unless copies may not cross the end of a call.
    `names[s]` is the name of storage s in messages. `effort` is how much to search, as a multiple of the
    usual amount: a plan that is run once need not be the best.

    Raises:
        BudgetError: the budget is below the floor, which the error names with its step and weights.
        PlanError: the hardware has a rate that is not above 0 and finite, or a negative size; it has no disk,
            and `problem.host` limits the host; or a time, size or read of the facts is impossible.
    """
    check_machine(problem.hardware)
    for fault in facts_faults(problem.storages, problem.traces):
        raise PlanError(f"nothing can be planned: {fault}")
    traces = _planned_traces(problem)
    return divided(_plan(_joined(problem, traces), budget, names, effort), traces)


def _plan(problem: Problem, budget: int, names: Sequence[str] | None, effort: float) -> Plan:
    """The plan of methods that may be called in any order."""
    outside = problem.outside
    cap = budget - problem.outside_bytes
    if problem.streamed_bytes <= cap:
        outside = tuple(sorted((*outside, *problem.streamed)))
        draft, schedules = _nothing_streamed(problem)
    else:
        pieces = Pieces(problem)
        _check_floor(pieces, budget, names)
        draft, schedules = _fastest(problem, pieces, cap, effort)
        aside = replace(problem, beside=_small(problem, problem.streamed_bytes - cap))
        bounds = [schedule.lower_bound_ns for schedule in schedules]
        pieces, slow = Pieces(aside), _total_ns(schedules) > _NEAR * sum(bound or 0 for bound in bounds)
        if slow and aside.beside and budget >= _floor(pieces).upper_bytes:
            other, timed = _fastest(aside, pieces, budget - aside.outside_bytes, effort, bounds)
            if _total_ns(timed) < _total_ns(schedules):
                outside, draft, schedules = aside.outside, other, timed
    plan = Plan(
        budget=budget,
        arena=problem.arena,
        arena_bytes=draft.arena_bytes,
        outside=outside,
        addresses=draft.addresses,
        resident=draft.resident,
        boundary=draft.boundary,
        wrap=problem.wrap,
        schedules=schedules,
        traces=problem.traces,
        hardware=problem.hardware,
        names=tuple(names or ()),
        sizes=tuple(storage.nbytes for storage in problem.storages),
        pool=problem.pool,
    )
    return plan if problem.host is None else with_host(plan, problem.host)


def _small(problem: Problem, missing: int) -> frozenset[int]:
    """The storages that leave parts of their granules free; none if these are little of the `missing` bytes.

    Outside of the arena each takes as many bytes as it has: allocators round up to multiples of 512.
    """
    granule, free = problem.arena.granule, {}
    for s in problem.streamed if problem.arena.kind == "contiguous" and not problem.pool else ():
        storage = problem.storages[s]
        odd = storage.phase or storage.nbytes % 512 or storage.kind == "produced"
        if storage.nbytes < _FEW * granule and not odd:
            free[s] = -storage.nbytes % granule
    return frozenset(s for s, n in free.items() if n and sum(free.values()) * _SAVED >= missing)


def with_figures(plan: Plan, problem: Problem, nearness: float) -> Plan | None:
    """The decisions of a plan, timed by the figures of the problem; None if they may no longer be good ones.

    `problem` differs from the one that the plan was made for in the times of its traces and the rates of its
    hardware alone. The decisions are good if they take at most `nearness` times the new bound. This needs a
    bound and no search; the bound took a quarter of the planning of a Llama of 32 layers.
    """
    planned, alone = _planned_traces(problem), joined(plan)
    joint = _joined(problem, planned)
    streams = any(schedule.transfers for schedule in alone.schedules)
    if joint.host is not None or not streams or _place_of(alone.pool) != _place_of(joint.pool):
        return None
    aside = replace(joint, beside=frozenset(plan.outside))
    bounds = _bounds_within(joint, plan.budget)
    if aside.outside_bytes > joint.outside_bytes:
        bounds = _lower(bounds, _bounds_within(aside, plan.budget))
    timed = replace(
        alone,
        schedules=_timed(aside, _draft_of(alone), bounds),
        traces=joint.traces,
        hardware=joint.hardware,
        pool=joint.pool,
    )
    return divided(timed, planned) if timed.ratio and timed.ratio <= nearness else None


def improve_plan(plan: Plan, problem: Problem, go_on: Callable[[int], bool]) -> Plan:
    """The fastest plan found by changing the addresses of a plan, a few at a time, while `go_on` says so.

    `problem` is the one that the plan was made for. `go_on` is asked before each change with the period so
    far, in nanoseconds, summed over the methods. Plans of paged arenas have no addresses, and stay.
    """
    if plan.arena.kind != "contiguous":
        return plan
    planned, alone = _planned_traces(problem), joined(plan)
    joint = replace(_joined(problem, planned), beside=frozenset(plan.outside))
    cap = plan.budget - joint.outside_bytes
    draft = climb(joint, Pieces(joint).blocks, _draft_of(alone), cap, go_on, seed=2)
    timed = _timed(joint, draft, [schedule.lower_bound_ns for schedule in alone.schedules])
    changed = replace(
        alone,
        arena_bytes=draft.arena_bytes,
        addresses=draft.addresses,
        resident=draft.resident,
        boundary=draft.boundary,
        schedules=timed,
        host=None,
    )
    better = divided(changed, planned)
    if problem.host is not None:
        better = with_host(better, problem.host)
    return better if better.predicted_ns < plan.predicted_ns else plan


def _draft_of(plan: Plan) -> Draft:
    streams = tuple((schedule.transfers, schedule.drops) for schedule in plan.schedules)
    boundaries = tuple(schedule.boundary for schedule in plan.schedules if schedule.boundary is not None)
    return Draft(plan.arena_bytes, plan.addresses, plan.resident, plan.boundary, streams, boundaries)


def _place_of(pool: Pool | None) -> Pool | None:
    """What decisions depend on of a pool: all but its times."""
    return None if pool is None else replace(pool, expected_ns=(), worst_ns=())


def _in_turn(demand: Demand) -> Demand:
    """The demand in which methods whose calls come in turn are one."""
    traces = _planned_traces(demand) if isinstance(demand, Problem) else demand.traces
    return _joined(demand, traces)


def _joined(demand: _D, traces: Sequence[Trace]) -> _D:
    """The demand in which those of `traces` whose calls come in turn are one."""
    return replace(demand, traces=joined_traces(traces), splits=splits_of(traces))


def _planned_traces(problem: Problem) -> tuple[Trace, ...]:
    """The traces of the plan: where no copy crosses the end of a call, each method is planned by itself."""
    if problem.wrap == "overlap":
        return problem.traces
    return tuple(replace(trace, follows=None) for trace in problem.traces)


def _relaxed(
    problem: Problem, pieces: Pieces, cap: int, *, strong: bool = False
) -> tuple[Relaxation | None, ...]:
    """The relaxation of each trace within `cap` bytes of arena; None where the solver failed."""
    tiers, numbers = _tiers(problem, pieces, cap), range(len(problem.traces))
    return tuple(relax(problem, pieces, tiers, number, strong=strong) for number in numbers)


def _bounds_within(problem: Problem, budget: int) -> list[int | None]:
    relaxed = _relaxed(problem, Pieces(problem), budget - problem.outside_bytes)
    return [relaxation.bound_ns if relaxation else None for relaxation in relaxed]


def _fastest(
    problem: Problem, pieces: Pieces, cap: int, effort: float, others_bounds: Sequence[int | None] = ()
) -> tuple[Draft, tuple[Schedule, ...]]:
    """The fastest draft for `cap` bytes of arena, or for a lower rung whose plan may still be faster.

    `others_bounds` are bounds of another arrangement: the lower ones hold for both.
    """
    search = contiguous.search if problem.arena.kind == "contiguous" else paged.search
    best: tuple[Draft, tuple[Schedule, ...]] | None = None
    bounds: Sequence[int | None] = ()
    for rung in (cap, *_rungs_below(pieces, cap)):
        if best and sum(pass_ns(problem, trace, rung) for trace in problem.traces) >= _total_ns(best[1]):
            break
        task = Task(problem, pieces, rung, _relaxed(problem, pieces, rung), effort)
        limits: Sequence[int | None] = [relaxed.bound_ns if relaxed else None for relaxed in task.relaxed]
        least = sum(ns for ns in limits if ns is not None)
        if best and least >= _total_ns(best[1]):
            break
        draft = _careful(search, task)
        if effort >= 1 and problem.arena.kind == "contiguous":
            draft = _climbed(problem, pieces, draft, rung, _FAR * least)
        tried = draft, _timed(problem, draft, limits)
        if rung == cap or problem.arena.kind == "paged":
            tried, limits = _improved(search, task, tried, limits)
        bounds = bounds or limits
        if best is None or _total_ns(tried[1]) < _total_ns(best[1]):
            best = tried
    assert best is not None
    bounds = _lower(bounds, others_bounds) if others_bounds else bounds
    return best[0], tuple(
        replace(schedule, lower_bound_ns=bound) for schedule, bound in zip(best[1], bounds, strict=True)
    )


def _climbed(problem: Problem, pieces: Pieces, draft: Draft, cap: int, enough: float) -> Draft:
    """The fastest draft that climbs from several starts find, of which the best goes on."""

    def going(share: int) -> Callable[[int], bool]:
        left = itertools.count(_CLIMB * share // (_SMALL_CLIMB + len(pieces.blocks)), -1)
        return lambda ns: ns > enough and next(left) > 0

    if sum(draft.periods_ns(problem)) > enough:
        for start in draft.starts:
            other = climb(problem, pieces.blocks, start, cap, going(1))
            draft = min(draft, other, key=lambda draft: sum(draft.periods_ns(problem)))
    return climb(problem, pieces.blocks, draft, cap, going(2), seed=1)


def _lower(first: Sequence[int | None], second: Sequence[int | None]) -> list[int | None]:
    """The bounds that hold for either of two arrangements; None where one has none."""
    return [min(pair, key=lambda ns: ns or 0) for pair in zip(first, second, strict=True)]


def _improved(
    search: Callable[[Task], Draft],
    task: Task,
    best: tuple[Draft, tuple[Schedule, ...]],
    bounds: Sequence[int | None],
) -> tuple[tuple[Draft, tuple[Schedule, ...]], Sequence[int | None]]:
    """The bounds raised where the plan is not at them, and a faster plan if a shorter search finds one."""
    problem, total, solved = task.problem, _total_ns(best[1]), [ns for ns in bounds if ns is not None]
    if task.effort < 1 or len(solved) < len(bounds) or total <= sum(solved) * _AT_BOUND:
        return best, bounds
    strong = _relaxed(problem, task.pieces, task.cap, strong=True)
    raised = [max(ns, relaxed.bound_ns if relaxed else 0) for ns, relaxed in zip(solved, strong, strict=True)]
    if problem.arena.kind == "contiguous" or total <= sum(raised) * _NEAR:
        return best, raised
    draft, late = search(replace(task, relaxed=strong, effort=_AGAIN)), _late(problem)
    if sum(draft.periods_ns(late)) <= _CARE * sum(best[0].periods_ns(late)):
        best = min(best, (draft, _timed(problem, draft, raised)), key=lambda drafted: _total_ns(drafted[1]))
    return best, raised


def _careful(search: Callable[[Task], Draft], task: Task) -> Draft:
    """The draft found, or one nearly as fast that waits less where the link is late."""
    problem, draft = task.problem, search(task)
    late = _late(problem)
    enough = _CARE * sum(draft.periods_ns(problem))
    waiting = sum(draft.periods_ns(late))
    if waiting <= enough or task.effort < 1:
        return draft
    other = search(replace(task, problem=late))
    better = sum(other.periods_ns(late)) < waiting and sum(other.periods_ns(problem)) <= enough
    return other if better else draft


def _late(problem: Problem) -> Problem:
    """The problem whose link takes `_LATE` times as long to fill."""
    in_flight = _LATE * problem.hardware.link_in_flight_bytes
    return replace(problem, hardware=replace(problem.hardware, link_in_flight_bytes=in_flight))


def _tiers(problem: Problem, pieces: Pieces, cap: int) -> tuple[Tier, ...]:
    """The tier of the device with `cap` bytes and, if the host's memory is limited, the tier of the host."""
    hardware = problem.hardware
    granule = problem.arena.granule if problem.arena.kind == "paged" else 1
    device = tier_of(usable_bytes(pieces.copied, granule, cap), hardware, granule)
    if problem.host is None or hardware.disk_bytes_per_s is None:
        return (device,)
    return device, Tier(cap + problem.host, 1e9 / hardware.disk_bytes_per_s, hardware.disk_latency_ns)


def _rungs_below(pieces: Pieces, cap: int) -> list[int]:
    """The rungs below `cap`, in bytes of arena, the largest first; none for a large problem."""
    demand = pieces.demand
    if not _is_small(demand.traces):
        return []
    lowest = _floor(pieces).upper_bytes - demand.outside_bytes
    width = demand.streamed_bytes - lowest
    return [rung for n in range(RUNGS, 0, -1) if (rung := lowest + width * (n - 1) // RUNGS) < cap]


def _is_small(traces: Sequence[Trace]) -> bool:
    return sum(len(step.reads) for trace in traces for step in trace.steps) <= SMALL


def lower_budgets(traces: Sequence[Trace], highest: int, budget: int) -> list[int]:
    """The budgets below `budget` of a ladder up to `highest`, the largest first; none for a large problem."""
    if not _is_small(traces):
        return []
    return [rung for n in range(RUNGS, 0, -1) if (rung := highest * n // RUNGS) < budget]


def _timed(problem: Problem, draft: Draft, bounds: Sequence[int | None]) -> tuple[Schedule, ...]:
    boundaries = draft.boundaries or (None,) * len(problem.traces)
    facts = zip(problem.traces, draft.streams, draft.periods_ns(problem), bounds, boundaries, strict=True)
    return tuple(
        Schedule(trace.graph, *stream, ns, bound, boundary=last) for trace, stream, ns, bound, last in facts
    )


def _total_ns(schedules: Sequence[Schedule]) -> int:
    return sum(schedule.predicted_ns for schedule in schedules)


def _check_floor(pieces: Pieces, budget: int, names: Sequence[str] | None) -> None:
    demand, lowest = pieces.demand, _floor(pieces)
    if budget >= lowest.upper_bytes:
        return
    called = [names[s] if names else f"storage {s}" for s in lowest.reads]
    least = format_size(lowest.upper_bytes, up=True)
    budget_text = format_budget(budget)
    if budget_text == least:  # a few bytes short
        budget_text, least = f"{budget:,} bytes", f"{lowest.upper_bytes:,} bytes"
    sentence = f"the budget of {budget_text} is below the floor of {least}"
    kept_names = [names[s] if names else f"storage {s}" for s in sorted(demand.keep)]
    if kept_names:
        without = floor(replace(demand, keep=frozenset())).upper_bytes
        taken = format_size(lowest.upper_bytes - without)
        sentence += f", of which keeping {', '.join(kept_names)} in memory takes {taken}"
    needs = f"step {lowest.step!r} needs {', '.join(called)} at once"
    raise BudgetError(
        f"{sentence}: {needs if called else 'so much stays in memory, whatever streams'}; "
        f"give at least {lowest.upper_bytes} bytes{' or keep fewer weights' if kept_names else ''}",
        floor_bytes=lowest.upper_bytes,
        step=lowest.step,
        weights=tuple(called) if names else (),
    )


def _nothing_streamed(problem: Problem) -> tuple[Draft, tuple[Schedule, ...]]:
    """The draft and the schedules of a plan without copies, whose passes take as long as their compute."""
    addresses = (-1,) * len(problem.storages) if problem.arena.kind == "contiguous" else ()
    draft = Draft(0, addresses, (), (), tuple(((), ()) for _ in problem.traces))
    return draft, _timed(problem, draft, [trace.compute_ns for trace in problem.traces])

"""A request becomes a plan: the arena, the figures of the machine, and the ways to read that are compared."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from penstock.runtime.arena.kinds import allowed_arenas, choose_arena
from penstock.runtime.cache import remembered_plan
from penstock.runtime.capabilities import Need, Way, fastest_plan, find_shares, needs_of, plan_ns
from penstock.runtime.device.opening import device_kind
from penstock.runtime.machine.calibrate import THIS_CPU, corrected, with_leaving
from penstock.runtime.machine.rates import leaving
from penstock.runtime.memory_split import LEAST_HOST_BYTES, fits_host, host_limit
from penstock.runtime.registered import WAYS, Routes
from penstock.runtime.system.announcing import announced
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Hardware, Trace, Wrap
from penstock.schedule.facts.problem import Problem
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.facts.validity import check_machine
from penstock.schedule.host import with_host
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan, ladder
from penstock.schedule.planner import Floor, check_floor, improve_plan, lower_budgets, make_plan
from penstock.schedule.report.comparison import replayed_ns
from penstock.schedule.report.verdict import slow_launches
from penstock.schedule.verify.proof import verify_plan

_log = logging.getLogger(__name__)

_WITHOUT_PYTHON = tuple(way for way in WAYS if not way.in_python)


@dataclass(frozen=True)
class PlanRequest:
    """What a caller asks of a plan. Sizes are in bytes; `Program.plan` documents every field.

    Without a `wrap`, calls overlap, except where `find_plan` finds that their replays as graphs are faster.
    `ways` are the names of the ways to read that are compared, by default all.
    `effort` is that of `make_plan`.
    """

    budget: int
    device: str = "cpu"
    arena: str | None = None
    keep: tuple[str, ...] = ()
    hardware: Hardware | str = "auto"
    traces: tuple[Trace, ...] = ()
    wrap: Wrap | None = None
    host_memory: int | None = None
    spill: str | None = None
    ways: tuple[str, ...] = ()
    routes: Routes | None = None
    effort: float = 1
    seconds: float = 0
    """How long to search for a faster plan behind the usual search."""


def find_plan(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """The verified plan for a request: one made before, or one made now and remembered.

    If the caller gives hardware or times, the plan is always made anew.
    """
    if request.seconds:
        return _improved(payload, request, find_plan(folder, payload, replace(request, seconds=0)))
    if request.wrap is None:
        return _wrapped(partial(find_plan, folder, payload), request)
    if request.hardware != "auto" or request.traces or request.routes:
        return decide(folder, payload, request)
    key = replace(request, keep=tuple(sorted(request.keep)))

    def plan_of(problem: Problem, budget: int) -> Plan:
        make = partial(_make, payload, request.effort, problem, budget)
        asked = replace(key, budget=budget)
        return remembered_plan(folder, payload, asked, problem, budget=budget, make=make)

    return _best(folder, payload, request, plan_of)


@announced("looking for a faster plan")
def _improved(payload: Payload, request: PlanRequest, plan: Plan) -> Plan:
    """The plan, or a faster one that is found within the seconds that the caller gives."""
    if plan.arena.kind != "contiguous":
        _log.warning(
            "effort='optimal' changes nothing here: it improves addresses, and this plan has none, as memory "
            "comes and goes by pages in its arena"
        )
        return plan
    problem = Problem(
        payload.storages,
        plan.traces,
        plan.arena,
        kept_storages(payload, request.keep),
        pool=plan.pool,
        hardware=plan.hardware,
        wrap=plan.wrap,
        host=request.host_memory,
    )
    deadline = time.monotonic() + request.seconds
    least = plan.lower_bound_ns or 0
    better = improve_plan(plan, problem, lambda period: period > least and time.monotonic() < deadline)
    verify_plan(payload.storages, payload.traces, better)
    return better


def find_plan_to_load(folder: Path, payload: Payload, request: PlanRequest, beside: int) -> Plan:
    """The verified plan to load for a request, with `beside` bytes of activations on the device.

    If the host cannot hold all that streams to a device, the plan is made with the memory that the host has
    left. This limit is different at every load, so such a plan is not remembered. Otherwise it is that of
    `find_plan`. For a simulated device, which takes memory of the same host, only what the host holds is
    decided anew: planning all of it took 88 MiB for 48 layers, where it is memory that is short.
    """
    return _within_host(find_plan(folder, payload, request), folder, payload, request, beside)


def decide_to_load(folder: Path, payload: Payload, request: PlanRequest, beside: int) -> Plan:
    """Make the plan to load for a request, as `find_plan_to_load` does; nothing is remembered."""
    return _within_host(decide(folder, payload, request), folder, payload, request, beside)


def _within_host(plan: Plan, folder: Path, payload: Payload, request: PlanRequest, beside: int) -> Plan:
    limit = host_limit(request.device, request.budget, beside)
    if device_kind(request.device) == "cpu" or fits_host(plan, limit) or (limit or 0) < LEAST_HOST_BYTES:
        return plan  # without room for the least, loading refuses it
    if device_kind(request.device) == "sim":
        assert limit is not None  # or all would have fit
        hosted = with_host(plan, limit)
        verify_plan(payload.storages, payload.traces, hosted)
        return hosted
    return decide(folder, payload, replace(request, host_memory=limit))


def _wrapped(find: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """The plan that `find` makes of a request which leaves the wrap open: calls overlap.

    If the calling thread is their limit, copies join at the ends of calls, so that calls can be captured as
    graphs: the replay of one is one launch for all steps. It must be faster, though copies hide less.
    """
    plan = find(replace(request, wrap="overlap"))
    if not (limit := slow_launches(plan)) or any(any(schedule.staged) for schedule in plan.schedules):
        return plan
    try:
        joining = find(replace(request, wrap="barrier"))
    except BudgetError:  # what one method keeps for another is held whole then
        return plan
    if (replayed := replayed_ns(joining)) >= plan.predicted_ns:
        return plan
    replays = f"calls can be captured as graphs, whose replays take {format_time(replayed)} a pass"
    _log.info("%s; planned with wrap='barrier', so that %s", limit, replays)
    return joining


def decide(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """Make the plan for a request, and verify it. Raises BudgetError for a budget below the floor."""
    return _best(folder, payload, request, partial(_make, payload, request.effort))


def find_ladder(folder: Path, payload: Payload) -> tuple[Plan, ...]:
    """The verified plans of a ladder for this machine, on arenas that reads fill, by ascending budget.

    A program without Python runs the largest of them that its budget allows.
    """
    lowest = min(floor.upper_bytes for floor in _unmapped_floors(payload).values())
    highest = sum(storage.nbytes for storage in payload.storages)

    def make(budget: int) -> Plan:
        arena = unmapped_arena(payload, budget)
        ways = tuple(way.name for way in _WITHOUT_PYTHON)
        return decide(folder, payload, PlanRequest(budget, arena=arena, ways=ways))

    return ladder(make, max(1, lowest), max(1, highest))


def unmapped_arena(payload: Payload, budget: int) -> str:
    """The preferred kind of arena on a CPU that reads fill and that `budget` bytes suffice for."""
    floors = _unmapped_floors(payload)
    return next((kind for kind, floor in floors.items() if floor.upper_bytes <= budget), [*floors][-1])


def _unmapped_floors(payload: Payload) -> dict[str, Floor]:
    floors = find_floors(payload, "cpu", None, _WITHOUT_PYTHON)
    return {kind: floor for kind, floor in floors.items() if kind != "mapped"}


@announced("planning")
def _best(
    folder: Path, payload: Payload, request: PlanRequest, plan_of: Callable[[Problem, int], Plan]
) -> Plan:
    """The plan of the fastest way to read, or that of a lower budget if that is faster.

    `plan_of` plans a problem within a budget.
    """
    ways = [way for way in WAYS if not request.ways or way.name in request.ways]
    needs = needs_of(ways, payload, kept_storages(payload, request.keep), request.device)
    total = sum(storage.nbytes for storage in payload.storages)
    if len(needs) == 1 or request.budget >= total:
        return plan_of(_problem_of(folder, needs[0], request), request.budget)
    names = payload.storage_names()
    problems: list[tuple[Way, Problem]] = []
    refused: list[BudgetError] = []
    for need in needs:
        try:
            problems.append((need.way, problem := _problem_of(folder, need, request)))
            check_floor(problem, request.budget, names)
        except BudgetError as error:
            refused.append(error.with_traceback(None))
    if len(refused) == len(needs):
        lowest = min(refused, key=lambda error: error.floor_bytes or 0)
        refused.clear()
        try:
            raise lowest
        finally:
            del lowest  # whose traceback has this frame, and with it those of callers and their caches
    best = fastest_plan(find_shares(problems, request.budget, request.routes, names), request.budget, plan_of)
    for budget in lower_budgets(payload.traces, total, request.budget):
        shares = find_shares(problems, budget, request.routes, names)
        if min((share.ns for share in shares), default=plan_ns(best)) >= plan_ns(best):
            break
        lower = fastest_plan(shares, budget, plan_of)
        if plan_ns(lower) < plan_ns(best):
            best = replace(lower, budget=request.budget)
    return best


def _problem_of(folder: Path, need: Need, request: PlanRequest) -> Problem:
    """The problem to plan: the arena, the machine, and the times of the traces on this machine."""
    payload = need.payload
    arena, hardware = choose_arena(
        folder, need, request.budget, device=request.device, asked=request.arena, machine=request.hardware
    )
    produced = any(storage.kind == "produced" for storage in payload.storages)
    if produced and request.hardware == "auto" and device_kind(request.device) == "cpu":
        hardware = with_leaving(hardware, leaving(request.spill))
    check_machine(hardware)  # first, because modelling times divides by the rates
    traces = need.way.whole_reads(request.traces, need.pool)
    if not traces:
        traces = tuple(with_times(trace, hardware) for trace in payload.traces)
        if hardware.name == THIS_CPU and device_kind(request.device) == "cpu":
            traces, hardware = corrected(folder, traces, hardware)
    return Problem(
        payload.storages,
        traces,
        arena,
        need.keep,
        pool=need.pool,
        hardware=hardware,
        wrap=request.wrap or "overlap",
        host=request.host_memory,
    )


def _make(payload: Payload, effort: float, problem: Problem, budget: int) -> Plan:
    plan = make_plan(problem, budget, names=payload.storage_names(), effort=effort)
    verify_plan(payload.storages, payload.traces, plan)
    return plan


def find_floors(payload: Payload, device: str, arena: str | None, ways: Iterable[Way]) -> dict[str, Floor]:
    """The floor of each arena that the device allows, the preferred one first, or of `arena` alone."""
    floors: dict[str, Floor] = {}
    for need in needs_of(ways, payload, frozenset(), device):
        for name, allowed in allowed_arenas(need.payload, device, arena).items():
            lowest = need.floor(allowed)
            if name not in floors or lowest.upper_bytes < floors[name].upper_bytes:
                floors[name] = lowest
    return floors


def least_budget(payload: Payload, device: str, arena: str | None = None) -> int:
    """The smallest budget in bytes for an arena that the device allows, or for the best of them."""
    return min(floor.upper_bytes for floor in find_floors(payload, device, arena, WAYS).values())


def kept_storages(payload: Payload, patterns: Sequence[str]) -> frozenset[int]:
    """The storages of the weights whose FQNs match patterns; PlanError for a pattern that matches none."""
    storages: set[int] = set()
    for pattern in patterns:
        matching = [w for w in payload.weights if fnmatchcase(w.fqn, pattern)]
        if not matching:
            names = ", ".join(w.fqn for w in payload.weights[:3])
            raise PlanError(f"keep pattern {pattern!r} matches no weight; the weights are {names}, ...")
        storages |= {part.storage for weight in matching for part in weight.parts}
    return frozenset(storages)


def checked_traces(traces: object) -> tuple[Trace, ...]:
    """The traces that a user gives for a plan. Raises PlanError for what is no list of them."""
    if traces is None:
        return ()
    if not isinstance(traces, Sequence) or not all(isinstance(trace, Trace) for trace in traces):
        raise PlanError(
            f"traces= takes a list with a Trace for each method, got {traces!r:.60}: give what "
            "StreamedModule.measure returns, or leave it out"
        )
    return tuple(traces)


def checked_patterns(keep: Sequence[str]) -> tuple[str, ...]:
    """The patterns that a user gives for a plan. Raises PlanError for one that is in no list."""
    if isinstance(keep, str):
        raise PlanError(f"keep= takes a list of patterns, got {keep!r}: give [{keep!r}]")
    return tuple(keep)


def checked_seconds(effort: str, seconds: float) -> float:
    """How long to search behind the usual search. Raises PlanError for an effort or a time that is none."""
    if effort not in ("usual", "optimal"):
        raise PlanError(f"effort= is 'usual' or 'optimal', got {effort!r}")
    if not 0 < seconds < math.inf:
        raise PlanError(f"seconds= is a number above 0, got {seconds!r}")
    return seconds if effort == "optimal" else 0

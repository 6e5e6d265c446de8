"""A request becomes a plan: the arena, the figures of the machine, and plans that are remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from penstock._version import __version__
from penstock.runtime.arena.kinds import allowed_arenas
from penstock.runtime.cache import MADE_FOR, PLANS, remember, user_cache
from penstock.runtime.device.opening import ACCELERATOR, device_kind, hardware_of
from penstock.runtime.files.artifact_files import artifact_digest
from penstock.runtime.machine.calibrate import (
    THIS_CPU,
    measure_accelerator,
    measure_cpu,
    seen_compute,
    with_leaving,
)
from penstock.runtime.machine.figures import noted
from penstock.runtime.machine.rates import Arrival, WeightFiles, leaving
from penstock.runtime.memory_split import LEAST_HOST_BYTES, fits_host, host_limit
from penstock.runtime.sparse.trust import trusted
from penstock.runtime.system.announcing import announced
from penstock.runtime.system.memory import PAGE, supports_populate
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import BudgetError, PenstockError, PlanError
from penstock.schedule.facts.hardware import find_hardware, stretched, with_times
from penstock.schedule.facts.model import Arena, Hardware, Pool, SparseRead, Storage, Trace, Wrap
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.facts.validity import check_machine
from penstock.schedule.host import with_host
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan, ladder
from penstock.schedule.planner import RUNGS, SMALL, Floor, check_floor, floor, make_plan, with_figures
from penstock.schedule.report.comparison import replayed_ns
from penstock.schedule.report.verdict import slow_launches
from penstock.schedule.sparse.pool import (
    NEARLY,
    Division,
    divide,
    pass_counts,
    smallest_pool,
    units_layout,
    whole,
    without_units,
)
from penstock.schedule.sparse.replay import expectation
from penstock.schedule.sparse.routes import Routes, profile_of, served_profile
from penstock.schedule.verify.proof import verify_plan

MOST = 64
"""The number of plans that are kept; the least recently used ones are removed first."""

NEARNESS = 1.01
"""How much further from the bound, as a factor, decisions may be under other figures without a new search."""


def remembered_plan(
    folder: Path,
    payload: Payload,
    request: object,
    problem: Problem,
    *,
    budget: int,
    make: Callable[[], Plan],
) -> Plan:
    """The plan for `budget` bytes and a request: one made before, or one that `make` makes now.

    `problem` is what is planned, with the machine's present figures. Two requests, and two problems, are
    equal if their reprs are. Where only the figures differ, the decisions made before are kept if they are as
    near to the bound as they were when they were searched, to within `NEARNESS`. A plan is made anew for
    another artifact or version of penstock, and a plan from the cache is verified again. A program that is
    only in memory has no artifact, and its plans are not kept.
    """
    digest = artifact_digest(folder)
    if digest is None:
        return make()
    methods = [method.name for method in payload.methods]  # of a training program, those of one rung
    units = problem.pool and replace(problem.pool, expected_ns=(), worst_ns=())
    asked = repr((digest, methods, request, problem.arena, units, problem.hardware.name, __version__))
    path = user_cache() / PLANS / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    known, nearness = _read(path, payload, budget)
    if known is not None and (known.hardware, known.traces) == (problem.hardware, problem.traces):
        with suppress(OSError):
            os.utime(path)
        return known
    plan = with_figures(known, problem, NEARNESS * nearness) if known else None
    if plan is None:
        plan = make()
        nearness = plan.predicted_ns / plan.lower_bound_ns if plan.lower_bound_ns else 0.0
    made_for = json.dumps(str(folder.absolute()))
    data = f'{{"{MADE_FOR}": {made_for}, "nearness": {nearness!r}, "plan": {plan.to_json()}}}'
    remember(path, data.encode())
    with suppress(OSError):
        _forget_oldest(path.parent)
    return plan


def _read(path: Path, payload: Payload, budget: int) -> tuple[Plan | None, float]:
    """Returns the plan in a file, verified, and how near to its bound it was when it was searched.

    There is no plan where none is safe and for this budget.
    """
    with suppress(OSError, PenstockError, RecursionError, ValueError, KeyError, TypeError):
        stored = json.loads(read_bounded(path, "a plan"))
        plan = plan_from_json(json.dumps(stored["plan"]).encode(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        if plan.budget == budget:
            return plan, float(stored["nearness"])
    return None, 0.0


def _forget_oldest(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in plans[:-MOST]:
        path.unlink(missing_ok=True)


_log = logging.getLogger(__name__)

_REPLAYED = 12
"""The number of pools for which recorded routes are replayed."""


@dataclass(frozen=True)
class PlanRequest:
    """What a caller asks of a plan. Sizes are in bytes; `Program.plan` documents every field.

    Without a `wrap`, calls overlap, except where `find_plan` finds that their replays as graphs are faster.
    Without `by_units`, everything is read whole: units are brought by calls that penstock itself makes.
    Without `tiles`, no product is computed by tiles, whose bits are certified in Python.
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
    by_units: bool = True
    tiles: bool = True
    routes: Routes | None = None


def find_plan(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """The verified plan for a request: one made before, or one made now and remembered.

    If the caller gives hardware or times, the plan is always made anew.
    """
    if request.wrap is None:
        return _wrapped(partial(find_plan, folder, payload), request)
    if request.hardware != "auto" or request.traces or request.routes:
        return decide(folder, payload, request)
    key = replace(request, keep=tuple(sorted(request.keep)))

    def plan_of(problem: Problem, budget: int) -> Plan:
        make = partial(_make, payload, problem, budget)
        asked = replace(key, budget=budget)
        return remembered_plan(folder, payload, asked, problem, budget=budget, make=make)

    return _best(folder, payload, request, plan_of)


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
    return _best(folder, payload, request, partial(_make, payload))


def find_ladder(folder: Path, payload: Payload) -> tuple[Plan, ...]:
    """The verified plans of a ladder for this machine, on arenas that reads fill, by ascending budget.

    A program without Python runs the largest of them that its budget allows.
    """
    lowest = min(floor.upper_bytes for floor in _unmapped_floors(payload).values())
    highest = sum(storage.nbytes for storage in payload.storages)

    def make(budget: int) -> Plan:
        arena = unmapped_arena(payload, budget)
        return decide(folder, payload, PlanRequest(budget, arena=arena, tiles=False))

    return ladder(make, max(1, lowest), max(1, highest))


def unmapped_arena(payload: Payload, budget: int) -> str:
    """The preferred kind of arena on a CPU that reads fill and that `budget` bytes suffice for."""
    floors = _unmapped_floors(payload)
    return next((kind for kind, floor in floors.items() if floor.upper_bytes <= budget), [*floors][-1])


def _unmapped_floors(payload: Payload) -> dict[str, Floor]:
    floors = find_floors(payload, "cpu", None, frozenset(), tiles=False)
    return {kind: floor for kind, floor in floors.items() if kind != "mapped"}


@dataclass(frozen=True)
class _Asked:
    """What has to be in memory: a payload's facts, the storages that are kept, and a pool if there is one.

    With a pool, the payload's traces are those of what is read whole.
    """

    payload: Payload
    keep: frozenset[int] = frozenset()
    pool: Pool | None = None

    @classmethod
    def ways(
        cls, payload: Payload, keep: frozenset[int], device: str, *, tiles: bool = True
    ) -> tuple[_Asked, ...]:
        """The ways to read: whole; and by units, with `tiles` or none, and dense reads by units or not."""
        reads = _sparse(payload.traces)
        dense = {True, *(not read.dense for read in reads)}
        by_units = (
            cls._by_units(payload, keep, device, tiles=by_tiles, dense=by_rounds)
            for by_rounds in sorted(dense, reverse=True)
            for by_tiles in sorted({False, *(read.tiles and tiles for read in reads)})
        )
        return cls(payload, keep), *(asked for asked in by_units if asked is not None)

    @classmethod
    def _by_units(
        cls, payload: Payload, keep: frozenset[int], device: str, *, tiles: bool, dense: bool
    ) -> _Asked | None:
        """The facts for the smallest pool; None where nothing is worth reading by units, or can be."""
        if device_kind(device) != "cpu" or payload.lowering not in ("eager", "inductor"):
            return None
        traces = trusted(payload.traces)
        doubted = _sparse(payload.traces) - _sparse(traces)
        kept_whole = keep | {read.storage for read in doubted if tiles or not read.tiles}
        layout = units_layout(
            payload.storages, traces, granule=PAGE, keep=kept_whole, tiles=tiles, dense=dense
        )
        if layout is None:
            return None
        pool = smallest_pool(traces, layout, PAGE, tiles=tiles, dense=dense)
        return cls(reduced(payload, pool), keep, pool)

    def demand(self, arena: Arena) -> Demand:
        return Demand(self.payload.storages, self.payload.traces, arena, self.keep, pool=self.pool)

    def floor(self, arena: Arena) -> Floor:
        return floor(self.demand(arena))


def _sparse(traces: Sequence[Trace]) -> set[SparseRead]:
    return {read for trace in traces for step in trace.steps for read in step.sparse}


def reduced(payload: Payload, pool: Pool | None) -> Payload:
    """The payload whose traces are those of what is read whole where a pool serves the rest."""
    if pool is None:
        return payload
    return replace(payload, traces=tuple(without_units(trace, pool) for trace in payload.traces))


@announced("planning")
def _best(
    folder: Path, payload: Payload, request: PlanRequest, plan_of: Callable[[Problem, int], Plan]
) -> Plan:
    """The plan that reads whole or by units, whichever is fastest, or that of a lower rung if that is faster.

    `plan_of` plans a problem within a budget.
    """
    keep = kept_storages(payload, request.keep)
    ways: tuple[_Asked, ...] = (_Asked(payload, keep),)
    if request.by_units:
        ways = _Asked.ways(payload, keep, request.device, tiles=request.tiles)
    total = sum(storage.nbytes for storage in payload.storages)
    if len(ways) == 1 or request.budget >= total:
        return plan_of(_problem_of(folder, ways[0], request), request.budget)
    problems: list[Problem] = []
    refused: list[BudgetError] = []
    for asked in ways:
        try:
            problems.append(_problem_of(folder, asked, request))
            check_floor(problems[-1], request.budget, payload.storage_names())
        except BudgetError as error:
            refused.append(error)
    if len(refused) == len(ways):
        raise min(refused, key=lambda error: error.floor_bytes or 0)
    names = payload.storage_names()
    best = _fastest(_divisions(problems, request, names), request.budget, plan_of)
    reads = sum(len(step.reads) for trace in payload.traces for step in trace.steps)
    rungs = [total * number // RUNGS for number in range(RUNGS, 0, -1)] if reads <= SMALL else []
    for rung in (rung for rung in rungs if rung < request.budget):
        divided = _divisions(problems, replace(request, budget=rung), names)
        if min((division.ns for division, _ in divided), default=_ns(best)) >= _ns(best):
            break
        lower = _fastest(divided, rung, plan_of)
        if _ns(lower) < _ns(best):
            best = replace(lower, budget=request.budget)
    return best


def _fastest(
    divided: Sequence[tuple[Division, Problem]], budget: int, plan_of: Callable[[Problem, int], Plan]
) -> Plan:
    """The plan of the fastest way to read; of ways that are about as fast, the one that moves fewest bytes.

    A way is planned unless another plan is known to be faster.
    """
    plans: list[tuple[int, int, Plan]] = []  # with the bytes that passes move, and their time
    for division, problem in sorted(divided, key=lambda pair: pair[0].ns):
        if not plans or division.ns <= NEARLY * min(ns for _, ns, _ in plans):
            plan = plan_of(problem, budget)
            moved = (schedule.moved_bytes("in") for schedule in plan.schedules)
            plans.append((_counted(plan, moved) + division.missed, _ns(plan), plan))
    enough = NEARLY * min(ns for _, ns, _ in plans)
    return min((planned for planned in plans if planned[1] <= enough), key=lambda planned: planned[0])[2]


def _ns(plan: Plan) -> int:
    return _counted(plan, map(plan.expected_ns, range(len(plan.schedules))))


def _counted(plan: Plan, amounts: Iterable[int]) -> int:
    """The sum of amounts, one for each method, over as many passes as count for that."""
    return sum(count * amount for count, amount in zip(pass_counts(plan.traces), amounts, strict=True))


def _divisions(
    problems: Sequence[Problem], request: PlanRequest, names: Sequence[str]
) -> list[tuple[Division, Problem]]:
    """The best divisions of the budget for each problem whose floor it reaches, with their problems."""
    pairs = []
    for problem in problems:
        with suppress(BudgetError):
            check_floor(problem, request.budget, names)
            divided = _divided(problem, request, names)
            pairs += [(division, replace(problem, pool=division.pool)) for division in divided]
    return pairs


def _divided(problem: Problem, request: PlanRequest, names: Sequence[str]) -> list[Division]:
    """The best divisions of the budget."""
    if problem.pool is None:
        return [whole(problem, request.budget - problem.outside_bytes)]
    least = floor(problem).upper_bytes - problem.outside_bytes
    nbytes = request.budget - (problem.outside_bytes - problem.pool.nbytes)
    if request.routes is None:
        return divide(problem, nbytes, least)
    recorded = profile_of(request.routes, problem.storages, problem.traces, names)
    profile = served_profile(recorded, problem.traces, problem.pool, names)
    expect = expectation(profile, [trace.graph for trace in problem.traces])
    return divide(problem, nbytes, least, expect, _REPLAYED)


def _problem_of(folder: Path, asked: _Asked, request: PlanRequest) -> Problem:
    """The problem to plan: the arena, the machine, and the times of the traces on this machine."""
    payload = asked.payload
    arena, hardware = _choose(folder, asked, request)
    produced = any(storage.kind == "produced" for storage in payload.storages)
    if produced and request.hardware == "auto" and device_kind(request.device) == "cpu":
        hardware = with_leaving(hardware, leaving(request.spill))
    check_machine(hardware)  # first, because modelling times divides by the rates
    traces = reduced(replace(payload, traces=request.traces), asked.pool).traces
    if not traces:
        traces = tuple(with_times(trace, hardware) for trace in payload.traces)
        if hardware.name == THIS_CPU and device_kind(request.device) == "cpu":
            traces, hardware = _corrected(folder, traces, hardware)
    return Problem(
        payload.storages,
        traces,
        arena,
        asked.keep,
        pool=asked.pool,
        hardware=hardware,
        wrap=request.wrap or "overlap",
        host=request.host_memory,
    )


def _corrected(
    folder: Path, traces: Sequence[Trace], hardware: Hardware
) -> tuple[tuple[Trace, ...], Hardware]:
    """The traces with the compute times that loads saw, if there are any, and a note about them."""
    corrected = []
    for trace in traces:
        seen = seen_compute(folder, trace.method)
        corrected.append(stretched(trace, seen.median) if seen else trace)
        if seen:
            correction = f"{seen.subject.title} took {seen.amount} in a load"
            hardware = replace(hardware, note=noted(hardware.note, [correction], [seen]))
    return tuple(corrected), hardware


def _make(payload: Payload, problem: Problem, budget: int) -> Plan:
    plan = make_plan(problem, budget, names=payload.storage_names())
    verify_plan(payload.storages, payload.traces, plan)
    return plan


def find_floors(
    payload: Payload, device: str, arena: str | None, keep: frozenset[int], *, tiles: bool = True
) -> dict[str, Floor]:
    """The floor of each arena that the device allows, the preferred one first, or of `arena` alone.

    Without `tiles`, no product is computed by tiles.
    """
    floors: dict[str, Floor] = {}
    for asked in _Asked.ways(payload, keep, device, tiles=tiles):
        for name, allowed in allowed_arenas(asked.payload, device, arena).items():
            lowest = asked.floor(allowed)
            if name not in floors or lowest.upper_bytes < floors[name].upper_bytes:
                floors[name] = lowest
    return floors


def least_budget(payload: Payload, device: str, arena: str | None = None) -> int:
    """The smallest budget in bytes for an arena that the device allows, or for the best of them."""
    return min(floor.upper_bytes for floor in find_floors(payload, device, arena, frozenset()).values())


def _choose(folder: Path, asked: _Asked, request: PlanRequest) -> tuple[Arena, Hardware]:
    """The arena to plan for, and the machine, which is measured if none is given."""
    payload = asked.payload
    arenas, kind = allowed_arenas(payload, request.device, request.arena), device_kind(request.device)
    auto = request.hardware == "auto"
    hardware = hardware_of(request.device) if auto else find_hardware(request.hardware)
    if hardware and hardware.disk_bytes_per_s is not None and not request.arena:
        # The arena of a device behind a host is one buffer, into which no file can be mapped.
        arenas = {"contiguous": arenas["contiguous"]}
    name = _preferred(asked, arenas, request.budget)
    if hardware:
        return arenas[name], hardware
    files = WeightFiles(payload.files, folder) if payload.files else None
    if kind == ACCELERATOR:
        return arenas[name], measure_accelerator(request.device, payload.weights, files)
    if files is None:
        return arenas[name], measure_cpu(payload.weights, None, "there is no weight file to read")
    if kind == "sim":  # the link from its host is taken to be as fast as its disk
        measured = measure_cpu(payload.weights, Arrival(files.disk(), None))
        return arenas[name], replace(measured, disk_bytes_per_s=measured.link_bytes_per_s)
    fits = partial(_fits_blocks, payload.storages, arenas[name])
    arrival = files.arrival(mapped=name == "mapped", fits=fits)
    if name == "mapped":
        return arenas[name], measure_cpu(payload.weights, arrival)
    why = arrival.why or _why_not_mapped(asked, request, arenas.get("mapped"))
    return arenas[name], measure_cpu(payload.weights, arrival, why)


def _preferred(asked: _Asked, arenas: Mapping[str, Arena], budget: int) -> str:
    """The first arena whose floor the budget reaches.

    Raises BudgetError, with the lowest floor, where it reaches none: before the machine is measured.
    """
    if len(arenas) == 1:
        return next(iter(arenas))
    floors: dict[str, int] = {}
    for name, arena in arenas.items():
        floors[name] = asked.floor(arena).upper_bytes
        if floors[name] <= budget:
            return name
    lowest = min(floors, key=floors.__getitem__)
    check_floor(asked.demand(arenas[lowest]), budget, asked.payload.storage_names())
    return lowest


def _fits_blocks(storages: Sequence[Storage], arena: Arena, block: int) -> bool:
    """Tells whether most bytes have the same offset within a block in the arena as in their files.

    Direct reads into the arena need this. `block` is the size of a block in bytes.
    """
    fits = {True: 0, False: 0}
    for storage, place in zip(storages, arena.layout, strict=True):
        for extent in storage.extents if place >= 0 else ():
            fits[(place + extent.storage_offset - extent.file_offset) % block == 0] += extent.nbytes
    return fits[True] >= fits[False]


def _why_not_mapped(asked: _Asked, request: PlanRequest, mapped: Arena | None) -> str:
    if request.arena:
        return "asked for"
    if mapped is not None:
        least = format_size(asked.floor(mapped).upper_bytes)
        return f"a mapped arena needs {least} and the budget is {format_budget(request.budget)}"
    if not supports_populate():
        return "this system cannot populate file mappings"
    return (
        "a weight lies in several pieces of its files, or at another alignment than it is computed on, so "
        "what streams is copied, also from the page cache"
    )


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

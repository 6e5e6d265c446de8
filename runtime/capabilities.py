"""What a program can do: ways to read weights, and kinds of program. `registered` names all there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.schedule.bound.relaxation import pass_ns
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Arena, Pool, Trace
from penstock.schedule.facts.problem import NEARLY, Demand, Problem, pass_counts
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.planner import Floor, check_floor, floor

if TYPE_CHECKING:
    from penstock.runtime.files.source import Source
    from penstock.runtime.memory_split import MemorySplit
    from penstock.runtime.module import LoadedMethod, StreamedModule
    from penstock.runtime.program import Program
    from penstock.runtime.stream.engine import PooledReads
    from penstock.runtime.stream.loaded import LoadedWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Need:
    """What a way to read has to have in memory: facts, the storages that are kept, a pool if there is one.

    With a pool, the payload's traces are those of what is read whole. Of needs that are as good, that of the
    lowest `rank` counts.
    """

    way: Way
    payload: Payload
    keep: frozenset[int] = frozenset()
    pool: Pool | None = None
    rank: int = 0

    def demand(self, arena: Arena) -> Demand:
        return Demand(self.payload.storages, self.payload.traces, arena, self.keep, pool=self.pool)

    def floor(self, arena: Arena) -> Floor:
        return floor(self.demand(arena))


class Share(NamedTuple):
    """A division of a budget: the problem with its pool, and the bytes that passes are expected to miss.

    No plan of it takes less than `ns` nanoseconds, summed over passes of all methods (`pass_counts`).
    """

    ns: int
    problem: Problem
    missed: int = 0


@dataclass(frozen=True)
class Way:
    """A way to read weights. This one reads each whole, into the arena, before the steps that read it."""

    name: str
    in_python: bool = False
    """Tells whether only Python can read so."""

    def needs(self, payload: Payload, keep: frozenset[int], device: str) -> Iterator[Need]:
        """Yield what has to be in memory on a device, nothing if nothing can be read so there."""
        yield Need(self, payload, keep)

    def whole_reads(self, traces: Sequence[Trace], pool: Pool | None) -> tuple[Trace, ...]:
        """Return the traces of what is read whole, where a pool serves the rest."""
        return tuple(traces)

    def shares(self, problem: Problem, budget: int, routes: Any, names: Sequence[str]) -> list[Share]:
        """Return the best divisions of a budget that reaches the problem's floor.

        Calls ask for what `routes` say, or for everything as often. `names` are those of the storages.
        """
        room, counts = budget - problem.outside_bytes, pass_counts(problem.traces)
        times = (pass_ns(problem, trace, room) for trace in problem.traces)
        return [Share(sum(count * ns for count, ns in zip(counts, times, strict=True)), problem)]

    def check(self, trace: Trace) -> None:
        """Raise StreamError for a method that this process cannot compute as it was compiled."""

    def open(
        self, plan: Plan, payload: Payload, source: Source, streamer: Any, *, debug: bool
    ) -> PooledReads | None:
        """Return the pool of a plan in the engine that streams; None if it has none that is read so."""
        return None


def needs_of(ways: Iterable[Way], payload: Payload, keep: frozenset[int], device: str) -> list[Need]:
    """Return what each way needs on a device, those first that count where several are as good."""
    needs = [need for way in ways for need in way.needs(payload, keep, device)]
    return sorted(needs, key=lambda need: need.rank)


def find_shares(
    problems: Sequence[tuple[Way, Problem]], budget: int, routes: Any, names: Sequence[str]
) -> list[Share]:
    """The best divisions of a budget for each problem whose floor it reaches."""
    shares = []
    for way, problem in problems:
        with suppress(BudgetError):
            check_floor(problem, budget, names)
            shares += way.shares(problem, budget, routes, names)
    return shares


def fastest_plan(shares: Sequence[Share], budget: int, plan_of: Callable[[Problem, int], Plan]) -> Plan:
    """The plan of the fastest share; of shares that are about as fast, the one that moves fewest bytes.

    A share is planned unless another plan is known to be faster.
    """
    plans: list[tuple[int, int, Plan]] = []  # with the bytes that passes move, and their time
    for share in sorted(shares, key=lambda share: share.ns):
        if not plans or share.ns <= NEARLY * min(ns for _, ns, _ in plans):
            plan = plan_of(share.problem, budget)
            moved = (schedule.moved_bytes("in") for schedule in plan.schedules)
            plans.append((_counted(plan, moved) + share.missed, plan_ns(plan), plan))
    enough = NEARLY * min(ns for _, ns, _ in plans)
    return min((planned for planned in plans if planned[1] <= enough), key=lambda planned: planned[0])[2]


def plan_ns(plan: Plan) -> int:
    """The time that is expected of a plan, over as many passes of each method as count."""
    return _counted(plan, map(plan.expected_ns, range(len(plan.schedules))))


def _counted(plan: Plan, amounts: Iterable[int]) -> int:
    """The sum of amounts, one for each method, over as many passes as count for that."""
    return sum(count * amount for count, amount in zip(pass_counts(plan.traces), amounts, strict=True))


class Kind:
    """What a program is for. This one computes results, and holds nothing but weights."""

    variant = ""
    """The name of this program among `variants`, of which one is loaded: they keep more or less in memory."""

    variants: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """The artifact's files beside those of every program."""

    def payload(self, stored: Payload) -> Payload:
        """Return the facts of this variant."""
        return stored

    @property
    def resident_bytes(self) -> int:
        """Bytes that calls hold throughout, beside weights and activations."""
        return 0

    def step(self, payload: Payload) -> set[int]:
        """Return the graphs whose time counts where variants are compared."""
        return {method.graph for method in payload.methods}

    def check(self) -> None:
        """Raise SourceError if the files are not those that were compiled."""

    def module(
        self, payload: Payload, methods: Mapping[str, LoadedMethod], weights: LoadedWeights, name: str
    ) -> StreamedModule | None:
        """Return the module that runs the methods, None for a module of any program."""
        return None


AUTO = "auto"


class Choice(NamedTuple):
    """A variant of a program, the plan for what it leaves to weights, and the division of memory."""

    program: Program
    plan: Plan
    split: MemorySplit | None = None

    @property
    def step_ns(self) -> int:
        """The predicted time of a step."""
        graphs = self.program.kind.step(self.program.payload)
        return sum(schedule.predicted_ns for schedule in self.plan.schedules if schedule.graph in graphs)


def candidates(program: Program, activations: str) -> Sequence[Program]:
    """The variants of a program that `activations` allows, the one that keeps most first.

    Raises PlanError for a variant that there is not.
    """
    variants = program.variants
    if activations == AUTO:
        return [*variants.values()] or [program]
    if activations not in variants:
        problem = "is for programs that compile_training made: leave it out"
        if variants:
            problem = f"is not in this program: choose from {', '.join(map(repr, (AUTO, *variants)))}"
        raise PlanError(f"activations={activations!r} {problem}")
    return [variants[activations]]


def planned_for(program: Program, plan: Plan) -> Program:
    """The variant that a plan was made for; the program itself if there is none."""
    graphs = {trace.graph for trace in plan.traces}
    variants = program.variants.values()
    return next((v for v in variants if {trace.graph for trace in v.payload.traces} == graphs), program)


def choose(programs: Sequence[Program], plan_for: Callable[[Program], Choice]) -> Choice:
    """The variant whose step is predicted to take the least time.

    `plan_for` raises BudgetError for a variant that does not fit. If none fits, the error is that of the one
    that needs the least memory.
    """
    best: tuple[int, Choice] | None = None
    refused: dict[int, tuple[Program, BudgetError]] = {}
    for program in programs:
        try:
            choice = plan_for(program)
        except BudgetError as error:
            refused[program.activation_bytes + (error.floor_bytes or 0)] = program, error
            continue
        nanoseconds = choice.step_ns
        if program.kind.variant:
            _log.info("activations=%r: %s a step", program.kind.variant, format_time(nanoseconds))
        if best is None or nanoseconds < best[0]:
            best = nanoseconds, choice
        if not choice.plan.streamed_bytes:
            break  # what computes more is not faster
    if best is not None:
        return best[1]
    program, least = refused[min(refused)]
    if not program.kind.variant:
        raise least
    raise BudgetError(
        f"{least}, with activations={program.kind.variant!r}, which needs the least",
        floor_bytes=least.floor_bytes,
        step=least.step,
        weights=least.weights,
    ) from least

"""The rungs of a training program: which of them runs in a given memory, and what each of them keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.passes.training.facts import Rung, Training
from penstock.runtime.memory_split import MemorySplit
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.program import Program

_log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """The program of a rung, the plan for what it leaves to weights, and the division of memory."""

    program: Program
    plan: Plan
    split: MemorySplit | None = None


def payload_of(payload: Payload, training: Training, rung: Rung) -> Payload:
    """A payload without the methods of other rungs, and without plans, which are of all methods."""
    other_methods = {name for other in training.rungs if other != rung for name in other.methods}
    methods = tuple(method for method in payload.methods if method.name not in other_methods)
    graphs = {method.graph for method in methods}
    return replace(
        payload,
        methods=methods,
        traces=tuple(trace for trace in payload.traces if trace.graph in graphs),
        probes=tuple(order for order in payload.probes if order.graph in graphs),
        plans=(),
    )


def candidates(program: Program, activations: str) -> Sequence[Program]:
    """The programs of the rungs that `activations` allows, the one that keeps most first.

    Raises PlanError for a rung that there is not.
    """
    rungs = program.rungs
    if activations == AUTO:
        return [*rungs.values()] or [program]
    if activations not in rungs:
        allowed = ", ".join(map(repr, (AUTO, *rungs)))
        raise PlanError(
            f"activations={activations!r} is not in this program: choose from {allowed}"
            if rungs
            else f"activations={activations!r} is for programs that compile_training made: leave it out"
        )
    return [rungs[activations]]


def planned_for(program: Program, plan: Plan) -> Program:
    """The program of the rung that a plan was made for; the program itself if there is none."""
    graphs = {trace.graph for trace in plan.traces}
    fitting = (other for other in program.rungs.values() if {t.graph for t in other.payload.traces} == graphs)
    return next(fitting, program)


def choose(programs: Sequence[Program], plan_for: Callable[[Program], Choice]) -> Choice:
    """The rung whose forward and backward are predicted to take the least time together.

    `plan_for` raises BudgetError for a rung that does not fit. If none fits, the error is that of the rung
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
        nanoseconds = step_ns(choice)
        if program.rung is not None:
            _log.info("activations=%r: %s a step", program.rung.name, format_time(nanoseconds))
        if best is None or nanoseconds < best[0]:
            best = nanoseconds, choice
        if not choice.plan.streamed_bytes:
            break  # what computes more is not faster
    if best is not None:
        return best[1]
    program, least = refused[min(refused)]
    if program.rung is None:
        raise least
    raise BudgetError(
        f"{least}, with activations={program.rung.name!r}, which needs the least",
        floor_bytes=least.floor_bytes,
        step=least.step,
        weights=least.weights,
    ) from least


def step_ns(choice: Choice) -> int:
    """The predicted time of a step: of all methods, if the program is not trained."""
    rung, plan = choice.program.rung, choice.plan
    graphs = {
        method.graph
        for method in choice.program.payload.methods
        if rung is None or method.name in rung.methods[:2]
    }
    return sum(schedule.predicted_ns for schedule in plan.schedules if schedule.graph in graphs)


@dataclass(frozen=True)
class RungBytes:
    """Bytes of a rung: what is kept, all activations, and the weights that its backward reads, each time."""

    activations: str
    kept_bytes: int
    activation_bytes: int
    backward_read_bytes: int


def rung_bytes(program: Program) -> list[RungBytes]:
    """The bytes of each rung, at the exported sizes; none for a program that is not trained."""
    weights = [0 if storage.kind == "produced" else storage.nbytes for storage in program.payload.storages]
    reports = []
    for name, variant in program.rungs.items():
        traces = [t for t in variant.payload.traces if variant.rung and t.method in variant.rung.methods[1:]]
        read = max(sum(weights[s] for step in trace.steps for s in step.reads) for trace in traces)
        reports.append(RungBytes(name, variant.kept_bytes, variant.activation_bytes, read))
    return reports


def dynamic_values(program: Program) -> tuple[str, ...]:
    """The values of dynamic size that a forward keeps for its backward although it has places for others."""
    if program.training is None or not program.value_bytes:
        return ()
    return tuple(
        method.inputs[leaf].name
        for method in program.payload.methods
        for leaf in program.training.made(method.name)
        if any(isinstance(size, str) for size in method.inputs[leaf].shape)
    )

"""Predicts how a model runs on other hardware: the model is exported without being built, and planned."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from penstock._extras import find_model
from penstock.models.configuration import (
    builder,
    cache_bytes_per_token,
    inputs_of,
    notes_of,
    read_config,
)
from penstock.passes.activations import Activations
from penstock.passes.annotate import annotate_with_values
from penstock.passes.building.fake_export import Built
from penstock.passes.building.refusals import check_inputs, sentence, where
from penstock.runtime.memory_split import WORKSPACE, MemorySplit, parse_host_memory
from penstock.runtime.program import Program
from penstock.runtime.sparse.units import read_routes
from penstock.schedule.clock.event_graph import launched_steps, settle, stalls_of
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import BudgetError, PassError, SourceError
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.facts.model import Arena, Hardware
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.host import host_bytes
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report import comparison as whatif
from penstock.schedule.report.verdict import tokens_of, verdict
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.sparse.replay import simulated_calls
from penstock.schedule.sparse.routes import profile_of


@dataclass(frozen=True)
class Advice:
    """A plan, sentences that judge it, and, if asked for, a comparison with other policies and other budgets.

    `tokens` has the number of tokens in a pass, by method. `floor_bytes` is the smallest budget for the
    plan's arena.
    """

    plan: Plan
    tokens: dict[str, int]
    floor_bytes: int
    verdict: tuple[str, ...]
    comparison: list[dict[str, Any]] | None
    points: tuple[whatif.Point, ...] | None


def advise(
    program: Program, decided: Plan, again: Callable[[int], Plan], *, compare: bool, sweep: bool
) -> Advice:
    """Judge a plan of `program` beside other policies, and beside plans that `again` makes for other budgets.

    `again` takes a budget in bytes and plans for the hardware and options of `decided`. With `compare`, the
    result has the times of other policies; with `sweep`, it has the points of the curve of time against
    budget.
    """
    point, lowest = whatif.point_of(decided), _lowest(again)
    points = None
    if sweep:
        points = whatif.sweep(again, lowest=lowest, highest=max(lowest, program.largest_budget))
    tokens = tokens_of(program.payload.methods)
    judged = verdict(decided, tokens, point.policies)
    return Advice(decided, tokens, lowest, judged, _comparison(point) if compare else None, points)


def _comparison(point: whatif.Point) -> list[dict[str, Any]]:
    """Rows of the plan, its bound and other policies: name, seconds of a pass, ratio to the plan's."""
    rows = [("this plan", point.predicted_ns), *point.policies.items()]
    if point.lower_bound_ns is not None:
        rows.append((whatif.BEST, point.lower_bound_ns))
    return [
        {"policy": name, "seconds": ns / 1e9, "times": ns / max(1, point.predicted_ns)}
        for name, ns in sorted(rows, key=lambda row: row[1])
    ]


def simulated(plan: Plan) -> list[dict[str, Any]]:
    """The times in ns of the first and of a steady pass of each method on a virtual clock, as JSON."""
    facts, plan = [], joined(plan)
    for number, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        if not trace.steps:
            continue
        launched = launched_steps(plan, number)
        done = settle(trace, schedule, plan.hardware, plan.wrap, launched=launched)
        stalls = stalls_of(trace, done.steady)
        facts.append(
            {
                "method": trace.method,
                "first_ns": done.first_ns,
                "period_ns": done.period_ns,
                "predicted_ns": schedule.predicted_ns,
                "compute_ns": trace.compute_ns,
                "copied_bytes": schedule.moved_bytes("in"),
                "written_bytes": schedule.moved_bytes("out"),
                "first_stall_ns": sum(stalls_of(trace, done.first)),
                "stall_ns": sum(stalls),
                "stalls": [
                    {"step": step.name, "ns": ns} for step, ns in zip(trace.steps, stalls, strict=True) if ns
                ],
            }
        )
    return facts


def simulated_routes(
    program: Program, plan: Plan, path: Path, facts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The facts of `simulated`, with those of the recorded calls of each method, in bytes and nanoseconds.

    `path` is the file of routes, and `number` that of a call in it.

    Raises SourceError and PayloadError for routes that cannot be read or are of other weights, and PlanError
    for a plan that reads everything whole.
    """
    payload = program.payload
    profile = profile_of(read_routes(path), payload.storages, payload.traces, payload.storage_names())
    calls = [
        {
            "number": call.number,
            "method": call.method,
            "asked_bytes": call.asked.nbytes,
            "missed_bytes": call.missed.nbytes,
            "copied_bytes": call.copied_bytes,
            "rounds": call.rounds,
            "stall_ns": call.stall_ns,
            "total_ns": call.total_ns,
        }
        for call in simulated_calls(plan, profile)
    ]
    return [fact | {"calls": [call for call in calls if call["method"] == fact["method"]]} for fact in facts]


def _lowest(make: Callable[[int], Plan]) -> int:
    """The floor in bytes, which the planner's error names for a budget below it."""
    try:
        return make(1).budget
    except BudgetError as error:
        return error.floor_bytes or 1


_ALIGNMENT = 64


@dataclass(frozen=True)
class Model:
    """The facts of a model that was never built, and the bytes that it needs beside weights.

    Attributes:
        name: The source that it was read from.
        payload: Its weights and traces.
        activations: The most bytes of intermediate values.
        cache_bytes: Bytes of a key-value cache for the context asked for, which the program does not hold.
        notes: Sentences about what the figures leave out.
    """

    name: str
    payload: Payload
    activations: int
    cache_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names of the dtypes of the weights, sorted."""
        return tuple(sorted({part.dtype for weight in self.payload.weights for part in weight.parts}))

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that can run the model, on any hardware."""
        return floor(Demand(self.payload.storages, self.payload.traces, self.arena)).upper_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; each storage is counted once."""
        return sum(s.nbytes for s in self.payload.storages)

    @property
    def arena(self) -> Arena:
        """The arena of the model's weights on a device, which is one buffer."""
        storages, traces = self.payload.storages, self.payload.traces
        return packed_arena(storages, traces, kind="contiguous", granule=_ALIGNMENT, alignment=_ALIGNMENT)

    def facts(self) -> dict[str, Any]:
        """Return the facts as JSON, in bytes."""
        return {
            "model": self.name,
            "weight_bytes": self.weight_bytes,
            "dtypes": list(self.dtypes),
            "floor_bytes": self.floor_bytes,
            "activation_bytes": self.activations,
            "cache_bytes": self.cache_bytes,
            "steps": sum(len(trace.steps) for trace in self.payload.traces),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Finding:
    """What one budget makes of a model on one kind of hardware.

    Attributes:
        hardware: The machine.
        split: The division of its memory.
        budget: Bytes for weights.
        floor_bytes: The smallest budget that can run the model.
        plan: The plan; None if the model does not run.
        verdict: Sentences: how fast it runs and why, or why it does not run.
    """

    hardware: Hardware
    split: MemorySplit
    budget: int
    floor_bytes: int
    plan: Plan | None
    verdict: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Return the finding as JSON, in bytes and seconds."""
        plan, split = self.plan, self.split
        fact = {
            "hardware": self.hardware.name,
            "runs": plan is not None,
            "budget_bytes": self.budget,
            "floor_bytes": self.floor_bytes,
            "device_bytes": self.budget + split.activations + split.workspace + split.reserved,
            "activation_bytes": split.activations,
            "cache_bytes": split.reserved,
            "verdict": list(self.verdict),
        }
        if plan is None:
            return fact
        return fact | {
            "seconds_per_pass": plan.predicted_seconds,
            "lower_bound_seconds": plan.lower_bound_seconds,
            "confidence": asdict(plan.confidence),
            "streamed_bytes_per_pass": plan.streamed_bytes,
            "host_bytes": host_bytes(plan),
            "disk_bytes_per_pass": sum(sum(s.staged) for s in plan.schedules),
        }


def read_model(source: str, *, tokens: int = 1, context: int = 0, dtype: str | None = None) -> Model:
    """Export a model without building it.

    Args:
        source: A transformers `config.json`, its folder or name in the local cache, or `module:function`. The
            function takes nothing, and returns a module and its example inputs.
        tokens: The length of a call.
        context: The tokens of a key-value cache.
        dtype: Replaces the dtype of the configuration.

    Raises:
        SourceError: The source cannot be read.
        PassError: The model does not export; the message names the line.
    """
    build, inputs = open_source(source, tokens=tokens, dtype=dtype)
    exported = Built.by(build, "cuda").export(inputs())
    cache = 0
    notes: tuple[str, ...] = ()
    if Path(source).exists():
        config = read_config(Path(source))
        cache, notes = context * cache_bytes_per_token(config, source, dtype), notes_of(config)
    annotated = annotate_with_values(exported)
    activations = Activations.of(exported, annotated.propagated["forward"])
    return Model(source, annotated.payload, activations.peak(), cache, notes)


Inputs = Callable[[], Sequence[Any] | Mapping[str, Any]]


def open_source(
    source: str, *, tokens: int = 1, dtype: str | None = None
) -> tuple[Callable[[], nn.Module], Inputs]:
    """A function that builds the model of `source`, and one that gives inputs then. Raises SourceError."""
    source = find_model(source)
    path = Path(source)
    if not path.exists():
        return _from_factory(source)
    config = read_config(path)
    inputs = inputs_of(config, source, tokens=tokens, dtype=dtype)
    return builder(config, source, dtype), lambda: inputs


def find(model: Model, hardware: str, budget: str | None, host_memory: str | None = None) -> Finding:
    """Plan a model for a machine that need not be here.

    Args:
        model: What `read_model` returned.
        hardware: A preset, as for `find_hardware`.
        budget: Bytes for weights, a size, or a share (`"50%"`). Default: what the device has left.
        host_memory: Bytes of weights that the host holds; it reads others from its disk.

    Returns:
        The plan and its verdict; without a plan if the budget is below the floor.

    Raises:
        PlanError: There is no such hardware.
        BudgetError: A value is no size.

    Example:
        A model's configuration is enough, and nothing is built:

            model = read_model("qwen3-8b/config.json", tokens=2048)
            print(*find(model, "rtx4070", "9GB").verdict)
    """
    machine = find_hardware(hardware)
    storages = model.payload.storages
    traces = tuple(with_times(trace, machine) for trace in model.payload.traces)
    total = machine.memory_nbytes or model.weight_bytes
    split = MemorySplit(total, model.activations, WORKSPACE, model.cache_bytes)
    asked = split.weights if budget is None else parse_size(budget, total=model.weight_bytes)
    asked = max(0, min(asked, model.weight_bytes))
    least = model.floor_bytes
    host_bytes = parse_host_memory(host_memory, model.weight_bytes)
    problem = Problem(storages, traces, model.arena, hardware=machine, host=host_bytes)
    plan = partial(make_plan, problem, names=model.payload.storage_names())
    try:
        chosen = plan(asked)
    except BudgetError as error:
        return Finding(machine, split, asked, least, None, (f"It does not run: {error}.",))
    judged = verdict(chosen, tokens_of(model.payload.methods))
    return Finding(machine, split, asked, least, chosen, (*_room(split, asked, machine), *judged))


def _room(split: MemorySplit, budget: int, machine: Hardware) -> Iterator[str]:
    """Yield a sentence if the memory of the device is too small for the budget."""
    if machine.memory_nbytes is not None and budget > split.weights:
        yield (
            f"It does not fit into {machine.name}: {format_budget(budget)} for weights beside {split}; "
            f"give at most {format_size(max(0, split.weights))}."
        )


def _from_factory(source: str) -> tuple[Callable[[], nn.Module], Inputs]:
    function = _function(source)
    built: list[tuple[nn.Module, Any]] = []

    def build() -> nn.Module:
        returned = function()
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise PassError(
                f"{source} returns {type(returned).__name__}, expected a module and example inputs"
            )
        built.append(returned)
        return returned[0]  # type: ignore[no-any-return]

    def inputs() -> Sequence[Any] | Mapping[str, Any]:
        module, example = built[0]
        check_inputs(module, example, source)
        return example  # type: ignore[no-any-return]

    return build, inputs


def _function(source: str) -> Callable[[], Any]:
    module, _, name = source.partition(":")
    try:
        with _here():
            value = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        hint = f"; write {module[:-3]}:{name}, without .py" if module.endswith(".py") else ""
        reason = sentence(error)
        if isinstance(error, SyntaxError):
            reason = f"{error.filename}:{error.lineno}: {error.msg}"
        elif not isinstance(error, ImportError | AttributeError):
            reason = f"{type(error).__name__}{where(error)}: {reason}"
        raise SourceError(f"{source} cannot be imported: {reason}{hint}") from error
    if not callable(value):
        raise SourceError(f"{source} is {type(value).__name__}, expected a function")
    _check_no_arguments(source, value)
    return value  # type: ignore[no-any-return]


def _check_no_arguments(source: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
        signature.bind()
    except TypeError as error:
        raise SourceError(
            f"{source} takes {signature}, expected a function that can be called without arguments"
        ) from error
    except ValueError:  # a builtin without a signature
        return


@contextmanager
def _here() -> Iterator[None]:
    """Let modules in the current folder be imported, as with `python -m`."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))

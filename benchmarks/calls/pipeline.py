"""Predicts seconds per image of a text-to-image pipeline under one cap of memory, beside other policies.

CLIP-L, T5 XXL, the transformer of Flux.1-dev and its VAE's decoder, in bfloat16 at their real sizes, are
exported with fake weights (pipeline_parts.py) and planned for a preset of hardware. Nothing is built and
nothing runs: every figure is a prediction of the simulation. The components share the cap, and one holds
memory at a time, so each begins with nothing on the device: a turn of the plan first copies what stays, then
runs all its calls on the virtual clock, the first of them cold. Weights wait in page-locked host memory.

Baselines are those of `schedule/report/comparison.py`, with the same memory, link and compute and no
overhead. Their turn is all calls but the first in the steady state, and a first one for which all bytes are
copied as well, hidden behind its compute as far as can be: no less than it takes. Compute is a roofline at
the vendor's peaks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.calls.pipeline_parts import list_parts
from benchmarks.calls.pipeline_table import BEST, REST, WHOLE, Image, Turn, render
from benchmarks.table import write_between
from penstock.models.preflight import Model
from penstock.runtime.memory_split import WORKSPACE, MemorySplit
from penstock.schedule.clock.event_graph import simulate
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.facts.model import Hardware
from penstock.schedule.facts.problem import Problem
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.plan import Plan
from penstock.schedule.planner import make_plan
from penstock.schedule.report import comparison
from penstock.schedule.verify.proof import verify_plan

BEGIN = "<!-- benchmarks.calls.pipeline writes from here -->"
CAPS = ("24GB", "16GB", "12GB", "8GB")


def plan_turn(model: Model, calls: int, cap: int, hardware: Hardware) -> Turn:
    """Plan a component within a cap on all memory; BudgetError where it does not fit."""
    payload = model.payload
    trace = with_times(payload.traces[0], hardware)
    split = MemorySplit(cap, model.activations, WORKSPACE)
    budget = min(split.budget(model.floor_bytes), model.weight_bytes)
    problem = Problem(payload.storages, (trace,), model.arena, hardware=hardware)
    plan = make_plan(problem, budget, names=payload.storage_names())
    verify_plan(payload.storages, (trace,), plan)
    ns, copied = _run(plan, calls)
    whole_ns = hardware.copy_ns(model.weight_bytes)
    bound = plan.schedules[0].lower_bound_ns or 0
    baselines = {name: ns / 1e9 for name, ns in _baselines(model, plan, calls).items()}
    return Turn(
        component=model.name,
        calls=calls,
        weight_bytes=model.weight_bytes,
        beside_bytes=split.activations + split.workspace,
        held_bytes=_outside(plan) + plan.arena_bytes,
        copied_bytes=copied,
        seconds=ns / 1e9,
        bound_seconds=max(calls * max(bound, trace.compute_ns), whole_ns) / 1e9,
        compute_seconds=calls * trace.compute_ns / 1e9,
        steady_seconds=plan.predicted_seconds,
        baselines=baselines | {BEST: min(baselines.values())},
    )


def _filled(plan: Plan) -> int:
    """Bytes that are copied before the first call: those that never leave."""
    return _outside(plan) + sum(one.stop - one.start for one in plan.resident)


def _outside(plan: Plan) -> int:
    return sum(plan.sizes[s] for s in plan.outside)


def _run(plan: Plan, calls: int) -> tuple[int, int]:
    """Nanoseconds of some calls that begin with nothing on the device, and bytes copied for them.

    Copies that the last call would make for a further call are left out.
    """
    trace, schedule = plan.traces[0], plan.schedules[0]
    last = simulate(trace, schedule, plan.hardware, plan.wrap, calls)[-1]
    ended = last.reads[-1][1] + trace.tail_ns
    filled = _filled(plan)
    return plan.hardware.copy_ns(filled) + ended, filled + calls * plan.streamed_bytes


def _baselines(model: Model, plan: Plan, calls: int) -> dict[str, int]:
    """Nanoseconds of each policy's turn, those that do not fit left out."""
    hardware, trace, storages = plan.hardware, plan.traces[0], model.payload.storages
    periods = comparison.other_policies(plan, find_hardware("server"))
    periods.pop("everything resident", None)
    found, fits = {}, model.weight_bytes <= plan.budget
    for name, period in periods.items():
        copied = model.weight_bytes
        if name == REST and not fits:  # the host's steps stay there, and so does one that fits in part
            largest = max(sum(storages[s].nbytes for s in step.reads) for step in trace.steps)
            copied = max(0, plan.budget - largest)
        found[name] = (calls - 1) * period + max(period, hardware.copy_ns(copied))
    if fits:
        found[WHOLE] = hardware.copy_ns(model.weight_bytes) + calls * trace.compute_ns
    return found


def plan_image(models: Sequence[tuple[Model, int]], cap: int, hardware: Hardware) -> Image:
    """Plan all components, each with how often it is called, within one cap."""
    turns = []
    for model, calls in models:
        try:
            turns.append(plan_turn(model, calls, cap, hardware))
        except BudgetError as error:
            return Image(cap, failure=f"{model.name}: {error}")
    return Image(cap, tuple(turns))


def _parsed(caps: Sequence[str], hardware: Hardware) -> list[int]:
    try:
        return sorted(
            {parse_size(cap, total=hardware.memory_nbytes, name="cap") for cap in caps}, reverse=True
        )
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from error


def _found(name: str) -> Hardware:
    try:
        return find_hardware(name)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error


def main(
    *,
    cap: Annotated[
        list[str] | None, typer.Option(help="All memory of the device, 12GB or 50%; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of denoising for an image.")] = 28,
    pixels: Annotated[int, typer.Option(min=16, help="Sides of the image, a multiple of 16.")] = 1024,
    layers: Annotated[
        int | None, typer.Option(min=1, help="At most as many blocks of a component, for a quick look.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="The preset to plan for.")] = "rtx4090",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this document.")] = None,
) -> None:
    """Predict seconds per image of a pipeline of Flux.1-dev's sizes. Nothing is measured.

    Examples:

      python -m benchmarks.calls.pipeline --json pipeline.json --docs docs/notes/plans.md

      python -m benchmarks.calls.pipeline --cap 12GB --cap 8GB --steps 4
    """
    if pixels % 16:
        raise typer.BadParameter(f"--pixels {pixels} is not a multiple of 16")
    machine = _found(hardware)
    caps = _parsed(cap or CAPS, machine)
    say = partial(typer.echo, err=True)
    models = []
    for part in list_parts(steps=steps, pixels=pixels, layers=layers):
        say(f"exporting {part.name} without building it")
        models.append((part.export(), part.calls))
    images = []
    for nbytes in caps:
        say(f"planning within {format_size(nbytes)}")
        images.append(plan_image(models, nbytes, machine))
    libraries = {name: version(name) for name in ("torch", "transformers", "diffusers")}
    options = {"hardware": machine.name, "steps": steps, "pixels": pixels, "layers": layers}
    text = (
        f"Predicted for {machine.name} ({machine.note}), {pixels} x {pixels}, {steps} steps; "
        f"{', '.join(f'{name} {number}' for name, number in libraries.items())}. No GPU was used.\n\n"
        f"{render(images)}"
    )
    if json_path:
        about = {"kind": "prediction of a simulation, not a measurement", "options": options}
        facts = about | {"libraries": libraries, "images": [image.facts() for image in images]}
        json_path.write_text(json.dumps(facts, indent=1) + "\n")
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)

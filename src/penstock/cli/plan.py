"""`penstock plan`: the weights that stay and those that stream within a budget, and whether that pays."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import check_outputs, check_there
from penstock.schedule.facts.sizes import format_budget, format_size, format_time

if TYPE_CHECKING:
    from penstock.models.preflight import Advice
    from penstock.runtime.program import Program
    from penstock.schedule.plan import Plan
    from penstock.schedule.report.comparison import Point

EXAMPLES = (
    "penstock plan model.penstock --budget 25% --keep 'lm_head.*'",
    "penstock plan model.penstock --budget 8GB --hardware rtx4090 --sweep --report plan.html",
    "penstock plan model.penstock --budget 8GB --hardware rtx4090 --optimal --output plan.json",
)


def plan(
    artifact: options.Artifact,
    *,
    budget: options.Budget,
    keep: options.Keep = None,
    arena: options.ArenaName = None,
    hardware: options.HardwareName = "auto",
    host_memory: options.HostMemory = None,
    activations: options.Activations = "auto",
    routes: Annotated[
        Path | None,
        typer.Option(help="Recorded routes: which units calls ask for (see `replay`).", callback=check_there),
    ] = None,
    optimal: Annotated[
        bool, typer.Option("--optimal", help="Search longer where addresses are planned: on GPUs.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long --optimal searches at most.")] = 60,
    compare: Annotated[bool, typer.Option("--compare", help="Beside what other policies take.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Time against budget, with all policies.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON here.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write one page of HTML here, with pictures of it all.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here.")] = None,
    force: options.Force = False,
    trust: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Show what would stay in memory and what would stream within a budget, and whether that pays."""
    check_outputs(output, report, timeline, force=force)
    from penstock.models.preflight import advise
    from penstock.runtime.capabilities import candidates
    from penstock.runtime.program import read_program

    with console.spinner("planning") as say:
        program = candidates(read_program(artifact, trust=trust), activations)[0]
        decide = partial(program.plan, keep=keep or (), arena=arena, host_memory=host_memory, routes=routes)
        effort = ("usual", "optimal")[optimal]
        decided = decide(budget, hardware=hardware, effort=effort, seconds=seconds)

        def again(nbytes: int) -> Plan:
            say(f"planning for {format_size(nbytes)}")
            return decide(nbytes, hardware=decided.hardware)

        advice = advise(program, decided, again, compare=compare, sweep=sweep)
    if report is not None:
        _write_report(advice, artifact.absolute().name, report, force=force)
    _write(advice, output=output, timeline=timeline, force=force)
    if json:
        _print_json(program, advice)
    else:
        _print(artifact, program, advice)


def _write_report(advice: Advice, artifact: str, report: Path, *, force: bool) -> None:
    from penstock.schedule.report.drawing import save_report
    from penstock.schedule.report.verdict import Origin

    origin = Origin(artifact, console.command(), advice.tokens)
    sweep = [asdict(point) for point in advice.points or ()]
    save_report(advice.plan, report, sweep=sweep, origin=origin, force=force)


def _write(advice: Advice, *, output: Path | None, timeline: Path | None, force: bool) -> None:
    from penstock.schedule.atomic_file import replace_file, write_all

    if output is not None:
        with replace_file(output, force=force) as fd:
            write_all(fd, advice.plan.to_json().encode())
    if timeline is not None:
        advice.plan.save_timeline(timeline, force=force)


def _print_json(program: Program, advice: Advice) -> None:
    facts: dict[str, Any] = {
        "verdict": list(advice.verdict),
        "predicted_seconds": advice.plan.predicted_seconds,
        "lower_bound_seconds": advice.plan.lower_bound_seconds,
        "floor_bytes": advice.floor_bytes,
        "confidence": asdict(advice.plan.confidence),
        "plan": json_module.loads(advice.plan.to_json()),
    }
    if advice.plan.pool is not None:
        facts["units"] = {
            "pool_bytes": advice.plan.pool.nbytes,
            "weight_bytes": sum(advice.plan.sizes[s] for s in advice.plan.pool.storages),
            "expected_wait_seconds": sum(advice.plan.pool.expected_ns) / 1e9,
            "worst_wait_seconds": sum(advice.plan.pool.worst_ns) / 1e9,
        }
    if lacking := _lacking(program, advice.plan):
        facts["no_room_here"] = lacking
    if advice.plan.produced:
        facts["value_bytes"], facts["written_bytes"] = program.value_bytes, advice.plan.written_bytes
    if program.kind.variant:
        facts["kept_bytes"], facts["activation_bytes"] = program.kept_bytes, program.activation_bytes
    if advice.comparison is not None:
        facts["comparison"] = advice.comparison
    if advice.points is not None:
        facts["sweep"] = [asdict(point) for point in advice.points]
    console.print_json(facts)


def _print(artifact: Path, program: Program, advice: Advice) -> None:
    from penstock.schedule.report.drawing import terminal_timeline

    plan = advice.plan
    console.print_sentences(advice.verdict)
    facts = [("floor", format_size(advice.floor_bytes)), *_facts(program, plan)]
    console.print_facts(f"{artifact} within {format_budget(plan.budget, program.largest_budget)}", facts)
    if plan.streamed_bytes:
        console.print_text(terminal_timeline(plan, console.width()))
    if advice.comparison is not None:
        names = "policy", "a pass", "times the plan"
        rows = [
            [row["policy"], format_time(row["seconds"] * 1e9), f"{row['times']:.2f}"]
            for row in advice.comparison
        ]
        console.print_table("Beside other policies, in the same model", names, rows)
    if advice.points is not None:
        _print_sweep(advice.points)


def _facts(program: Program, plan: Plan) -> list[tuple[str, str]]:
    from penstock.schedule.report.verdict import has_costly_pool, near_best, units_of

    resident = sum(r.nbytes for r in plan.resident)
    outside = sum(program.payload.storages[s].nbytes for s in {*plan.outside} - plan.produced)
    ways = [t.direction for schedule in plan.schedules for t in schedule.transfers]
    streamed = f"{format_size(plan.streamed_bytes)} in {ways.count('in')} transfers"
    if plan.streamed_bytes > program.largest_budget:
        streamed += "; what several steps read, or lies in one granule with it, comes more than once"
    bound = "not found" if plan.lower_bound_ns is None else format_time(plan.lower_bound_ns)
    bound += f"; this plan {near_best(plan, 'it')}"
    predicted, compute = format_time(plan.predicted_ns), format_time(plan.compute_ns)
    holds, waits = units_of(plan)
    lacking = _lacking(program, plan)
    return [
        ("weights", format_size(program.weight_bytes)),
        ("arena", f"{format_size(plan.arena_bytes)}, {plan.arena.kind}, {plan.arena.backing}"),
        ("always in memory", f"{format_size(resident)} in the arena, {format_size(outside)} outside"),
        ("streamed each pass", streamed),
        *([("pool", holds), ("waiting for units", f"{waits}; measured in a load")] * has_costly_pool(plan)),
        *([("kept values", _values(program, plan, ways.count("out")))] if plan.produced else []),
        ("predicted", f"{predicted} a pass, {compute} of it compute"),
        ("best possible", bound),
        *([("activations", _kept(program))] if program.kind.variant else []),
        ("rates", f"{plan.hardware.name}: {plan.confidence.text}"),
        *([("no room here", lacking)] if lacking else []),
    ]


def _lacking(program: Program, plan: Plan) -> str:
    """What a load would not find room for now; nothing for a plan for another machine."""
    from penstock.runtime.machine.calibrate import THIS_CPU

    return program.lacking_room(plan) if plan.hardware.name == THIS_CPU else ""


def _values(program: Program, plan: Plan, transfers: int) -> str:
    """What a forward keeps in the arena, and how much of it is written to the spill file in a pass."""
    kept_bytes = f"{format_size(program.value_bytes)} from forward to backward, within the budget"
    if not plan.written_bytes:
        return f"{kept_bytes}; none leaves memory"
    hardware = plan.hardware
    rate = f"{(hardware.write_bytes_per_s or hardware.link_bytes_per_s) / 1e9:.3g} GB/s"
    assumed = "" if hardware.write_bytes_per_s else ", taken to be that of reads"
    written = f"{format_size(plan.written_bytes)} in {transfers} transfers"
    return f"{kept_bytes}; each pass writes {written} and reads them again, at {rate}{assumed}"


def _kept(program: Program) -> str:
    kept_bytes, most = format_size(program.kept_bytes), format_size(program.activation_bytes)
    return f"{program.kind.variant}: {kept_bytes} kept for the backward, {most} at most, beside the budget"


def _print_sweep(points: Sequence[Point]) -> None:
    names = list(dict.fromkeys(name for point in points for name in point.policies))
    rows = []
    for point in points:
        cells = [point.predicted_ns, point.lower_bound_ns, *(point.policies.get(name) for name in names)]
        seconds = ["-" if ns is None else f"{ns / 1e9:.4f}" for ns in cells]
        rows.append([format_size(point.budget), *seconds])
    console.print_table("Seconds a pass by budget", ("budget", "plan", "bound", *names), rows)

"""`penstock preflight`: plans for a model that was never built, on each hardware and with each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock._extras import find_model
from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import check_outputs
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.sizes import format_budget, format_size, format_time

if TYPE_CHECKING:
    from penstock.models.preflight import Finding, Model

EXAMPLES = (
    "penstock preflight Llama-3.1-405B/config.json --hardware h200 --budget 80GiB",
    "penstock preflight my_models:build --hardware rtx4090 --hardware h100 --budget 50%",
)


def preflight(
    model: Annotated[
        str,
        typer.Argument(
            help="A transformers config.json or its folder, or module:function that returns a module and "
            "example inputs.",
            callback=find_model,
            show_default=False,
        ),
    ],
    *,
    hardware: options.PresetNames,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="For weights: 80GiB, 25%. May be given again. Default: what the memory leaves.",
            callback=options.check_size("--budget"),
        ),
    ] = None,
    host_memory: options.HostMemory = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a call: 1 is a decoding step.")] = 1,
    context: Annotated[int, typer.Option(min=0, help="Tokens of a key-value cache to leave room for.")] = 0,
    dtype: options.DtypeName = None,
    report: Annotated[Path | None, typer.Option(help="Write the plan as a page of HTML here.")] = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Say whether and how a model will run on hardware that is not here, without building it."""
    check_outputs(report, force=force)
    with console.spinner("importing") as say, console.quiet():
        from penstock.models.preflight import find, read_model

        say(f"exporting {model} without building it")
        read = read_model(model, tokens=tokens, context=context, dtype=dtype)
        findings = []
        for name in hardware:
            for asked in budget or (None,):
                say(f"planning for {name}" + (f" within {asked}" if asked else ""))
                findings.append(find(read, name, asked, host_memory))
    if report is not None:
        _write_report(read, findings, report, force=force)
    if json:
        console.print_json(read.facts() | {"findings": [finding.facts() for finding in findings]})
    else:
        _print(read, findings)
    if not any(finding.plan for finding in findings):
        raise typer.Exit(1)


def _write_report(model: Model, findings: Sequence[Finding], path: Path, *, force: bool) -> None:
    from penstock.schedule.report.drawing import save_report
    from penstock.schedule.report.verdict import Origin, tokens_of

    plans = [finding.plan for finding in findings if finding.plan is not None]
    if len(plans) != 1:
        raise PlanError(
            f"--report shows one plan, and there are {len(plans)}: give one hardware and one budget"
        )
    origin = Origin(model.name, console.command(), tokens_of(model.payload.methods))
    save_report(plans[0], path, origin=origin, force=force)


def _print(model: Model, findings: Sequence[Finding]) -> None:
    dtypes = ", ".join(model.dtypes) or "none"
    facts = [
        ("weights", f"{format_size(model.weight_bytes)} in {len(model.payload.weights)} tensors ({dtypes})"),
        ("floor", f"{format_size(model.floor_bytes)}, the least budget that works"),
        ("activations", format_size(model.activations)),
    ]
    if model.cache_bytes:
        facts.append(("key-value cache", format_size(model.cache_bytes)))
    facts += [("note", note) for note in model.notes]
    console.print_facts(model.name, facts)
    columns = ("hardware", "budget", "a pass", "bound", "copied", "host holds", "disk reads")
    console.print_table("", columns, [_row(finding) for finding in findings])
    for finding in findings:
        title = f"{finding.hardware.name}, {format_budget(finding.budget, model.weight_bytes)} for weights"
        console.print_text(f"\n{title}:")
        console.print_sentences(finding.verdict, indent="  ")


def _row(finding: Finding) -> tuple[str, ...]:
    from penstock.schedule.host import host_bytes

    start = (finding.hardware.name, format_budget(finding.budget))
    plan = finding.plan
    if plan is None:
        return (*start, "does not run", "", "", "", "")
    bound = plan.lower_bound_seconds
    disk = sum(sum(schedule.staged) for schedule in plan.schedules)
    return (
        *start,
        format_time(plan.predicted_seconds * 1e9),
        format_time(bound * 1e9) if bound is not None else "",
        format_size(plan.streamed_bytes),
        format_size(host_bytes(plan)),
        format_size(disk),
    )

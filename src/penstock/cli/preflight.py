"""What `penstock preflight` does: a model that was never built, on each hardware with each budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli import console
from penstock.models.preflight import Finding, Model, find, read_model
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.host import host_bytes


@dataclass(frozen=True)
class Preflight:
    """What the user asked for."""

    source: str
    hardware: tuple[str, ...]
    budgets: tuple[str | None, ...]
    host_memory: str | None
    tokens: int
    context: int
    dtype: str | None


def run(asked: Preflight, say: Callable[[str], None]) -> tuple[Model, list[Finding]]:
    """Export fake, and plan for every hardware and budget."""
    say(f"exporting {asked.source} without building it")
    model = read_model(asked.source, tokens=asked.tokens, context=asked.context, dtype=asked.dtype)
    findings = []
    for name in asked.hardware:
        for budget in asked.budgets:
            say(f"planning for {name}" + (f" within {budget}" if budget else ""))
            findings.append(find(model, name, budget, asked.host_memory))
    return model, findings


def write_report(findings: Sequence[Finding], path: Path) -> None:
    """The plan as a page of HTML; PlanError unless there is exactly one."""
    plans = [finding.plan for finding in findings if finding.plan is not None]
    if len(plans) != 1:
        raise PlanError(
            f"--report shows one plan, and there are {len(plans)}: give one hardware and one budget"
        )
    plans[0].save_report(path)


def print_json(model: Model, findings: Sequence[Finding]) -> None:
    """Model and findings as facts."""
    facts = {
        "model": model.name,
        "weight_bytes": model.weight_bytes,
        "dtypes": list(model.dtypes),
        "floor_bytes": model.floor_bytes,
        "activation_bytes": model.activations,
        "cache_bytes": model.cache_bytes,
        "steps": sum(len(trace.steps) for trace in model.payload.traces),
        "notes": list(model.notes),
    }
    console.print_json(facts | {"findings": [finding.facts() for finding in findings]})


def print_findings(model: Model, findings: Sequence[Finding]) -> None:
    """Tables and verdicts for people."""
    facts = [
        (
            "weights",
            f"{format_size(model.weight_bytes)} in {len(model.payload.weights)} tensors "
            f"({', '.join(model.dtypes) or 'none'})",
        ),
        ("floor", f"{format_size(model.floor_bytes)}, the least budget that works"),
        ("activations", format_size(model.activations)),
    ]
    if model.cache_bytes:
        facts.append(("key-value cache", format_size(model.cache_bytes)))
    facts += [("note", note) for note in model.notes]
    console.print_facts(model.name, facts)
    rows = [_row(finding) for finding in findings]
    columns = ("hardware", "budget", "a pass", "bound", "copied", "host holds", "disk reads")
    console.print_table("", columns, rows)
    for finding in findings:
        title = f"{finding.hardware.name}, {format_size(finding.budget)} for weights"
        console.print_text("\n".join([f"\n{title}:", *(f"  {one}" for one in finding.verdict)]))


def _row(finding: Finding) -> tuple[str, ...]:
    start = (finding.hardware.name, format_size(finding.budget))
    plan = finding.plan
    if plan is None:
        return (*start, "does not run", "", "", "", "")
    bound = plan.lower_bound_seconds
    disk = sum(sum(schedule.staged) for schedule in plan.schedules)
    return (
        *start,
        console.duration(plan.predicted_seconds),
        console.duration(bound) if bound is not None else "",
        format_size(plan.streamed_bytes),
        format_size(host_bytes(plan)),
        format_size(disk),
    )

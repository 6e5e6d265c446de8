"""What `penstock plan` and `penstock simulate` show beside the plan itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.cli import console
from penstock.cli.facts import plan_facts
from penstock.runtime.program import Program
from penstock.runtime.system.atomic import replace_file
from penstock.schedule.clock import simulation
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.model import Hardware, Plan
from penstock.schedule.facts.presets import PRESETS
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.report import whatif
from penstock.schedule.report.drawing import save_report, terminal_timeline

HOST = "server"
"""The machine that computes what does not fit, where the plan is for a device with a host."""

_STALLS = 20


def host_of(hardware: Hardware) -> Hardware | None:
    """The host that could compute the rest; None where the plan is for a CPU anyway."""
    return None if hardware.disk_bytes_per_s is None else PRESETS[HOST]


@dataclass(frozen=True)
class Asked:
    """What to plan, and for what."""

    program: Program
    budget: str
    keep: Sequence[str]
    arena: str | None
    hardware: str
    host_memory: str | None = None
    device: str = "cpu"

    def plan(self, budget: int | str | None = None, hardware: Hardware | None = None) -> Plan:
        return self.program.plan(
            budget or self.budget,
            keep=self.keep,
            arena=self.arena,
            hardware=hardware or self.hardware,
            device=self.device,
            host_memory=self.host_memory,
        )


@dataclass(frozen=True)
class Answer:
    """A plan, what is to be said of it, and the tables that were asked for."""

    plan: Plan
    verdict: tuple[str, ...]
    comparison: list[dict[str, Any]] | None
    points: tuple[whatif.Point, ...] | None


def answer(asked: Asked, say: Callable[[str], None], *, compare: bool, sweep: bool) -> Answer:
    """Plan, and think about other budgets and policies; `say` is told what takes time."""
    program, decided = asked.program, asked.plan()
    storages, host = program.payload.storages, host_of(decided.hardware)

    def make(budget: int) -> Plan:
        say(f"planning for {format_size(budget)}")
        return asked.plan(budget, decided.hardware)

    more = make(decided.budget + whatif.GIGABYTE) if decided.streamed_bytes else None
    point = whatif.point_of(decided, storages, host)
    points = None
    if sweep:
        lowest = _lowest(make)
        highest = max(lowest, program.weight_bytes)
        points = whatif.sweep(make, storages, lowest=lowest, highest=highest, host=host)
    verdict = whatif.verdict(decided, point.policies, more)
    return Answer(decided, verdict, _comparison(point) if compare else None, points)


def write(found: Answer, *, output: Path | None, report: Path | None, timeline: Path | None) -> None:
    """Write what was asked for; an existing file is refused."""
    if output is not None:
        with replace_file(output, force=False) as fd, open(fd, "wb", closefd=False) as file:
            file.write(found.plan.to_json().encode())
    if report is not None:
        sweep = [asdict(point) for point in found.points or ()]
        save_report(found.plan, report, sweep=sweep or None)
    if timeline is not None:
        found.plan.save_timeline(timeline)


def print_json(found: Answer) -> None:
    """The plan; with a comparison or a sweep, an object that has the plan in it."""
    if found.comparison is None and found.points is None:
        console.print_text(found.plan.to_json())
        return
    facts: dict[str, Any] = {"plan": json.loads(found.plan.to_json()), "verdict": list(found.verdict)}
    if found.comparison is not None:
        facts["comparison"] = found.comparison
    if found.points is not None:
        facts["sweep"] = [asdict(point) for point in found.points]
    console.print_json(facts)


def print_facts(artifact: Path, program: Program, found: Answer) -> None:
    plan = found.plan
    console.print_facts(f"{artifact} within {format_size(plan.budget)}", plan_facts(program, plan))
    if plan.streamed_bytes:
        console.print_text(terminal_timeline(plan, console.width()))
    for sentence in found.verdict:
        console.print_text(sentence)
    if found.comparison is not None:
        _print_comparison(found.comparison)
    if found.points is not None:
        _print_sweep(found.points)


def _comparison(point: whatif.Point) -> list[dict[str, Any]]:
    """The plan, its bound and every other policy, fastest first: name, seconds a pass, times the plan's."""
    rows = [("this plan", point.predicted_ns), *point.policies.items()]
    if point.lower_bound_ns is not None:
        rows.append(("no plan is faster than", point.lower_bound_ns))
    return [
        {"policy": name, "seconds": ns / 1e9, "times": ns / max(1, point.predicted_ns)}
        for name, ns in sorted(rows, key=lambda row: row[1])
    ]


def _print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    console.print_table(
        "Beside other policies, in the same model",
        ("policy", "s a pass", "times the plan"),
        [[row["policy"], f"{row['seconds']:.4f}", f"{row['times']:.2f}"] for row in rows],
    )


def _print_sweep(points: Sequence[whatif.Point]) -> None:
    names = list(dict.fromkeys(name for point in points for name in point.policies))
    rows = []
    for point in points:
        cells = [point.predicted_ns, point.lower_bound_ns, *(point.policies.get(name) for name in names)]
        seconds = ["-" if ns is None else f"{ns / 1e9:.4f}" for ns in cells]
        rows.append([format_size(point.budget), *seconds])
    console.print_table("Seconds a pass by budget", ("budget", "plan", "bound", *names), rows)


def simulated(plan: Plan) -> list[dict[str, Any]]:
    """What the plan does on a virtual clock, for each method that has steps."""
    facts = []
    for trace, schedule in zip(plan.traces, plan.schedules, strict=True):
        if not trace.steps:
            continue
        done = simulation.run(trace, schedule, plan.hardware, plan.wrap)
        stalls = done.stalls(trace)
        facts.append(
            {
                "method": trace.method,
                "first_ns": done.first_ns,
                "period_ns": done.period_ns,
                "predicted_ns": schedule.predicted_ns,
                "compute_ns": trace.compute_ns,
                "first_stall_ns": sum(stall.ns for stall in done.stalls(trace, steady=False)),
                "stall_ns": sum(stall.ns for stall in stalls),
                "stalls": [{"step": trace.steps[s.step].name, "ns": s.ns} for s in stalls],
            }
        )
    return facts


def print_simulated(path: Path, facts: Sequence[dict[str, Any]]) -> None:
    for one in facts:
        if "device" in one:
            console.print_facts(f"{path}: {one['method']} on {one['device']}", _ran(one))
            continue
        console.print_facts(
            f"{path}: {one['method']}",
            [
                (
                    "first pass",
                    f"{one['first_ns'] / 1e9:.6f} s, {one['first_stall_ns'] / 1e9:.6f} s of it waiting",
                ),
                (
                    "steady pass",
                    f"{one['period_ns'] / 1e9:.6f} s, {one['stall_ns'] / 1e9:.6f} s of it waiting",
                ),
                ("predicted", f"{one['predicted_ns'] / 1e9:.6f} s, compute {one['compute_ns'] / 1e9:.6f} s"),
            ],
        )
        longest = sorted(one["stalls"], key=lambda stall: -stall["ns"])[:_STALLS]
        if longest:
            title = f"Steps that wait, the longest {len(longest)} of {len(one['stalls'])}"
            console.print_table(title, ("step", "ms"), [[s["step"], f"{s['ns'] / 1e6:.3f}"] for s in longest])


def _ran(one: dict[str, Any]) -> list[tuple[str, str]]:
    passes = ", ".join(f"{seconds:.6f}" for seconds in one["pass_seconds"])
    return [
        ("passes, seconds", passes),
        ("outputs", ", ".join(f"{name} {shape}" for name, shape in one["outputs"].items())),
        ("copied", format_size(one["bytes_moved"])),
        ("races", "none: an event orders every two accesses of the same bytes"),
    ]


def _lowest(make: Callable[[int], Plan]) -> int:
    """The floor, which the planner names when it is asked for the impossible."""
    try:
        return make(1).budget
    except BudgetError as error:
        return error.floor_bytes or 1

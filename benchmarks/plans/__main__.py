"""Plans well-known models for many machines, and compares the plans with the bound and with baselines.

Every program of benchmarks/corpus.py, on every preset of hardware, in budgets from the floor to nearly
all, for both kinds of arena. Of each case: the plan's predicted time over the bound for its own granule,
the time of every policy of schedule/report/comparison.py in the same model over the plan's, and the
seconds that planning took, bound included. Compute is a roofline at the vendors' peaks, so it is at its
shortest and the link's share at its largest: the hardest case for the planner.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.corpus import list_programs, make_problem
from benchmarks.table import quantile, write_between
from penstock.schedule.facts.hardware import PRESETS, find_hardware, with_times
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.comparison import Setting, compare
from penstock.schedule.verify.proof import verify_plan

SHARES = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
"""Budgets, as shares of the way from the floor to all weights."""

BEGIN = "<!-- benchmarks.plans writes from here -->"
GRANULES = {"paged": 2 << 20, "contiguous": 4096}
COLUMNS = (
    *("program", "hardware", "arena", "share", "budget"),
    *("predicted_ns", "lower_bound_ns", "plan_seconds"),
)
"""The figures that are kept of each plan, beside the times of the policies."""

HOST = "server"
"""The machine that computes what does not fit, for the policy that computes on the host."""

RECORD = Path(__file__).parents[1] / "results" / "schedule.json"
HARD = 8
"""Cases of each arena, the furthest from the bound on record, that every sample of cases has."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan to make."""

    program: str
    hardware: str
    arena: str
    share: float
    check: bool = False


def run(case: Case) -> dict[str, Any]:
    """Plan a case; the figures, as JSON can carry them."""
    program, hardware = list_programs()[case.program](), PRESETS[case.hardware]
    kind: Any = case.arena
    problem = make_problem(program, with_times(program.trace, hardware), hardware, kind, GRANULES[kind])
    (trace,) = problem.traces
    lowest = floor(problem).upper_bytes
    budget = lowest + int((program.nbytes - lowest) * case.share)
    began = time.perf_counter()
    plan = make_plan(problem, budget)
    seconds = time.perf_counter() - began
    if case.check:
        verify_plan(program.storages, (trace,), plan)
    schedule = plan.schedules[0]
    host = PRESETS[HOST] if case.hardware not in ("laptop", "server") else None
    others = compare(Setting([s.nbytes for s in program.storages], trace, budget, hardware), host)
    return dataclasses.asdict(case) | {
        "storages": len(program.storages),
        "budget": budget,
        "weight_bytes": program.nbytes,
        "compute_ns": trace.compute_ns,
        "predicted_ns": schedule.predicted_ns,
        "lower_bound_ns": schedule.lower_bound_ns,
        "ratio": plan.ratio,
        "plan_seconds": round(seconds, 3),
        "policies": {name: ns for name, ns in others.items() if ns is not None},
    }


def render(results: Sequence[dict[str, Any]]) -> str:
    """The tables of all results, as markdown."""
    parts = [_reach(results), _worst(results), _policies(results), _seconds(results)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _reach(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| arena | cases | median | at most 1.02 | at most 1.05 | worst |"
    yield "|---|---|---|---|---|---|"
    for arena in GRANULES:
        ratios = [one["ratio"] for one in results if one["arena"] == arena and one["ratio"] is not None]
        if ratios:
            near, close = (sum(r <= most for r in ratios) / len(ratios) for most in (1.02, 1.05))
            yield (
                f"| {arena} | {len(ratios)} | {median(ratios):.4f} | {near:.1%} | {close:.1%} "
                f"| {max(ratios):.4f} |"
            )


def _worst(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "The worst cases:"
    yield ""
    yield "| program | hardware | arena | budget | times the bound |"
    yield "|---|---|---|---|---|"
    known = [one for one in results if one["ratio"] is not None]
    for one in sorted(known, key=lambda one: -one["ratio"])[:12]:
        share = one["budget"] / one["weight_bytes"]
        yield (
            f"| {one['program']} | {one['hardware']} | {one['arena']} | {share:.1%} | {one['ratio']:.4f} |"
        )


def _policies(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| policy | cases | plan faster (by 1 %) | as fast | plan slower | median times | most times |"
    yield "|---|---|---|---|---|---|---|"
    names = dict.fromkeys(name for one in results for name in one["policies"])
    for name in names:
        gains = [one["policies"][name] / one["predicted_ns"] for one in results if name in one["policies"]]
        faster, slower = sum(g > 1.01 for g in gains), sum(g < 0.99 for g in gains)
        yield (
            f"| {name} | {len(gains)} | {faster} | {len(gains) - faster - slower} | {slower} "
            f"| {median(gains):.2f} | {max(gains):.1f} |"
        )


def _seconds(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| program | storages | paged, s (median, most) | contiguous, s (median, most) |"
    yield "|---|---|---|---|"
    for program in dict.fromkeys(one["program"] for one in results):
        mine = [one for one in results if one["program"] == program]
        cells = []
        for arena in GRANULES:
            seconds = [one["plan_seconds"] for one in mine if one["arena"] == arena]
            cells.append(f"{median(seconds):.2f}, {max(seconds):.2f}" if seconds else "")
        yield f"| {program} | {mine[0]['storages']} | {' | '.join(cells)} |"


def _compact(results: Sequence[dict[str, Any]]) -> str:
    """All figures as JSON: the names of the columns, and one row on a line for each plan."""
    policies = list(dict.fromkeys(name for one in results for name in one["policies"]))
    rows = [
        json.dumps([one[name] for name in COLUMNS] + [one["policies"].get(name) for name in policies])
        for one in results
    ]
    lines = ",\n".join(rows)
    return f'{{"columns": {json.dumps([*COLUMNS, *policies])},\n "rows": [\n{lines}\n]}}\n'


def hardest_cases() -> list[Case]:
    """The cases that were furthest from the bound when the scoreboard was last recorded."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    rows = sorted(
        (row for row in rows if row["lower_bound_ns"]),
        key=lambda row: row["lower_bound_ns"] / row["predicted_ns"],
    )
    return [
        Case(row["program"], row["hardware"], arena, row["share"])
        for arena in GRANULES
        for row in [row for row in rows if row["arena"] == arena][:HARD]
    ]


def spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, the 95th percentile (of rank 0.95 n, rounded up) and the largest."""
    return median(ratios), quantile(ratios, 95), max(ratios)


def _chosen(given: str, known: Sequence[str]) -> list[str]:
    chosen = [name for name in known if not given or any(part.strip() in name for part in given.split(";"))]
    if not chosen:
        raise typer.BadParameter(f"{given!r} is in none of {'; '.join(known)}")
    return chosen


def main(
    *,
    programs: Annotated[str, typer.Option(help="Parts of names, separated by ';'.")] = "",
    hardware: Annotated[str, typer.Option(help="Presets, separated by ','.")] = "",
    arenas: Annotated[str, typer.Option(help="paged, contiguous, or both, separated by ','.")] = "",
    check: Annotated[bool, typer.Option(help="Verify every plan, which takes longer.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this document.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Score the planner on the corpus.

    Examples:

      python -m benchmarks.plans --json schedule.json --docs docs/notes/plans.md

      python -m benchmarks.plans --programs "llama-3.1-8b;flux" --hardware rtx4090
    """
    machines = (
        [find_hardware(name.strip()).name for name in hardware.split(",")] if hardware else list(PRESETS)
    )
    cases = [
        Case(program, machine, arena, share, check)
        for program in _chosen(programs, list(list_programs()))
        for machine in machines
        for arena in (arenas.split(",") if arenas else GRANULES)
        for share in SHARES
    ]
    began = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool, typer.progressbar(length=len(cases), label="planning") as bar:
        results = []
        for one in pool.map(run, cases, chunksize=8):
            results.append(one)
            bar.update(1)
    text = (
        f"{len(cases)} plans in {time.perf_counter() - began:.0f} s on {jobs} cores "
        f"({platform.machine()}, Python {platform.python_version()}).\n\n{render(results)}"
    )
    if json_path:
        json_path.write_text(_compact(results))
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)

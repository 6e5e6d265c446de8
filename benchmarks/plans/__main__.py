"""Plans well-known models for many machines, and compares the plans with the bound and with baselines.

Every program of benchmarks/corpus.py, on every preset of hardware, in budgets from the floor to nearly
all, for both kinds of arena. Of each case: the plan's predicted time over the bound for its own granule,
the time of every policy of schedule/report/comparison.py in the same model over the plan's, and the
seconds that planning took, bound included. Compute is a roofline at the vendors' peaks, so it is at its
shortest and the link's share at its largest: the hardest case for the planner.

With `--against` a sample is planned by this code and by another checkout's side by side, each in a process of
its own and both with the same case before the next one. Both plan for the step times that this code models:
they solve the same problem.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.corpus import list_programs
from benchmarks.table import write_between
from penstock.schedule.facts.hardware import PRESETS, find_hardware, with_times
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.comparison import Setting, compare
from penstock.schedule.space.layout import packed_arena
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

_EVERY = 29
"""One of so many chosen cases is planned side by side: coprime to the numbers of presets and budgets."""

_WORKER = """
import json, sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
try:
    from benchmarks.plans import __main__ as schedule
except ImportError:  # a checkout from before it had that name
    from benchmarks.plans import __main__ as schedule
schedule.compare = lambda *_: {}
for line in sys.stdin:
    case, times, tail = json.loads(line)
    def with_times(trace, hardware):
        pairs = zip(trace.steps, times, strict=True)
        steps = tuple(replace(step, lead_ns=lead, read_ns=read) for step, (lead, read) in pairs)
        return replace(trace, steps=steps, tail_ns=tail, times="modelled")
    schedule.with_times = with_times
    print(json.dumps(schedule.run(schedule.Case(**case))), flush=True)
"""


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
    trace = with_times(program.trace, hardware)
    granule = GRANULES[case.arena]
    kind: Any = case.arena
    arena = packed_arena(program.storages, [trace], kind=kind, granule=granule, alignment=4096)
    problem = Problem(program.storages, (trace,), arena, hardware=hardware)
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


def compare_codes(other: Path, cases: Sequence[Case]) -> str:
    """Ratios, seconds and the worst regression of the code in the checkout around `other` and of this one."""
    here = Path(__file__).resolve().parents[2]
    found: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    with ExitStack() as stack, typer.progressbar(cases, label="planning twice") as bar:
        workers = {}
        for name, root in (("other", other.resolve().parent), ("this", here)):
            workers[name] = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(root)],
                env=os.environ | {"PYTHONPATH": str(root / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(workers[name].wait)
            stack.callback(workers[name].communicate)  # closes what it reads, and so ends it
        for number, case in enumerate(bar):
            for name in sorted(workers, reverse=bool(number % 2)):
                found[name].append(_ask(workers[name], case))
    return "\n".join(_side_by_side(found["other"], found["this"]))


def _ask(worker: subprocess.Popen[str], case: Case) -> dict[str, Any]:
    assert worker.stdin
    assert worker.stdout
    trace = with_times(list_programs()[case.program]().trace, PRESETS[case.hardware])
    times = [(step.lead_ns, step.read_ns) for step in trace.steps]
    worker.stdin.write(json.dumps([dataclasses.asdict(case), times, trace.tail_ns]) + "\n")
    worker.stdin.flush()
    result: dict[str, Any] = json.loads(worker.stdout.readline())
    return result


def _side_by_side(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| arena | code | cases | median | 95th percentile | worst | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for arena in GRANULES:
        for name, results in (("other", before), ("this", after)):
            mine = [one for one in results if one["arena"] == arena and one["ratio"] is not None]
            if mine:
                figures = " | ".join(f"{value:.4f}" for value in spread([one["ratio"] for one in mine]))
                seconds = sum(one["plan_seconds"] for one in mine)
                yield f"| {arena} | {name} | {len(mine)} | {figures} | {seconds:.1f} |"
    yield ""
    yield "Predicted time of this code over the other's, where it is most and least:"
    yield ""
    pairs = [(new["predicted_ns"] / old["predicted_ns"], new) for old, new in zip(before, after, strict=True)]
    pairs.sort(key=lambda pair: -pair[0])
    for times, one in (*pairs[:3], *pairs[-3:]):
        yield f"- {times:.4f}: {one['program']}, {one['hardware']}, {one['arena']}, {one['share']:g}"


def spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, the 95th percentile (of rank 0.95 n, rounded up) and the largest."""
    ordered = sorted(ratios)
    return median(ordered), ordered[-(-95 * len(ordered) // 100) - 1], ordered[-1]


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
    against: Annotated[
        Path | None, typer.Option(help="Another checkout's src: plan a sample with both.")
    ] = None,
) -> None:
    """Score the planner on the corpus.

    Examples:

      python -m benchmarks.plans --json schedule.json --docs docs/notes/plans.md

      python -m benchmarks.plans --programs "llama-3.1-8b;flux" --hardware rtx4090

      python -m benchmarks.plans --against ../before/src
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
    if against:
        hard = [case for case in hardest_cases() if case in cases]
        typer.echo(compare_codes(against, list(dict.fromkeys([*hard, *cases[::_EVERY]]))))
        return
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

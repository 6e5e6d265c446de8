"""Measures what each stage of the planner is worth: plans a sample of the corpus without one stage at a time.

`stages.py` lists the stages and what replaces each of them. All plans of a case share its budget,
its machine and its relaxation, which no stage changes; so ratios to the bound compare predicted times, and
those are the same on every machine. Seconds are those of the processor, the relaxation included.

The sample: of every arena the cases that were furthest from the bound in the last scoreboard, and others of
`benchmarks/plans` drawn at random, the same in every run. Besides, problems so small that they are
planned on the ladder of budgets; decoders whose two methods share an arena; and memory for blocks, beside the
most bytes that are alive at once. A stage that the full planner does not reach in a case is not tried there,
since its absence changes nothing.
"""

from __future__ import annotations

import itertools
import json
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.corpus import DECODERS, Program, decoder_of, draw_linears, list_programs
from benchmarks.plans.__main__ import GRANULES, SHARES, hardest_cases, spread
from benchmarks.plans.allocation import FAMILIES, make_instance
from benchmarks.plans.stages import STAGES, Stage, locate, replaced, watched
from benchmarks.table import write_between
from penstock.schedule import planner
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.hardware import PRESETS, with_times
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space import addresses
from penstock.schedule.space.layout import packed_arena

BEGIN = "<!-- benchmarks.plans.ablation writes from here -->"
RESULTS = Path(__file__).parents[1] / "results"

BLOCKS = (5, 6, 7, 8, 9, 10, 30, 60, 100)
"""The numbers of blocks of the instances whose memory is compared."""

FIGURES = ("median", "p95", "worst")

TABLES = {
    "paged": "Paged arenas",
    "contiguous": "Contiguous arenas",
    "small": "Problems of up to 32 reads, in both kinds of arena",
    "methods": "One paged arena for prompt and token of a decoder",
    "blocks": "Memory for blocks, over the most bytes alive at once (`benchmarks/plans/allocation.py`)",
}

Attempt = Callable[[float], float | None]
"""What a case comes to over its bound, with that share of the search; None where it has no plan or bound."""


@dataclass(frozen=True)
class Case:
    """A plan to make; or, of the table `blocks`, a family of instances, the seed and the number of blocks."""

    table: str
    program: str
    hardware: str
    arena: str
    share: float


@dataclass(frozen=True)
class Result:
    """(ratio to the bound, seconds) with all stages, and without each of those that took part."""

    case: Case
    full: tuple[float, float]
    without: dict[str, tuple[float | None, float]]


KEYS: dict[str, Callable[..., object]] = {
    "space.spans:span_groups": lambda runs, granule: (len(runs), granule),
    "planner:relax": lambda problem, pieces, tiers, which: (which, *(tier.nbytes for tier in tiers)),
    "search.paged:steady_period_ns": lambda trace, schedule, *_, enough=None, launched=(): (
        schedule.transfers,
        enough,
    ),
    "search.draft:steady_period_ns": lambda trace, schedule, *_, enough=None, launched=(): (
        trace.graph,
        schedule.transfers,
        enough,
    ),
    "search.contiguous:place_oldest": lambda blocks, resident, cap, ends, ring: (resident, cap, *ends, ring),
    "search.paged:Joiner.fastest": lambda joiner, pieces: tuple(pieces),
    "search.paged:Loads.stream": lambda loads, rows, resident, cap, early, join=object, put_off=0: (
        (rows.tobytes(), cap, early, put_off) if join is None else object()
    ),
}
"""Functions that plans of one case call with the same arguments, and what tells those apart within a case."""


class _Memory:
    """Calls a function once for each key; `saved_s` is the time that the calls left out would have taken."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, object], tuple[Any, float]] = {}
        self.saved_s = 0.0

    def remembering(self, path: str) -> Callable[..., Any]:
        owner, name = locate(path)
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            key = path, KEYS[path](*args, **kwargs)
            if key in self._known:
                self.saved_s += self._known[key][1]
            else:
                began = time.process_time()
                result = function(*args, **kwargs)
                self._known[key] = result, time.process_time() - began
            return self._known[key][0]

        return call


def small_programs() -> dict[str, Callable[[], Program]]:
    """Decoders cut to one and two layers, and products of some granules: up to 32 reads."""
    tiny: dict[str, Callable[[], Program]] = {
        f"tiny {seed}": partial(draw_linears, random.Random(seed), f"tiny {seed}") for seed in range(24)
    }
    return tiny | {
        f"{name}, {layers} layers, {phase}": partial(
            decoder_of, replace(shape, layers=layers), phase, name=name
        )
        for name, shape in DECODERS.items()
        for layers in (1, 2)
        for phase in ("decode", "prefill")
    }


def measure(case: Case, stages: Sequence[Stage] = STAGES) -> Result | None:
    """Plan a case with all stages, and without each stage that takes part; None if the case has no bound."""
    attempt = _blocks(case) if case.table == "blocks" else _plan(case)
    memory = _Memory()

    def timed(effort: float) -> tuple[float | None, float]:
        began, saved = time.process_time(), memory.saved_s
        ratio = attempt(effort)
        return ratio, time.process_time() - began + memory.saved_s - saved

    remembering = {path: memory.remembering(path) for path in KEYS}
    with replaced(remembering), watched(stages) as reached:
        ratio, seconds = timed(1.0)
    if ratio is None:
        return None
    without = {}
    for stage in (stage for stage in stages if stage.name in reached):
        kept = {path: function for path, function in remembering.items() if path != stage.within}
        with replaced(kept), replaced(stage.swaps):
            without[stage.name] = timed(stage.effort)
    return Result(case, (ratio, seconds), without)


def _plan(case: Case) -> Attempt:
    hardware = PRESETS[case.hardware]
    programs = [(list_programs() | small_programs())[case.program]()]
    if case.table == "methods":
        programs += [small_programs()[case.program.replace("decode", "prefill")]()]
    storages, nbytes = programs[0].storages, programs[0].nbytes
    traces = tuple(
        replace(with_times(program.trace, hardware), graph=graph) for graph, program in enumerate(programs)
    )
    kind: Any = case.arena
    granule = GRANULES[case.arena]
    arena = packed_arena(storages, traces, kind=kind, granule=granule, alignment=4096)
    problem = Problem(storages, traces, arena, hardware=hardware)
    lowest = planner.floor(problem).upper_bytes
    budget = lowest + int((nbytes - lowest) * case.share)

    def attempt(effort: float) -> float | None:
        try:
            return planner.make_plan(problem, budget, effort=effort).ratio
        except BudgetError:
            return None

    return attempt


def _blocks(case: Case) -> Attempt:
    instance = make_instance(case.program, blocks=int(case.share), seed=int(case.hardware))
    return lambda _: addresses.pack_blocks(instance.sizes, instance.alive).nbytes / instance.bound


def list_cases(count: int | None) -> list[Case]:
    """`count` drawn cases of each arena (None: all) with the hardest, and those of the other tables."""
    chosen = [Case(one.arena, one.program, one.hardware, one.arena, one.share) for one in hardest_cases()]
    for arena in GRANULES:
        combined = itertools.product(list_programs(), PRESETS, SHARES)
        mine = [Case(arena, program, hardware, arena, share) for program, hardware, share in combined]
        random.Random(arena).shuffle(mine)
        chosen += mine[:count]
    for (n, program), arena, (m, share) in itertools.product(
        enumerate(small_programs()), GRANULES, enumerate(SHARES)
    ):
        if (n + m) % 4 == 0:
            hardware = list(PRESETS)[(n + 3 * m) % len(PRESETS)]
            chosen.append(Case("small", program, hardware, arena, share))
            if "decode" in program and arena == "paged":
                chosen.append(Case("methods", program, hardware, arena, share))
    chosen += [Case("blocks", family, "0", "", n) for family in FAMILIES for n in BLOCKS]
    chosen += [Case("blocks", "scattered", str(seed), "", 8) for seed in range(40, 400, 40)]
    random.Random(0).shuffle(chosen)  # so that a run that is cut short has some of everything
    return list(dict.fromkeys(chosen))


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of every table, by stage: what JSON can carry and the document shows."""
    tables = {}
    for table in TABLES:
        mine = [one for one in results if one.case.table == table]
        if mine:
            full = [one.full[0] for one in mine]
            seconds = sum(one.full[1] for one in mine)
            stages = {stage.name: _difference(mine, stage.name) for stage in STAGES}
            tables[table] = {
                **{"cases": len(mine), "full": _figures(full), "seconds": round(seconds / len(mine), 3)},
                "stages": {name: row for name, row in stages.items() if row["reached"]},
            }
    return tables


def _figures(ratios: Sequence[float]) -> dict[str, float]:
    return dict(zip(FIGURES, (round(value, 6) for value in spread(ratios)), strict=True))


def _difference(results: Sequence[Result], stage: str) -> dict[str, Any]:
    """The figures without the stage, the case that loses most, and the time that planning takes then."""
    pairs = [(one, one.without.get(stage, one.full)) for one in results]
    known = [(one, ratio) for one, (ratio, _) in pairs if ratio is not None]
    losses = [(ratio / one.full[0], one.case) for one, ratio in known]
    most, case = max(losses, key=lambda loss: loss[0])
    parts = (case.program, case.hardware, case.arena, f"{case.share:g}")
    before, after = sum(one.full[1] for one in results), sum(seconds for _, (_, seconds) in pairs)
    return {
        "reached": sum(stage in one.without for one in results),
        "no_plan": len(pairs) - len(known),
        **_figures([ratio for _, ratio in known]),
        "most": round(most, 6),
        "where": ", ".join(part for part in parts if part),
        "seconds": round(after / before, 4),
    }


def render(tables: dict[str, Any]) -> str:
    """The tables as Markdown: changes against the full planner, which is the first row of each."""
    return "\n\n".join("\n".join(_render_table(name, table)) for name, table in tables.items())


def _render_table(name: str, table: dict[str, Any]) -> Iterator[str]:
    full = table["full"]
    yield f"{TABLES[name]}: {table['cases']} cases, {table['seconds']:.2f} s each in the mean."
    yield ""
    yield "| without | reached in | median | 95th percentile | worst | most in one case | planning time |"
    yield "|---|---|---|---|---|---|---|"
    yield f"| (the full planner) | | {full['median']:.4f} | {full['p95']:.4f} | {full['worst']:.4f} | | |"
    for stage, row in table["stages"].items():
        base = row.get("full", full)
        moved = [f"{row[key] / base[key] - 1:+.2%}" for key in FIGURES]
        most = f"{row['most'] - 1:+.1%} ({row['where']})" if row["most"] > 1.00005 else "none"
        most += f"; no plan in {row['no_plan']}" if row["no_plan"] else ""
        note = f" (deleted {row['deleted']})" if "deleted" in row else ""
        yield (
            f"| {stage}{note} | {row['reached']} | {' | '.join(moved)} | {most} | {row['seconds'] - 1:+.0%} |"
        )


def carry_deleted(tables: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the rows of stages that were deleted from an earlier result, with the figures they refer to."""
    for name, table in before.get("tables", {}).items():
        for stage, row in table["stages"].items():
            if "deleted" in row and name in tables:
                tables[name]["stages"].setdefault(stage, {"full": table["full"], **row})


def main(
    *,
    cases: Annotated[int, typer.Option(help="Cases of each arena beside the hardest ones.")] = 60,
    everything: Annotated[bool, typer.Option("--all", help="All cases, which takes many hours.")] = False,
    seconds: Annotated[float, typer.Option(help="Stop after this long with what is done.")] = 14 * 60.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    json_path: Annotated[Path, typer.Option("--json", help="Figures.")] = RESULTS / "ablation.json",
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this document.")] = None,
    note: Annotated[str, typer.Option(help="What else is to be known of this run.")] = "",
) -> None:
    """Plan a sample without one stage after another, and print what changes.

    Example: python -m benchmarks.plans.ablation --docs docs/notes/plans.md
    """
    chosen = list_cases(None if everything else cases)
    results, began = [], time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool, typer.progressbar(length=len(chosen), label="planning") as bar:
        for one in pool.map(measure, chosen):
            results += [one] if one else []
            bar.update(1)
            if time.perf_counter() - began > seconds and not everything:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    tables = summarise(results)
    if json_path.exists():
        carry_deleted(tables, json.loads(json_path.read_text(encoding="utf-8")))
    text = (
        f"{len(results)} of {len(chosen)} cases on {jobs} of {platform.machine()}'s cores, "
        f"Python {platform.python_version()}{'; ' if note else ''}{note}."
    )
    json_path.write_text(json.dumps({"run": text, "tables": tables}, indent=1) + "\n", encoding="utf-8")
    text += f"\n\n{render(tables)}"
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)

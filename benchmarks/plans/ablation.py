"""Measures what each stage of the planner is worth: plans a sample of the corpus without one stage at a time.

`stages.py` lists the stages and what replaces each of them. Predicted times are the same on every machine;
seconds are the processor's. A stage that the full planner does not reach in a case is not tried there, since
its absence changes nothing.

The sample: of every arena the cases that were furthest from the bound in the last scoreboard, and others of
`benchmarks/plans` drawn at random, the same in every run; random problems of `benchmarks/corpus.py`; decoders
whose two methods share an arena; memory for blocks, over the most bytes alive at once.
"""

from __future__ import annotations

import itertools
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.corpus import DECODERS, decoder_of, draw_problem, list_programs
from benchmarks.plans.__main__ import GRANULES, SHARES, hardest_cases, spread
from benchmarks.plans.allocation import FAMILIES, make_instance
from benchmarks.plans.stages import STAGES, Stage, replaced, watched
from benchmarks.table import write_between
from penstock.schedule import planner
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.hardware import PRESETS, with_times
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space import addresses
from penstock.schedule.space.layout import packed_arena

BEGIN = "<!-- benchmarks.plans.ablation writes from here -->"

RANDOM = "random"

BLOCKS = (5, 6, 7, 8, 9, 10, 30, 60, 100)
"""The numbers of blocks of the instances whose memory is compared."""

Timed = tuple[float | None, float]
"""Predicted time over the bound (None: no plan or bound), or memory over its own; and seconds to plan."""


@dataclass(frozen=True)
class Case:
    """A plan to make: of a program of the corpus, one layer of a decoder in two methods, or a random problem.

    `share` is that of its budget, or its seed. In the arena `blocks` there are a family of instances, the
    seed and the number of blocks.
    """

    arena: str
    program: str
    hardware: str
    share: float


@dataclass(frozen=True)
class Result:
    """What a case comes to with all stages, and without each of those that took part."""

    case: Case
    full: tuple[float, float]
    without: dict[str, Timed]


def measure(case: Case, stages: Sequence[Stage] = STAGES) -> Result | None:
    """Plan a case with all stages, and without each stage that takes part; None if the case has no bound."""
    attempt = _blocks(case) if case.arena == "blocks" else _plan(case)

    def timed(effort: float) -> Timed:
        began = time.process_time()
        return attempt(effort), time.process_time() - began

    with watched(stages) as reached:
        ratio, seconds = timed(1.0)
    if ratio is None:
        return None
    without = {}
    for stage in (stage for stage in stages if stage.name in reached):
        with replaced(stage.swaps):
            without[stage.name] = timed(stage.effort)
    return Result(case, (ratio, seconds), without)


def _plan(case: Case) -> Callable[[float], float | None]:
    problem, budget = _problem(case)

    def attempt(effort: float) -> float | None:
        try:
            return planner.make_plan(problem, budget, effort=effort).ratio
        except BudgetError:
            return None

    return attempt


def _problem(case: Case) -> tuple[Problem, int]:
    """The problem of a case and its budget."""
    kind: Any = case.arena
    if case.program == RANDOM:
        drawn = draw_problem(int(case.share), kind)
        return drawn.problem, drawn.budget
    hardware = PRESETS[case.hardware]
    if case.program in DECODERS:
        shape = replace(DECODERS[case.program], layers=1)
        programs = [decoder_of(shape, "decode"), decoder_of(shape, "prefill")]
    else:
        programs = [list_programs()[case.program]()]
    storages, nbytes = programs[0].storages, programs[0].nbytes
    traces = tuple(
        replace(with_times(program.trace, hardware), graph=graph) for graph, program in enumerate(programs)
    )
    arena = packed_arena(storages, traces, kind=kind, granule=GRANULES[kind], alignment=4096)
    problem = Problem(storages, traces, arena, hardware=hardware)
    lowest = planner.floor(problem).upper_bytes
    return problem, lowest + int((nbytes - lowest) * case.share)


def _blocks(case: Case) -> Callable[[float], float]:
    instance = make_instance(case.program, blocks=int(case.share), seed=int(case.hardware))
    return lambda _: addresses.pack_blocks(instance.sizes, instance.alive).nbytes / instance.bound


def list_cases(count: int) -> list[Case]:
    """`count` cases of each arena, the hardest first, and of methods; more random problems; all blocks."""
    chosen = [Case("blocks", family, "0", n) for family in FAMILIES for n in BLOCKS]
    chosen += [Case("blocks", "scattered", str(seed), 8) for seed in range(40, 400, 40)]
    chosen += _shuffled("paged", DECODERS)[:count]
    for arena in GRANULES:
        large = _shuffled(arena, list_programs())
        hardest = [Case(arena, one.program, one.hardware, one.share) for one in hardest_cases()]
        chosen += [*dict.fromkeys([*(one for one in hardest if one in large), *large])][:count]
        chosen += [Case(arena, RANDOM, "", seed) for seed in range(3 * count)]
    random.Random(0).shuffle(chosen)
    return chosen


def _shuffled(arena: str, programs: Iterable[str]) -> list[Case]:
    """Each program on every machine in all budgets, in an order that is random but always the same."""
    cases = [Case(arena, *facts) for facts in itertools.product(programs, PRESETS, SHARES)]
    random.Random(arena).shuffle(cases)
    return cases


def render(results: Sequence[Result]) -> Iterator[str]:
    """One Markdown table: a row for the full planner in each arena, and below it what each stage changes."""
    yield "| without | median | 95 % | worst | most in one case | planning time |"
    yield "|---|---|---|---|---|---|"
    for arena in (*GRANULES, "blocks"):
        mine = [one for one in results if one.case.arena == arena]
        if not mine:
            continue
        full, seconds = spread([one.full[0] for one in mine]), sum(one.full[1] for one in mine)
        figures = " | ".join(f"**{figure:.4f}**" for figure in full)
        yield f"| **{arena}, {len(mine)} cases** | {figures} | | {seconds / len(mine):.2f} s |"
        for stage in STAGES:
            if any(stage.name in one.without for one in mine):
                yield _row(stage.name, mine, full, seconds)


def _row(stage: str, results: Sequence[Result], full: Sequence[float], seconds: float) -> str:
    """The figures without the stage over those with it, and the case that loses most."""
    pairs = [(one, *one.without.get(stage, one.full)) for one in results]
    known = [(ratio / one.full[0], ratio, one.case) for one, ratio, _ in pairs if ratio is not None]
    figures = spread([ratio for _, ratio, _ in known])
    moved = " | ".join(f"{now / before - 1:+.1%}" for now, before in zip(figures, full, strict=True))
    loss, _, case = max(known, key=lambda one: one[0])
    place = ", ".join(part for part in (case.program, case.hardware, f"{case.share:g}") if part)
    most = f"{loss - 1:+.1%}" + f" ({place})" * (loss > 1.001)
    failed = len(pairs) - len(known)
    most += f"; no plan in {failed}" * (failed > 0)
    return f"| {stage} | {moved} | {most} | {sum(one[2] for one in pairs) / seconds - 1:+.0%} |"


def main(
    *,
    cases: Annotated[int, typer.Option(help="Cases of each arena.")] = 12,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    docs: Annotated[Path | None, typer.Option(help="Write the table into this document.")] = None,
) -> None:
    """Plan a sample without one stage after another, and print what changes.

    Example: python -m benchmarks.plans.ablation --docs docs/notes/plans.md
    """
    chosen = list_cases(cases)
    with ProcessPoolExecutor(jobs) as pool, typer.progressbar(length=len(chosen), label="planning") as bar:
        results = []
        for one in pool.map(measure, chosen):
            results += [one] if one else []
            bar.update(1)
    text = f"{platform.machine()}, Python {platform.python_version()}.\n\n" + "\n".join(render(results))
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)

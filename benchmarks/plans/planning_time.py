"""Measures how planning time grows with the number of storages, for decoders of more and more layers.

Prints seconds for both kinds of arena, the bound included, beside n log n through the smallest; with
`--plot` draws both.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.corpus import DECODERS, Program, decoder_of, make_problem
from penstock.schedule.facts.hardware import PRESETS, with_times
from penstock.schedule.planner import make_plan

LAYERS = (16, 32, 64, 128, 256, 512)
GRANULES = {"paged": 2 << 20, "contiguous": 4096}
COLOURS = {"paged": "#0072b2", "contiguous": "#d55e00"}


def seconds_to_plan(program: Program, kind: Any, share: float) -> float:
    """Seconds for one plan within `share` of all weights."""
    hardware = PRESETS["h100"]
    problem = make_problem(program, with_times(program.trace, hardware), hardware, kind, GRANULES[kind])
    began = time.perf_counter()
    make_plan(problem, int(program.nbytes * share))
    return time.perf_counter() - began


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG or PNG) here.")] = None,
) -> None:
    """Time planning.

    Example: python -m benchmarks.plans.planning_time --plot docs/planning-time.svg
    """
    shape = DECODERS["llama-3.1-70b"]
    found: dict[str, dict[int, float]] = {kind: {} for kind in GRANULES}
    typer.echo("| storages | paged s | over n log n | contiguous s | over n log n |\n|---|---|---|---|---|")
    seconds_to_plan(decoder_of(replace(shape, layers=2), "decode"), "paged", 0.5)  # imports the solver
    for layers in LAYERS:
        program = decoder_of(replace(shape, layers=layers), "decode")
        n = len(program.storages)
        cells = []
        for kind, times in found.items():
            shares = (0.25, 0.5, 0.9)
            times[n] = median(seconds_to_plan(program, kind, share) for share in shares * rounds)
            cells += [f"{times[n]:.3f}", f"{times[n] / _scaled(times, n):.2f}"]
        typer.echo(f"| {n} | {' | '.join(cells)} |")
    if plot:
        _draw(found, plot)


def _scaled(times: dict[int, float], n: int) -> float:
    """What n storages would take if the time of the fewest grew as n log n."""
    first = min(times)
    return times[first] * (n * math.log(n)) / (first * math.log(first))


def _draw(found: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for kind, times in found.items():
        axes.loglog(list(times), list(times.values()), "o-", color=COLOURS[kind], label=kind)
        axes.loglog(
            list(times),
            [_scaled(times, n) for n in times],
            ":",
            color=COLOURS[kind],
            label=f"{kind}, n log n",
        )
    axes.set(xlabel="storages", ylabel="seconds to plan, bound included")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)

"""What a step costs beside its kernel: many tiny linears, each a step, streamed by both engines.

Processor seconds of passes through the exported program, weights in memory, and through streamed modules of
the same program within a part of its weights, in turn. Their difference is divided by the steps.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock
from benchmarks.machine import describe_machine

WIDTH = 32


def main(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Linears of 32 x 32, in float32.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    budget: Annotated[str, typer.Option(help="Of the streamed modules.")] = "50%",
) -> None:
    """Measure what streaming adds to a step.

    Example: python benchmarks/steps.py --rounds 15
    """
    torch.manual_seed(0)
    linears = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(steps)]
    example = torch.ones(1, WIDTH)
    exported = torch.export.export(torch.nn.Sequential(*linears).eval(), (example,))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = penstock.compile(exported, Path(folder) / "steps.penstock")
        ways = {"in memory": program.load("100%")}
        for arena in ("mapped", "contiguous"):
            plan = program.plan(budget, arena=arena)
            for engine in ("native", "python"):
                ways[f"{arena}, {engine}"] = program.load(plan=plan, engine=engine)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first round does not count
            for way in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
                began = time.process_time()
                ways[way](example)
                found[way].append(time.process_time() - began)
        moved = {way: module.stats.bytes_moved for way, module in ways.items()}
        probed = {way: len(module._weights.probed(0)) for way, module in ways.items()}
        for module in ways.values():
            module.close()
    machine = describe_machine()
    typer.echo(
        f"{steps} steps on {machine['cpu']}, {machine['cores']} cores, {machine['date']}; {rounds} rounds.\n"
    )
    typer.echo("| way | processor, us a step | more than in memory | steps that act | bytes moved a pass |")
    typer.echo("|---|---|---|---|---|")
    least = median(found["in memory"][1:])
    for way, seconds in found.items():
        one = median(seconds[1:])
        typer.echo(
            f"| {way} | {one / steps * 1e6:.1f} | {(one - least) / steps * 1e6:.1f} | {probed[way]} "
            f"| {moved[way] // (rounds + 1)} |"
        )


if __name__ == "__main__":
    typer.run(main)

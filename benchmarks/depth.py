"""How far ahead of the reads copies must start: cold passes by the bytes that a plan leaves in flight.

Equal bfloat16 linears, many of them small, in a contiguous arena of 12.5 % of their bytes. Every plan leaves
other bytes free for copies on their way (`Hardware.link_in_flight_bytes`). Both engines run it, in turn and
cold. Two passes count of each load, behind one that does not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock
from benchmarks.machine import describe_machine, drop_cache
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.plan import Plan

WIDTH = 1024
ENGINES = ("native", "python")


def compile_linears(folder: Path, nbytes: int) -> penstock.Program:
    """The artifact of `nbytes` of linears of 2 MiB each."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        for _ in range(max(2, nbytes // (2 * WIDTH * WIDTH)))
    ]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=WIDTH**-0.5)
    exported = torch.export.export(torch.nn.Sequential(*layers).eval(), (inputs(),))
    return penstock.compile(exported, folder / "linears.penstock")


def inputs() -> torch.Tensor:
    return torch.ones(8, WIDTH, dtype=torch.bfloat16)


def seconds_a_pass(program: penstock.Program, plan: Plan, engine: str) -> float:
    files = [path for path in program.path.iterdir() if path.is_file()]
    seconds = []
    with program.load(plan=plan, engine=engine) as module, torch.no_grad():
        for _ in range(3):
            drop_cache(files)  # or Python's streamer reads through the page cache from the second pass on
            began = time.perf_counter()
            module(inputs())
            seconds.append(time.perf_counter() - began)
    return sum(seconds[1:]) / 2


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each every plan runs once.")] = 5,
    depths: Annotated[
        str, typer.Option(help="Bytes in flight.")
    ] = "0,4MiB,8MiB,12MiB,16MiB,24MiB,32MiB,48MiB",
) -> None:
    """Measure passes by the bytes that plans leave in flight.

    Example: python benchmarks/depth.py --rounds 5
    """
    with tempfile.TemporaryDirectory(dir=".") as folder:
        program = compile_linears(Path(folder), parse_size(size))
        measured = program.plan("12.5%", arena="contiguous").hardware
        plans = {}
        for depth in depths.split(","):
            hardware = replace(measured, link_in_flight_bytes=parse_size(depth) if depth != "0" else 0)
            plans[depth] = program.plan("12.5%", arena="contiguous", hardware=hardware)
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds):
            order = list(plans.items())
            for depth, plan in order[number % len(order) :] + order[: number % len(order)]:
                for engine in ENGINES:
                    found.setdefault((depth, engine), []).append(seconds_a_pass(program, plan, engine))
    machine = describe_machine()
    typer.echo(f"{size} on {machine['cpu']}, {machine['cores']} cores, {machine['date']}; {rounds} rounds.\n")
    typer.echo("| in flight | stays | predicted, s | native, s (min, median) | python, s (min, median) |")
    typer.echo("|---|---|---|---|---|")
    for depth, plan in plans.items():
        stays = format_size(sum(one.stop - one.start for one in plan.resident))
        cells = [f"{min(found[depth, e]):.3f}, {median(found[depth, e]):.3f}" for e in ENGINES]
        typer.echo(f"| {depth} | {stays} | {plan.predicted_seconds:.3f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)

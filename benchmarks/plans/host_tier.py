"""Plans for hosts that hold only part of the model, over the bound that knows both tiers.

Budgets and host memory are shares of all weights; presets say how fast link and disk are.
"""

from __future__ import annotations

import time
from dataclasses import replace

import typer

from benchmarks.corpus import list_programs, make_problem
from penstock.schedule.facts.hardware import PRESETS, with_times
from penstock.schedule.planner import make_plan
from penstock.schedule.verify.proof import verify_plan

CASES = (
    ("llama-3.1-70b, decode", "h100", 0.25, 0.5),
    ("llama-3.1-8b, decode", "rtx4090", 0.5, 0.25),
    ("llama-3.1-8b, prefill", "rtx4090", 0.25, 0.5),
    ("flux.1-dev, denoise", "rtx4090", 0.5, 0.25),
    ("llama-3.1-8b, train-lora", "rtx4090", 0.25, 0.25),
)
"""Program, hardware, and the shares that device and host hold."""


def main() -> None:
    """Print a table, every plan verified.

    Example: python -m benchmarks.plans.host_tier
    """
    typer.echo("| program | hardware | device | host | ms | times the bound | from disk, GB | s to plan |")
    typer.echo("|---|---|---|---|---|---|---|---|")
    for name, machine, device, host in CASES:
        program, hardware = list_programs()[name](), PRESETS[machine]
        trace = with_times(program.trace, hardware)
        problem = make_problem(program, trace, hardware, "contiguous", 4096)
        began = time.perf_counter()
        plan = make_plan(replace(problem, host=int(program.nbytes * host)), int(program.nbytes * device))
        seconds = time.perf_counter() - began
        verify_plan(program.storages, (trace,), plan)
        staged = sum(plan.schedules[0].staged) / 1e9
        typer.echo(
            f"| {name} | {machine} | {device:.0%} | {host:.0%} | {plan.predicted_seconds * 1e3:.0f} "
            f"| {plan.ratio:.3f} | {staged:.1f} | {seconds:.1f} |"
        )


if __name__ == "__main__":
    typer.run(main)

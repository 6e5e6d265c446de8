"""Compares what plans predict with what this machine does.

Round by round and budget by budget: the steps are timed in memory, the way from disk to arena is measured,
both go into a plan, and that plan runs. Cold, so the weights come from the disk: the page cache
is emptied before every pass that counts, as in benchmarks/disk.py. A ratio compares figures of one
round; its median over the rounds is what counts, for a virtual machine's speed swings within minutes.

Needs Linux.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock
from benchmarks.cases import MODELS, load_weights, make_inputs, make_meta_module, write_weights
from benchmarks.machine import describe_machine, drop_cache
from penstock.runtime.program import Program
from penstock.schedule.model import Plan, Trace
from penstock.schedule.sizes import format_size, parse_size

BUDGETS = ("12.5%", "25%", "50%", "75%")


def prepare(model: str, nbytes: int, tokens: int, folder: Path) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """A compiled model in `folder`, and inputs for it."""
    module = make_meta_module(model, nbytes)
    weights = folder / f"{model}.safetensors"
    write_weights(module, weights)
    load_weights(module, weights, in_memory=False)
    inputs = make_inputs(module, tokens)
    with torch.no_grad():
        exported = torch.export.export(module, inputs)
    program = penstock.compile(exported, folder / f"{model}.penstock", weights=weights)
    weights.unlink()
    return program, inputs


def time_steps(program: Program, inputs: tuple[torch.Tensor, ...], passes: int = 5) -> Trace:
    """The trace of the pass that took the median time in memory."""
    with program.load("100%") as module, torch.no_grad():
        module(*inputs)
        return sorted((module.measure(*inputs) for _ in range(passes)), key=lambda t: t.compute_ns)[
            passes // 2
        ]


def time_pass(program: Program, plan: Plan, inputs: tuple[torch.Tensor, ...]) -> tuple[float, int]:
    """Seconds of a pass that follows another, from a cold page cache; and the misses of both."""
    files = sorted(program.path.glob("*.safetensors"))
    with program.load(plan=plan) as module, torch.no_grad():
        module(*inputs)
        drop_cache(files, unmap=False)
        module(*inputs)  # fills what is read ahead from a cold cache too
        drop_cache(files, unmap=False)
        began = time.perf_counter()
        module(*inputs)
        return time.perf_counter() - began, module.stats.misses


def run_round(program: Program, inputs: tuple[torch.Tensor, ...]) -> list[dict[str, Any]]:
    """One round: every budget once, planned with this round's step times and rates."""
    files = sorted(program.path.glob("*.safetensors"))
    trace = time_steps(program, inputs)
    samples = []
    for budget in BUDGETS:
        drop_cache(files, unmap=False)
        plan = program.plan(budget, traces=[trace])
        seconds, misses = time_pass(program, plan, inputs)
        samples.append(
            {
                "budget": budget,
                "predicted_seconds": plan.predicted_seconds,
                "lower_bound_seconds": plan.lower_bound_seconds,
                "compute_seconds": trace.compute_ns / 1e9,
                "link_bytes_per_s": plan.hardware.link_bytes_per_s,
                "seconds": seconds,
                "ratio": seconds / plan.predicted_seconds,
                "misses": misses,
            }
        )
    return samples


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights of each model.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that a pass reads.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all samples here.")] = None,
) -> None:
    """Compare predicted with measured seconds.

    Example: python benchmarks/prediction.py --rounds 9 --json prediction.json
    """
    nbytes = parse_size(size)
    found: dict[str, list[dict[str, Any]]] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            program, inputs = prepare(model, nbytes, tokens, Path(folder))
            for number in range(rounds):
                for one in run_round(program, inputs):
                    found.setdefault(f"{model}, {one['budget']}", []).append(one)
                    typer.echo(
                        f"{model}, round {number + 1}, {one['budget']}: predicted "
                        f"{one['predicted_seconds']:.3f} s, took {one['seconds']:.3f} s",
                        err=True,
                    )
    typer.echo(f"{format_size(nbytes)} of weights, {tokens} tokens, {rounds} rounds\n")
    typer.echo("| model, budget | predicted s (median) | took s (median) | took / predicted (median) |")
    typer.echo("|---|---|---|---|")
    for name, samples in found.items():
        cells = [median(one[key] for one in samples) for key in ("predicted_seconds", "seconds", "ratio")]
        typer.echo(f"| {name} | {cells[0]:.3f} | {cells[1]:.3f} | {cells[2]:.3f} |")
    ratios = [one["ratio"] for samples in found.values() for one in samples]
    typer.echo(f"\nMedian of all ratios: {median(ratios):.3f}")
    if json_path:
        result = {"machine": describe_machine(), "size": nbytes, "tokens": tokens, "samples": found}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

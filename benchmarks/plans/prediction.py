"""Compares the times that plans predict with the times of runs on this machine.

Round by round, page cache by page cache and budget by budget: a plan is run and its steps are timed, the way
from disk to arena is measured, both go into a new plan, and that runs in its turn. Cold, the page cache is
emptied before every pass, as in benchmarks/disk, so that the weights come from the disk; warm, they come
from the page cache. A ratio compares figures of one round; its median over the rounds is what counts, for
a virtual machine's speed swings within minutes.

Needs Linux.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

import penstock
from benchmarks.disk.cases import load_weights, make_inputs, make_meta_module, write_weights
from benchmarks.machine import describe_machine, drop_cache
from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Trace
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.plan import Plan

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


class Runner:
    """Passes of one program, each from the state of the page cache that is asked for."""

    def __init__(self, program: Program, inputs: tuple[torch.Tensor, ...], *, cold: bool) -> None:
        self.program, self._inputs, self._cold = program, inputs, cold
        self._files = sorted(program.path.glob("*.safetensors"))

    def prepare(self) -> None:
        """Bring the page cache into the wanted state: without the files, or with all that was read."""
        if self._cold:
            drop_cache(self._files, unmap=False)

    @contextmanager
    def load(self, plan: Plan) -> Iterator[StreamedModule]:
        """The module in its steady state: its memory taken, and read ahead for the next pass."""
        with self.program.load(plan=plan) as module, torch.no_grad():
            for _ in range(3):
                module(*self._inputs)
                self.prepare()
            yield module

    def time_steps(self, plan: Plan) -> Trace:
        """The trace of the pass that took the median time."""
        with self.load(plan) as module:
            traces = []
            for _ in range(3):
                traces.append(module.measure(*self._inputs))
                self.prepare()
        return sorted(traces, key=lambda trace: trace.compute_ns)[1]

    def time_passes(self, plan: Plan) -> tuple[float, int]:
        """Median seconds of a pass, and the misses of all."""
        with self.load(plan) as module:
            seconds = []
            for _ in range(5):
                began = time.perf_counter()
                module(*self._inputs)
                seconds.append(time.perf_counter() - began)
                self.prepare()
            return median(seconds), module.stats.misses


def run_budget(runner: Runner, budget: str) -> dict[str, Any]:
    """Run a plan to time its steps, and then a plan made from these times, to time its passes."""
    runner.prepare()
    trace = runner.time_steps(runner.program.plan(budget))
    runner.prepare()
    plan = runner.program.plan(budget, traces=[trace])
    seconds, misses = runner.time_passes(plan)
    return {
        "predicted_seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "compute_seconds": trace.compute_ns / 1e9,
        "link_bytes_per_s": plan.hardware.link_bytes_per_s,
        "seconds": seconds,
        "ratio": seconds / plan.predicted_seconds,
        "misses": misses,
    }


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights of each model.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that a pass reads.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all samples here.")] = None,
) -> None:
    """Compare predicted with measured seconds.

    Example: python -m benchmarks.plans.prediction --rounds 9 --json prediction.json
    """
    nbytes = parse_size(size)
    found: dict[str, list[dict[str, Any]]] = {}
    for model in ("linears", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            program, inputs = prepare(model, nbytes, tokens, Path(folder))
            for number, state, budget in itertools.product(range(rounds), ("cold", "warm"), BUDGETS):
                one = run_budget(Runner(program, inputs, cold=state == "cold"), budget)
                name = f"{state}, {model}, {budget}"
                found.setdefault(name, []).append(one)
                typer.echo(
                    f"round {number + 1}, {name}: predicted {one['predicted_seconds']:.3f} s, "
                    f"took {one['seconds']:.3f} s",
                    err=True,
                )
    typer.echo(f"{format_size(nbytes)} of weights, {tokens} tokens, {rounds} rounds\n")
    typer.echo(
        "| page cache, model, budget | predicted s (median) | took s (median) | took / predicted (median) |"
    )
    typer.echo("|---|---|---|---|")
    for name, samples in sorted(found.items()):
        cells = [median(one[key] for one in samples) for key in ("predicted_seconds", "seconds", "ratio")]
        typer.echo(f"| {name} | {cells[0]:.3f} | {cells[1]:.3f} | {cells[2]:.3f} |")
    for state in ("cold", "warm"):
        ratios = [
            one["ratio"] for name, samples in found.items() if name.startswith(state) for one in samples
        ]
        typer.echo(f"\nMedian of all ratios, {state}: {median(ratios):.3f}")
    if json_path:
        result = {"machine": describe_machine(), "size": nbytes, "tokens": tokens, "samples": found}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

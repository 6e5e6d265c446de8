"""Part one: a decoder whose weights are four times a cap that the kernel enforces.

The same tokens are made three times, each time in a process of its own: by the plain model without a
cap, which gives the reference; by the plain model under the cap, which is killed; and by penstock
under the cap. Before each run the weights are dropped from the page cache, so that no run finds weights
that another run has read, and pages that a capped run maps are charged to its own cap.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.padding import Padding

from examples.demo.child import Job
from examples.demo.disk import ReadRate, find_folder, measure_read
from examples.demo.processes import Ending, run_capped, run_child
from examples.demo.screen import make_table, shorten, show_progress
from penstock.schedule.facts.errors import BudgetError, SourceError
from penstock.schedule.facts.sizes import format_size, format_time, parse_size

DEFAULT_SIZE = "2GiB"
SMALLEST_CAP = 400 << 20
"""The least cap in bytes: Python and torch for a CPU alone take more than a third of it."""

BESIDE_TORCH = 96 << 20
"""The bytes that the streamed run takes at most beside its budget, Python and torch."""

TOKENS = 8
SEED = 20


@dataclass(frozen=True)
class Runs:
    """The results of part one. `cap_kind` says what enforced the cap."""

    weight_bytes: int
    layers: int
    hidden: int
    cap: int
    cap_kind: str
    budget: int
    reference: Ending
    plain: Ending
    streamed: Ending
    disk: ReadRate

    @property
    def equal(self) -> bool:
        """True if penstock's logits are those of the reference, bit for bit."""
        reference, streamed = self.reference.result, self.streamed.result
        return reference is not None and streamed is not None and reference.digest == streamed.digest

    @property
    def holds(self) -> bool:
        """True if all results are as the demo claims."""
        return self.equal and self.plain.result is None


def run_cap(console: Console, *, size: str | None = None) -> Runs:
    """Make the model, run it three times, and print the results.

    Raises `BudgetError` for a size of which a quarter cannot hold a process, `SourceError` if no disk
    has room for the weights, and `StreamError` if a run failed instead of being killed.
    """
    wanted = parse_size(size or DEFAULT_SIZE, name="--size")
    smallest = measure_smallest_cap()
    if size is None:
        wanted = max(wanted, 4 * smallest)
    if wanted // 4 < smallest:
        raise BudgetError(
            f"--size {size} leaves the processes a quarter of it, {format_size(wanted // 4)}, which cannot "
            f"hold Python and torch: ask for at least {format_size(4 * smallest)}"
        )
    folder = find_folder(wanted * 5 // 4)
    if folder is None:
        raise SourceError(
            f"no disk has {format_size(wanted * 5 // 4)} to spare for the weights: set TMPDIR to a folder "
            "that has, or ask for a smaller --size"
        )
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=folder) as temporary:
        runs = run_three(console, Path(temporary), wanted, cap=None)
    print_runs(console, runs)
    return runs


def measure_smallest_cap() -> int:
    """Return the least cap in bytes; torch built for CUDA takes twice the memory of another build."""
    code = "import torch; from penstock.runtime.system import memory; print(memory.anonymous_bytes())"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return max(SMALLEST_CAP, (int(done.stdout) + BESIDE_TORCH) * 4 // 3)  # a quarter of the cap is the budget


def run_three(console: Console, folder: Path, weight_bytes: int, *, cap: int | None) -> Runs:
    """Write the model into `folder` and run it three times. The default cap is a quarter of the weights."""
    job = prepare(console, folder, weight_bytes)
    weights = Path(job.weights)
    nbytes = weights.stat().st_size
    cap = cap or nbytes // 4
    job = replace(job, budget=cap // 4)
    rates = [measure_read(weights)]

    reference = run_child(console, job, "the plain model, without a cap")
    plain, kind = run_capped(console, job, cap, "the plain model, capped")
    streamed, _ = run_capped(console, replace(job, kind="streamed"), cap, "penstock, capped")
    rates.append(measure_read(weights))
    # The disk is measured before and after the runs, because the speed of a shared disk varies.
    disk = replace(rates[0], bytes_per_s=sum(rate.bytes_per_s for rate in rates) / len(rates))
    return Runs(nbytes, job.layers, job.hidden, cap, kind, job.budget, reference, plain, streamed, disk)


def prepare(console: Console, folder: Path, weight_bytes: int) -> Job:
    """Write the weights and the artifact; returns the job that runs the plain model."""
    import penstock
    from examples.demo.llama import choose_shape, export_decoder, write_weights

    shape = choose_shape(weight_bytes)
    weights, artifact = folder / "decoder.safetensors", folder / "decoder.penstock"
    with show_progress(console, f"writing {format_size(weight_bytes)} of weights", weight_bytes) as report:
        write_weights(shape, weights, SEED, report)
    with show_progress(console, "exporting and compiling the decoder"):
        penstock.compile(export_decoder(shape, weights), artifact, weights=weights, pack=False)
    return Job(
        kind="plain",
        hidden=shape.hidden,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        weights=str(weights),
        artifact=str(artifact),
        budget=0,
        tokens=TOKENS,
    )


def print_runs(console: Console, runs: Runs) -> None:
    """Print the table of the three runs, and the bytes that penstock moved."""
    say = partial(console.print, highlight=False)
    weights = shorten(runs.weight_bytes)
    say(
        f"\n  [bold]A decoder four times as big as its memory[/bold]\n"
        f"  {runs.layers} layers of {runs.hidden}, {weights} of bfloat16 weights, {TOKENS} tokens\n"
        f"  capped at {shorten(runs.cap)} by a {runs.cap_kind}\n"
    )
    table = make_table("", "cap", "peak", "load", "tokens", "sha256 of all logits")
    cap = shorten(runs.cap)
    for name, allowed, ending in (
        ("plain", "none", runs.reference),
        ("plain", cap, runs.plain),
        ("penstock", cap, runs.streamed),
    ):
        table.add_row(name, allowed, shorten(ending.peak), *_describe(ending, runs))
    say(Padding.indent(table, 2))
    streamed = runs.streamed.result
    if streamed is None:
        return
    rate = streamed.moved / streamed.run_seconds
    how = "O_DIRECT" if runs.disk.direct else "buffered, cold"
    moved = (
        f"\npenstock moved {shorten(streamed.moved)} at {rate / 1e9:.2f} GB/s, "
        f"[bold]{rate / runs.disk.bytes_per_s:.0%}[/bold] of the {runs.disk.bytes_per_s / 1e9:.2f} GB/s "
        f"that this disk gives ({how})"
    )
    notes = (
        f"budget {shorten(runs.budget)}, {streamed.misses} misses, "
        f"{format_time(streamed.stall_seconds * 1e9)} stalled, {streamed.readers} readers\n{streamed.arena}\n"
    )
    say(Padding.indent(moved, 2))
    say(Padding.indent(notes, 2), style="dim")


def _describe(ending: Ending, runs: Runs) -> tuple[str, str, str]:
    """The load time, the time of the tokens, and the hash or the failure, as cells of the table."""
    result = ending.result
    if result is None:
        return "", "", f"[red]{ending.failure}[/red]"
    same = runs.reference.result is not None and result.digest == runs.reference.result.digest
    colour = "green" if same else "red"
    return (
        format_time(result.load_seconds * 1e9),
        format_time(result.run_seconds * 1e9),
        f"[{colour}]{result.digest[:16]}[/{colour}]",
    )

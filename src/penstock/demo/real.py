"""Part two: trained weights, streamed from their own safetensors file in place.

The sentence encoder embeds the sentences of `sentences.txt` three times: with everything in memory,
with a budget at its floor, and with one of three quarters of its weights. The passes are interleaved,
so that the times compare on a machine whose speed swings.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock.demo.screen import make_table, show_progress
from penstock.schedule.errors import PenstockError
from penstock.schedule.sizes import format_size, parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.demo.encoder import Encoder

ROUNDS = 5
SHOWN_PAIRS = 5
SHARE = "75%"
"""The second budget. Half of the weights would be below the floor: the word vectors alone are more."""


@dataclass(frozen=True)
class BudgetRun:
    """One streamed module, after all rounds. Bytes moved and stalls are those of one round."""

    budget: int
    memory: int
    moved: int
    stall_seconds: float
    misses: int
    seconds: float
    equal: bool
    arena: str


@dataclass(frozen=True)
class Embedded:
    """What part two found. `nearest` has the most similar pairs of sentences and their cosine."""

    weight_bytes: int
    floor: int
    memory_seconds: float
    runs: tuple[BudgetRun, ...]
    nearest: tuple[tuple[str, str, float], ...]

    @property
    def holds(self) -> bool:
        return all(run.equal for run in self.runs)


class MissingExtraError(PenstockError):
    """A package that only the demo needs is not installed."""


def run_real(console: Console) -> Embedded:
    """Embed the sentences in memory and streamed, and print how they compare.

    Raises `MissingExtraError` where the packages of the extra `demo` are missing.
    """
    sentences = files("penstock.demo").joinpath("sentences.txt").read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        found = embed(console, sentences, Path(folder) / "minilm.penstock")
    print_embedded(console, found, len(sentences))
    return found


def embed(console: Console, sentences: list[str], artifact: Path) -> Embedded:
    """Compile the encoder to `artifact`, and run it at each budget beside the one in memory."""
    import torch

    with show_progress(console, "loading all-MiniLM-L6-v2"):
        encoder = _load(sentences)
    with show_progress(console, "exporting and compiling it, weights in place"):
        program = _compile(encoder, artifact)
    with ExitStack() as stack, torch.no_grad():
        with show_progress(console, "planning two budgets"):
            budgets = (program.floor_bytes, parse_size(SHARE, total=program.weight_bytes))
            modules = [stack.enter_context(program.load(budget=budget)) for budget in budgets]
        with show_progress(console, "embedding the sentences", ROUNDS) as report:
            reference, memory_seconds, streamed = _run_rounds(encoder, modules, report)
        runs = tuple(
            _summarise(budget, module, outputs, seconds, reference)
            for budget, module, (outputs, seconds) in zip(budgets, modules, streamed, strict=True)
        )
    return Embedded(
        weight_bytes=program.weight_bytes,
        floor=program.floor_bytes,
        memory_seconds=median(memory_seconds),
        runs=runs,
        nearest=_name_nearest(reference, sentences),
    )


def _run_rounds(
    encoder: Encoder, modules: list[Any], report: Callable[[int], None]
) -> tuple[Tensor, list[float], list[tuple[list[Tensor], list[float]]]]:
    """Embed all batches ROUNDS times with each: the reference and its times, then each module's."""
    memory_seconds: list[float] = []
    streamed: list[tuple[list[Tensor], list[float]]] = [([], []) for _ in modules]
    for _ in range(ROUNDS):
        reference, seconds = _embed_all(encoder.module, encoder)
        memory_seconds.append(seconds)
        for module, (outputs, times) in zip(modules, streamed, strict=True):
            output, seconds = _embed_all(module, encoder)
            outputs.append(output)
            times.append(seconds)
        report(1)
    return reference, memory_seconds, streamed


def _embed_all(call: Callable[[Tensor, Tensor], Tensor], encoder: Encoder) -> tuple[Tensor, float]:
    """The vectors of all sentences, and the seconds that took."""
    import torch

    start = time.perf_counter()
    vectors = torch.cat([call(ids, mask) for ids, mask in encoder.batches])
    return vectors, time.perf_counter() - start


def _summarise(
    budget: int, module: Any, outputs: list[Tensor], seconds: list[float], reference: Tensor
) -> BudgetRun:
    """What one module's rounds say; bit for bit means every round of them."""
    import torch

    stats = module.stats
    return BudgetRun(
        budget=budget,
        memory=stats.peak_bytes,
        moved=stats.bytes_moved // ROUNDS,
        stall_seconds=stats.stall_seconds / ROUNDS,
        misses=stats.misses,
        seconds=median(seconds),
        equal=all(torch.equal(output, reference) for output in outputs),
        arena=stats.arena,
    )


def _name_nearest(vectors: Tensor, sentences: list[str]) -> tuple[tuple[str, str, float], ...]:
    from penstock.demo.encoder import find_nearest

    return tuple((sentences[a], sentences[b], value) for a, b, value in find_nearest(vectors))


def _compile(encoder: Encoder, artifact: Path) -> Any:
    """The program, its weights left in the package's own file."""
    import penstock
    from penstock.demo.encoder import PREFIX, export_encoder

    # What compile says on the way would end up in the JSON.
    with contextlib.redirect_stdout(io.StringIO()):
        return penstock.compile(
            export_encoder(encoder),
            artifact,
            weights=encoder.weights,
            rename=lambda fqn: fqn.removeprefix(PREFIX),
            pack=False,
        )


def _load(sentences: list[str]) -> Encoder:
    try:
        from penstock.demo.encoder import load_encoder

        return load_encoder(sentences)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"part two needs the package {error.name!r}: pip install 'penstock[demo]', or run --part cap"
        ) from error


def print_embedded(console: Console, found: Embedded, count: int) -> None:
    """The nearest sentences, the table of budgets, and whether the bits are equal."""
    for first, second, similarity in found.nearest[:SHOWN_PAIRS]:
        console.print(f"  [bold]{similarity:.2f}[/bold]  {first}\n        {second}", highlight=False)
    console.print()
    table = make_table("", "budget", "floor", "memory", "moved", "stalled", "time", "vectors")
    whole = format_size(found.weight_bytes)
    table.add_row("in memory", "", "", whole, "", "", f"{found.memory_seconds * 1e3:.0f} ms", "the reference")
    for run in found.runs:
        table.add_row(
            "penstock",
            format_size(run.budget),
            format_size(found.floor),
            format_size(run.memory),
            format_size(run.moved),
            f"{run.stall_seconds * 1e3:.0f} ms",
            f"{run.seconds * 1e3:.0f} ms ({run.seconds / found.memory_seconds:.2f} x)",
            "[green]equal, bit for bit[/green]" if run.equal else "[red]different[/red]",
        )
    console.print(table)
    console.print(
        f"  {count} sentences, times and bytes are for all of them once, the median of {ROUNDS} rounds; "
        f"{found.runs[0].arena}",
        style="dim",
        highlight=False,
    )

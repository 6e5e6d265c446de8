"""Part two: trained weights, streamed from their own safetensors file in place.

The sentence encoder embeds the sentences of `sentences.txt` three times: with all weights in memory,
with a budget at its floor, and with a budget of a quarter of its weights. The passes are
interleaved, so that their times can be compared on a machine whose speed varies.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding

from examples.demo.screen import make_table, shorten, show_progress
from penstock.schedule.facts.sizes import format_time, parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from examples.demo.encoder import Encoder

ROUNDS = 5
SHOWN_PAIRS = 5
SHARE = "25%"
"""The second budget, in which some of the layers stay, and the word vectors that were looked up."""


@dataclass(frozen=True)
class BudgetRun:
    """The results of one streamed module after all rounds. Bytes moved and stalls are means for one round."""

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
    """The results of part two. `nearest` has the most similar pairs of sentences and their cosines."""

    weight_bytes: int
    floor: int
    memory_seconds: float
    runs: tuple[BudgetRun, ...]
    nearest: tuple[tuple[str, str, float], ...]

    @property
    def holds(self) -> bool:
        return all(run.equal for run in self.runs)


@dataclass
class _Rounds:
    """A streamed module, its counters before the first round, and the output and seconds of each round."""

    module: Any
    before: Any
    outputs: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_real(console: Console) -> Embedded:
    """Compare weights in memory and streamed."""
    sentences = Path(__file__).with_name("sentences.txt").read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        embedded = embed(console, sentences, Path(folder) / "minilm.penstock")
    print_embedded(console, embedded, len(sentences))
    return embedded


def embed(console: Console, sentences: list[str], artifact: Path) -> Embedded:
    """Compile the encoder to `artifact`, and run it at each budget and with all weights in memory."""
    import torch

    with show_progress(console, "loading all-MiniLM-L6-v2"):
        from examples.demo.encoder import load_encoder

        encoder = load_encoder(sentences)
    with show_progress(console, "exporting and compiling it, weights in place"):
        program = _compile(encoder, artifact)
    with ExitStack() as stack, torch.no_grad():
        with show_progress(console, "planning two budgets"):
            budgets = (program.floor_bytes, parse_size(SHARE, total=program.weight_bytes))
            modules = [stack.enter_context(program.load(budget=budget)) for budget in budgets]
        with show_progress(console, "embedding the sentences", ROUNDS) as report:
            reference, memory_seconds, rounds = _run_rounds(encoder, modules, report)
        runs = tuple(_summarise(each, reference) for each in rounds)
    return Embedded(
        weight_bytes=program.weight_bytes,
        floor=program.floor_bytes,
        memory_seconds=median(memory_seconds),
        runs=runs,
        nearest=_name_nearest(reference, sentences),
    )


def _run_rounds(
    encoder: Encoder, modules: list[Any], report: Callable[[int], None]
) -> tuple[Tensor, list[float], list[_Rounds]]:
    """Embed all batches ROUNDS times; return the output, times in memory, and rounds of each module."""
    for call in (encoder.module, *modules):
        _embed_all(call, encoder)
    memory_seconds: list[float] = []
    rounds = [_Rounds(module, module.stats) for module in modules]
    for _ in range(ROUNDS):
        reference, seconds = _embed_all(encoder.module, encoder)
        memory_seconds.append(seconds)
        for each in rounds:
            output, seconds = _embed_all(each.module, encoder)
            each.outputs.append(output)
            each.seconds.append(seconds)
        report(1)
    return reference, memory_seconds, rounds


def _embed_all(call: Callable[[Tensor, Tensor], Tensor], encoder: Encoder) -> tuple[Tensor, float]:
    """The vectors of all sentences, and the seconds that embedding them took."""
    import torch

    start = time.perf_counter()
    vectors = torch.cat([call(ids, mask) for ids, mask in encoder.batches])
    return vectors, time.perf_counter() - start


def _summarise(rounds: _Rounds, reference: Tensor) -> BudgetRun:
    """The results of one module's rounds; `equal` means that every round equals the reference bit for bit."""
    import torch

    before, after = rounds.before, rounds.module.stats
    return BudgetRun(
        budget=after.budget,
        memory=after.peak_bytes,
        moved=(after.bytes_moved - before.bytes_moved) // ROUNDS,
        stall_seconds=(after.stall_seconds - before.stall_seconds) / ROUNDS,
        misses=after.misses,
        seconds=median(rounds.seconds),
        equal=all(torch.equal(output, reference) for output in rounds.outputs),
        arena=after.arena,
    )


def _name_nearest(vectors: Tensor, sentences: list[str]) -> tuple[tuple[str, str, float], ...]:
    from examples.demo.encoder import find_nearest

    return tuple((sentences[a], sentences[b], value) for a, b, value in find_nearest(vectors))


def _compile(encoder: Encoder, artifact: Path) -> Any:
    """The compiled program, whose weights stay in the package's own file."""
    import penstock
    from examples.demo.encoder import PREFIX, export_encoder

    return penstock.compile(
        export_encoder(encoder),
        artifact,
        weights=encoder.weights,
        rename=lambda fqn: fqn.removeprefix(PREFIX),
        pack=False,
    )


def print_embedded(console: Console, embedded: Embedded, count: int) -> None:
    """Print the nearest sentences, and the table of budgets, which says whether the bits are equal."""
    say = partial(console.print, highlight=False)
    say(
        f"\n  [bold]all-MiniLM-L6-v2, trained weights, streamed from the file they came in[/bold]\n"
        f"  {shorten(embedded.weight_bytes)} of float32 weights, {count} sentences; the nearest are\n"
    )
    for first, second, similarity in embedded.nearest[:SHOWN_PAIRS]:
        say(f"  {similarity:.2f}  {first}\n        {second}")
    say()
    table = make_table("", "budget", "memory", "moved", "stalled", "time", "vectors")
    whole = format_time(embedded.memory_seconds * 1e9)
    table.add_row("memory", "", shorten(embedded.weight_bytes), "", "", whole, "reference")
    for run in embedded.runs:
        table.add_row(
            "penstock",
            shorten(run.budget),
            shorten(run.memory),
            shorten(run.moved),
            format_time(run.stall_seconds * 1e9),
            f"{run.seconds / embedded.memory_seconds:.2f} x",
            "[green]same bits[/green]" if run.equal else "[red]different[/red]",
        )
    say(Padding.indent(table, 2))
    misses = sum(run.misses for run in embedded.runs)
    notes = (
        f"\nthe first budget is the least that works; moved, stalled and time are for all sentences once: "
        f"medians and means of {ROUNDS} interleaved rounds, after one to warm up; {misses} misses\n"
        f"{embedded.runs[0].arena}"
    )
    say(Padding.indent(notes, 2), style="dim")

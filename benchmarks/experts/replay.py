"""Replays routes of mixtures of experts: hits by policy and size of the pool, and the most possible.

The recorded ones are those that `recorded_routes.py` has written. The others are made up: every
layer has 64 experts, of which a token asks for 8. In each layer experts are popular by Zipf's law with
exponent 1; with drift, two of them swap their places now and then. An expert has two weights, of which the
first is twice as large. Sizes of pools are in multiples of what a token asks for. With `--docs` the tables
are written into a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.experts.mixture import RESULTS, recorded_experts
from benchmarks.table import write_between
from penstock.schedule.facts.model import Part, SparseRead, Step, Storage, Trace
from penstock.schedule.sparse.replay import Replay, replay
from penstock.schedule.sparse.routes import Ask, Profile, Routes, profile_of, routed_reads

BEGIN = "<!-- benchmarks.experts.replay writes from here -->"
EXPERTS, TOP = 64, 8
UNIT = 64 << 10
"""Bytes of the smaller weight of an expert. The larger one has twice as many."""

SHARES = (0.75, 1.5, 4.0)
DRIFTS = (0.0, 0.1, 0.3)
"""How often two experts of a layer swap their popularity, in times a token."""


_ASKED = {"anywhere": 1.02, "at 1.5 tokens' worth of recorded routes": 0.86}
"""At most how many of the bytes that LRU misses."""

_HEAD = "tokens' worth | LRU | LFU | penstock | at most | bytes against LRU |"


def mixture(layers: int, tokens: int, *, drift: float, seed: int = 0) -> Profile:
    """The routes of calls of one token each through a mixture that was never made."""
    return profile(list(_drawn(layers, tokens, drift, seed)), EXPERTS)


def profile(tokens: Sequence[Sequence[tuple[int, ...]]], experts: int) -> Profile:
    """The routes of calls of one token each, of which each layer asks for some of its experts."""
    storages: list[Storage] = []
    steps, names = [], []
    for layer, asked in enumerate(tokens[0]):
        for name, nbytes in (("gate_up", 2 * UNIT), ("down", UNIT)):
            view = Part("", "uint8", (experts, nbytes), (nbytes, 1), len(storages), 0)
            read = SparseRead(view, "aten._grouped_mm.default", layer, len(asked))
            steps.append(Step(f"{name}.{layer}", (len(storages),), 0, 0, sparse=(read,)))
            names.append(f"layers.{layer}.{name}")
            storages.append(Storage(experts * nbytes, "streamable"))
    traces = (Trace("forward", 0, "", tuple(steps), 0, 0, "modelled"),)
    reads = tuple(routed_reads(traces, [0] * len(storages), names))
    calls = (
        tuple(Ask(2 * layer + half, units) for layer, units in enumerate(token) for half in (0, 1))
        for token in tokens
    )
    return profile_of(Routes(reads, tuple(calls)), storages, traces, names)


def _drawn(layers: int, tokens: int, drift: float, seed: int) -> Iterator[list[tuple[int, ...]]]:
    """Eight experts of every layer, drawn without replacement in proportion to their popularity (Gumbel)."""
    random = np.random.default_rng(seed)
    popularity = [random.permutation(-np.log(np.arange(1, EXPERTS + 1))) for _ in range(layers)]
    for _ in range(tokens):
        token = []
        for logits in popularity:
            if random.random() < drift:
                first, second = random.choice(EXPERTS, 2, replace=False)
                logits[[first, second]] = logits[[second, first]]
            drawn = np.argsort(-(logits + random.gumbel(size=EXPERTS)))[:TOP]
            token.append(tuple(sorted(drawn.tolist())))
        yield token


def replayed(given: Profile) -> Iterator[tuple[float, Replay]]:
    """The replays of routes in pools of each size, in multiples of what a call asks for."""
    asked = sum(len(ask.units) for ask in given.routes.calls[0][::2]) * 3 * UNIT
    for share in SHARES:
        yield share, replay(given, given.pool(round(share * asked)))


def _row(names: str, share: float, done: Replay) -> str:
    moved = (done.lru, done.lfu, done.penstock)
    hits = [*(done.hits(one.nbytes) for one in moved), done.hits(done.least_bytes)]
    shown = " | ".join(f"{100 * one:.1f}" for one in hits)
    return f"| {names} | {share:g} | {shown} | {_against(done):.3f} |"


def _against(done: Replay) -> float:
    return done.penstock.nbytes / done.lru.nbytes


def render(layers: Sequence[int], tokens: int, recorded: Sequence[Path]) -> str:
    """The tables as Markdown: of recorded routes, of those that are made up, and what was asked of both."""
    against: dict[str, list[float]] = {name: [] for name in _ASKED}
    anywhere, worth = against.values()
    lines = [f"| recorded routes | {_HEAD}", "|---" * 7 + "|"]
    for path in recorded:
        _, experts, kind = path.stem.split("-")
        for share, done in replayed(profile(recorded_experts(path), int(experts))):
            lines.append(_row(f"{kind}, {experts} experts", share, done))
            anywhere.append(_against(done))
            worth += [_against(done)] if share == 1.5 else []
    lines += ["", f"| layers | swaps a token | {_HEAD}", "|---" * 8 + "|"]
    for count in layers:
        for drift in DRIFTS:
            for share, done in replayed(mixture(count, tokens, drift=drift)):
                lines.append(_row(f"{count} | {drift:g}", share, done))
                anywhere.append(_against(done))
    lines += ["", "| bytes against LRU | asked, at most | measured, at most | met |", "|---|---|---|---|"]
    for name, bar in _ASKED.items():
        if against[name]:
            most = max(against[name])
            lines.append(f"| {name} | {bar} | {most:.3f} | {'yes' if most <= bar else '**no**'} |")
    return "\n".join(lines) + "\n"


def main(
    layers: Annotated[list[int] | None, typer.Option(help="May be given again.")] = None,
    tokens: int = 300,
    docs: Annotated[Path | None, typer.Option(help="A document with the mark of this benchmark.")] = None,
) -> None:
    """Print the tables, or write them into a document."""
    table = render(layers or [6, 16], tokens, sorted(RESULTS.glob("routes-*.jsonl")))
    if docs is None:
        print(table, end="")
    else:
        write_between(docs, table, BEGIN)


if __name__ == "__main__":
    typer.run(main)

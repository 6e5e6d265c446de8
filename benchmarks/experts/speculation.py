"""What guessing the next layer's experts would save: reads that a call no longer waits for, and reads wasted.

While a layer computes, the experts that the next layer will probably ask for, and that are not in memory, are
brought into a buffer that is taken from the pool. The guess is by how often experts of two consecutive layers
were asked for by the same token, counted as tokens come, with a half-life of 128. The recorded routes are
those of `replay.py`. In the made-up ones tokens have topics, and each topic prefers other experts in
every layer: the more it does, the more one layer tells of the next. With `--docs` the table is written into a
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.experts.mixture import RESULTS, recorded_experts
from benchmarks.experts.replay import EXPERTS, TOP, UNIT, profile
from benchmarks.table import write_between
from penstock.schedule.sparse.residency import Residency
from penstock.schedule.sparse.routes import Profile

BEGIN = "<!-- benchmarks.experts.speculation writes from here -->"
GUESSED = 4
"""Experts that are brought for a layer at most."""

PREFERENCES = (0.0, 2.0, 4.0)
"""By how much the logits of a topic's experts differ from those of all tokens: one standard deviation."""

SHARES = (0.75, 1.5, 4.0)
_TOPICS, _STAYS = 16, 0.8
_FORGETS = 0.5 ** (1 / 128)


def made_up(layers: int, tokens: int, preference: float) -> Profile:
    """The routes of tokens of which each has its topic, mostly that of the token before."""
    random = np.random.default_rng(0)
    ranks = -np.log(np.arange(1, EXPERTS + 1))
    popularity = np.stack([random.permutation(ranks) for _ in range(layers)])
    topics = preference * random.standard_normal((_TOPICS, layers, EXPERTS))
    topic, found = 0, []
    for _ in range(tokens):
        if random.random() > _STAYS:
            topic = int(random.integers(_TOPICS))
        logits = popularity + topics[topic] + random.gumbel(size=(layers, EXPERTS))
        drawn = np.sort(np.argsort(-logits, axis=1)[:, :TOP], axis=1)
        found.append([tuple(asked) for asked in drawn.tolist()])
    return profile(found, EXPERTS)


@dataclass
class Outcome:
    """Experts that layers missed, those of them that had been guessed, and guesses that came to nothing."""

    missed: int = 0
    covered: int = 0
    wasted: int = 0


def outcome(routed: Profile, nbytes: int, guessed: int) -> Outcome:
    """What a pool of `nbytes` misses, of which a buffer for `guessed` experts is taken."""
    pool = routed.pool(nbytes - guessed * 3 * UNIT)
    residency, found = Residency(pool, routed.traces), Outcome()
    layers = len(routed.routes.reads) // 2
    reads = routed.reads()
    together = np.full((layers, reads[0].count, reads[0].count), 1 / reads[0].count)
    for call in routed.routes.calls:
        residency.begin()
        together *= _FORGETS
        guesses: set[int] = set()
        for ask in call:
            at = routed.routes.reads[ask.read]
            residency.ask(at.graph, at.step, ask.units)
            missing = {number for _, number in residency.acquire(at.graph, at.step, ask.units).bring}
            residency.release(at.graph, at.step, ask.units)
            layer, part = divmod(ask.read, 2)
            if part:
                continue
            found.missed += len(missing)
            found.covered += len(missing & guesses)
            found.wasted += len(guesses - missing)
            if layer:
                together[layer][np.ix_(call[ask.read - 2].units, ask.units)] += 1
            guesses = set()
            if guessed and layer + 1 < layers:
                asks = together[layer + 1][list(ask.units)].sum(0)
                held = {
                    number for storage, number in residency.held if storage == reads[ask.read + 2].storage
                }
                likely = [number for number in np.argsort(-asks).tolist() if number not in held]
                guesses = set(likely[:guessed])
    return found


def render(layers: int, tokens: int, recorded: Sequence[Path]) -> str:
    """The table as Markdown."""
    lines = [
        "| routes | tokens' worth | missed a token | with guesses | waited for | wasted | reads in all |",
        "|---|---|---|---|---|---|---|",
    ]
    routed = {
        f"recorded, {path.stem.split('-')[2]}": profile(recorded_experts(path), int(path.stem.split("-")[1]))
        for path in recorded
    }
    routed |= {f"made up, preference {one:g}": made_up(layers, tokens, one) for one in PREFERENCES}
    for name, one in routed.items():
        calls, worth = len(one.routes.calls), 3 * UNIT * sum(read.asked for read in one.reads()) // 2
        for share in SHARES:
            before, now = (outcome(one, round(share * worth), guessed) for guessed in (0, GUESSED))
            counts = (before.missed, now.missed, now.missed - now.covered, now.wasted)
            shown = " | ".join(f"{count / calls:.1f}" for count in counts)
            all_reads = (now.missed + now.wasted) / before.missed
            lines.append(f"| {name} | {share:g} | {shown} | {all_reads:.2f} |")
    return "\n".join(lines) + "\n"


def main(
    layers: int = 8,
    tokens: int = 400,
    docs: Annotated[Path | None, typer.Option(help="A document with the mark of this benchmark.")] = None,
) -> None:
    """Print the table, or write it into a document."""
    table = render(layers, tokens, sorted(RESULTS.glob("routes-*.jsonl")))
    if docs is None:
        print(table, end="")
    else:
        write_between(docs, table, BEGIN)


if __name__ == "__main__":
    typer.run(main)

"""Hard instances for the address allocator, each with a bound that no packing beats.

- `cut`: a full rectangle of memory and time, cut again and again at random: everything fits without a hole,
  and the packing before the cuts reaches the bound.
- `mixed`: many short lives beside a few long ones, sizes over three orders of magnitude.
- `dense`: long lives everywhere, so that nearly all blocks conflict.
- `around`: lives that wrap around the pass.
- `scattered`: lives of a few steps anywhere, as weights have that are read several times.
- `layers`: a decoder's layers, one product alive while the next is copied, and caches that live for long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FAMILIES = {"cut": 1.25, "mixed": 1.1, "dense": 1.15, "around": 1.2, "scattered": 1.2, "layers": 1.1}
"""Each family with the ratio to its bound that the tests accept at 60 blocks."""

STEPS = 96


@dataclass(frozen=True)
class Instance:
    """Sizes in bytes, the steps at which each block is alive, and the most bytes alive at once."""

    sizes: Sequence[int]
    alive: Sequence[Sequence[int]]

    @property
    def bound(self) -> int:
        """Bytes below which no packing goes: the most that are alive at one step."""
        load = [0] * STEPS
        for size, steps in zip(self.sizes, self.alive, strict=True):
            for step in steps:
                load[step] += size
        return max(load)


def make_instance(family: str, *, blocks: int, seed: int) -> Instance:
    """An instance of one of `FAMILIES` with about `blocks` blocks; equal seeds give equal instances."""
    draw = random.Random(f"{family} {blocks} {seed}")
    rows = _cut(draw, blocks) if family == "cut" else [_block(draw, family, n) for n in range(blocks)]
    return Instance([size for size, _ in rows], [steps for _, steps in rows])


def _cut(draw: random.Random, blocks: int) -> list[tuple[int, list[int]]]:
    """Rectangles (bytes, steps) cut from one by lines through the largest."""
    pieces = [(1 << 20, 0, STEPS)]
    while len(pieces) < blocks:
        pieces.sort(key=lambda piece: -piece[0] * (piece[2] - piece[1]))
        size, start, stop = pieces.pop(0)
        if stop - start > 1 and draw.random() < 0.5:
            at = draw.randint(start + 1, stop - 1)
            pieces += [(size, start, at), (size, at, stop)]
        else:
            part = int(size * draw.uniform(0.2, 0.8))
            pieces += [(part, start, stop), (size - part, start, stop)]
    return [(size, list(range(start, stop))) for size, start, stop in pieces]


def _block(draw: random.Random, family: str, number: int) -> tuple[int, list[int]]:
    start = draw.randrange(STEPS)
    size, length = int(2 ** draw.uniform(8, 18)), draw.randint(1, 6)
    if family == "mixed" and number % 8 == 0:
        length = draw.randint(STEPS // 2, STEPS)
    if family == "dense":
        length = draw.randint(STEPS // 3, 2 * STEPS // 3)
    if family == "around":
        size, length = draw.choice((1, 2, 3, 5, 8)) << 14, draw.randint(4, STEPS // 3)
        return size, [(start + k) % STEPS for k in range(length)]
    if family == "scattered":
        return draw.randint(1, 9) << 16, sorted(draw.sample(range(7), draw.randint(1, 4)))
    if family == "layers":
        start = number * STEPS // 64 % STEPS
        size = (4, 1, 1, 4, 14, 14, 14)[number % 7] << 16
        length = STEPS if number % 16 == 0 else 3
    return size, list(range(start, min(STEPS, start + length)))

"""Addresses for blocks of which those that are alive together may not overlap, in little memory.

This is offline dynamic storage allocation. First fit, in the order of the addresses that an optimum has,
finds that optimum (push every block down); so what is searched for is an order:

- a few blocks are searched through by branch and bound, in ascending order of address;
- more are placed in several orders that do well in compilers, and then again and again, each time with
  the blocks that ended highest placed earlier (squeaky wheel optimisation: Joslin and Clements, JAIR
  10, 1999).

The most bytes alive at one step is a bound that no placement beats: what is alive together is a clique
of the conflict graph. (Buchsbaum et al., OPT versus LOAD in dynamic storage allocation, SIAM J. Comput.
33(3), 2004: large blocks can force more, so a gap need not be the search's fault.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_EXACT = 10
"""Blocks, at most, that are searched through."""

_WORK = 400_000
"""Pairs of conflicting blocks that one search looks at, at most, unless it is told otherwise."""

_NODES = 30_000
"""Partial placements that branch and bound looks at, at most."""


@dataclass(frozen=True)
class Packing:
    """An address for each block, the end of the highest, and the bytes that no packing goes below."""

    addresses: tuple[int, ...]
    nbytes: int
    bound: int


def pack_blocks(
    sizes: Sequence[int], alive: Sequence[Collection[int]], *, work: int = _WORK, seed: int = 0
) -> Packing:
    """The smallest packing found of blocks of these sizes in bytes, each alive at some steps.

    `bound` is the most bytes alive at one step, and `nbytes` itself where the search was complete.
    `work` limits the search, in pairs of conflicting blocks.
    """
    conflicts = conflicts_of(alive)
    load = _load(sizes, alive)
    best = _improved(sizes, alive, conflicts, load=load, tries=_tries(conflicts, work), seed=seed)
    top = height(sizes, best)
    if top > load and len(sizes) <= _EXACT:
        found, complete = _BranchAndBound(sizes, alive, conflicts, top).run()
        best = found or best
        top = height(sizes, best)
        load = top if complete else load
    return Packing(tuple(best), top, load)


def conflicts_of(alive: Sequence[Collection[int]]) -> list[list[int]]:
    """For each block the others that are alive at a step of its own."""
    at: dict[int, list[int]] = {}
    for block, steps in enumerate(alive):
        for step in steps:
            at.setdefault(step, []).append(block)
    conflicts: list[set[int]] = [set() for _ in alive]
    for together in {tuple(blocks) for blocks in at.values()}:
        for block in together:
            conflicts[block].update(together)
    return [sorted(others - {block}) for block, others in enumerate(conflicts)]


def first_fit(sizes: Sequence[int], conflicts: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Each block in turn at the lowest address at which it overlaps none that it conflicts with."""
    addresses = [-1] * len(sizes)
    for block in order:
        addresses[block] = _lowest(block, sizes, conflicts, addresses)
    return addresses


def height(sizes: Sequence[int], addresses: Sequence[int]) -> int:
    """The end of the highest block."""
    return max((at + size for at, size in zip(addresses, sizes, strict=True)), default=0)


def _lowest(
    block: int, sizes: Sequence[int], conflicts: Sequence[Sequence[int]], addresses: Sequence[int]
) -> int:
    taken = sorted((addresses[o], addresses[o] + sizes[o]) for o in conflicts[block] if addresses[o] >= 0)
    size, address = sizes[block], 0
    for start, stop in taken:
        if start >= address + size:
            break
        address = max(address, stop)
    return address


def _load(sizes: Sequence[int], alive: Sequence[Collection[int]]) -> int:
    """The most bytes alive at one step."""
    at: dict[int, int] = {}
    for size, steps in zip(sizes, alive, strict=True):
        for step in steps:
            at[step] = at.get(step, 0) + size
    return max(at.values(), default=0)


def _tries(conflicts: Sequence[Sequence[int]], work: int) -> int:
    return 1 + work // (1 + len(conflicts) + sum(len(others) for others in conflicts))


def _orders(sizes: Sequence[int], alive: Sequence[Collection[int]]) -> Iterator[list[int]]:
    """Orders that do well: large first, long-lived first, both, and by first use."""
    blocks = range(len(sizes))
    yield sorted(blocks, key=lambda b: -sizes[b])
    yield sorted(blocks, key=lambda b: -len(alive[b]))
    yield sorted(blocks, key=lambda b: -len(alive[b]) * sizes[b])
    yield sorted(blocks, key=lambda b: min(alive[b], default=0))


def _improved(
    sizes: Sequence[int],
    alive: Sequence[Collection[int]],
    conflicts: Sequence[Sequence[int]],
    *,
    load: int,
    tries: int,
    seed: int,
) -> list[int]:
    """The best of some orders and of what squeaky wheels make of the best of them."""
    draw = random.Random(seed)
    placed = [(first_fit(sizes, conflicts, order), order) for order in _orders(sizes, alive)]
    best, order = min(placed, key=lambda one: height(sizes, one[0]))
    top = height(sizes, best)
    current = best
    for _ in range(tries):
        if top <= load:
            break
        order = _squeaked(sizes, current, order, load, draw)
        current = first_fit(sizes, conflicts, order)
        if height(sizes, current) <= top:
            best, top = current, height(sizes, current)
    return best


def _squeaked(
    sizes: Sequence[int], addresses: Sequence[int], order: Sequence[int], load: int, draw: random.Random
) -> list[int]:
    """The order with every block that ends above the bound moved forward, by a drawn number of places."""
    places = {
        block: place - (draw.random() * len(order) / 2 if addresses[block] + sizes[block] > load else 0)
        for place, block in enumerate(order)
    }
    return sorted(order, key=lambda block: places[block])


class _BranchAndBound:
    """Every placement in which each block lies as low as those below it allow, in ascending address."""

    def __init__(
        self,
        sizes: Sequence[int],
        alive: Sequence[Collection[int]],
        conflicts: Sequence[Sequence[int]],
        top: int,
    ) -> None:
        self.sizes, self.conflicts, self.top = sizes, conflicts, top
        steps = dict.fromkeys(itertools.chain.from_iterable(alive))
        self.together = [[b for b, lives in enumerate(alive) if step in lives] for step in steps]
        self.addresses = [-1] * len(sizes)
        self.best: list[int] | None = None
        self.nodes = 0

    def run(self) -> tuple[list[int] | None, bool]:
        """A better placement, if there is one, and whether all were looked at."""
        self._extend((0, -1))
        return self.best, self.nodes < _NODES

    def _extend(self, last: tuple[int, int]) -> None:
        self.nodes += 1
        rest = [b for b, address in enumerate(self.addresses) if address < 0]
        if not rest:
            self.best, self.top = list(self.addresses), height(self.sizes, self.addresses)
            return
        lowest = {b: _lowest(b, self.sizes, self.conflicts, self.addresses) for b in rest}
        if self._hopeless(lowest, last[0]):
            return
        for at, b in sorted((address, b) for b, address in lowest.items()):
            if (at, b) < last or at + self.sizes[b] >= self.top or self.nodes >= _NODES:
                continue
            self.addresses[b] = at
            self._extend((at, b))
            self.addresses[b] = -1

    def _hopeless(self, lowest: dict[int, int], last: int) -> bool:
        """Whether what is still to be placed at some step cannot end below the best."""
        for blocks in self.together:
            rest = [b for b in blocks if b in lowest]
            if rest:
                start = max(last, min(lowest[b] for b in rest))
                if start + sum(self.sizes[b] for b in rest) >= self.top:
                    return True
        return False

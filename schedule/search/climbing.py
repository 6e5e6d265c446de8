"""A longer search for a contiguous arena: addresses change a little at a time, while the plan gets faster."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from penstock.schedule.facts.problem import Problem
from penstock.schedule.search.draft import Draft, Occupancy
from penstock.schedule.space.addresses import Addressing, read_together
from penstock.schedule.space.spans import Block

_MOVES = (1, 1, 1, 2, 2, 3)
"""How many blocks change places in one attempt; drawn from these."""

_STALE = 40
"""The search begins again when this many attempts for each block have found nothing faster."""

_KICKS = 6
"""How many changes a restart makes to the best addresses, without asking whether they are faster."""

_LEAST_PARTS = (16, 0, 64)
"""The smallest parts of a block that get a copy of their own, in latencies, tried with a better placement."""


def climb(
    problem: Problem,
    blocks: Sequence[Block],
    draft: Draft,
    cap: int,
    go_on: Callable[[int], bool],
    *,
    seed: int = 0,
) -> Draft:
    """The fastest draft found from `draft` on, in `cap` bytes of a contiguous arena.

    `go_on` is asked before each attempt, with the best period so far in nanoseconds, whether to go on. Two
    blocks of the same size change places, or a block moves by a power of two granules or to an edge of
    another one; what is not slower is kept. Where nothing has been faster for long, the search begins again
    at the best addresses, some of which are changed at random. From where another climb has ended, the same
    `seed` would try the same changes again.
    """
    climber = _Climber(problem, blocks, draft, cap, random.Random(seed))
    while climber.hot and go_on(climber.best_ns):
        climber.attempt()
    return climber.best


class _Climber:
    """Where a climb stands: the best draft and its addresses, and the addresses that are changed next.

    `hot` are the blocks that share memory: others change places with them, or nothing would become faster.
    """

    def __init__(
        self, problem: Problem, blocks: Sequence[Block], draft: Draft, cap: int, draw: random.Random
    ) -> None:
        self.problem, self.blocks, self.draw = problem, blocks, draw
        self.granule = problem.arena.granule
        self.cap = cap // self.granule * self.granule
        always = {b for b, block in enumerate(blocks) if block.kept}
        self.apart = [{*read, *always} - {b} for b, read in enumerate(read_together(blocks))]
        self.sizes: dict[int, list[int]] = {}
        for b, block in enumerate(blocks):
            if not block.kept:
                self.sizes.setdefault(block.size, []).append(b)
        self.best, self.best_ns = draft, sum(draft.periods_ns(problem))
        self.now = [draft.addresses[block.storage] - block.shift for block in blocks]
        self.best_addresses, self.now_ns = list(self.now), self.best_ns
        self.hot = self._shared(self.now)
        self.stale = 0

    def attempt(self) -> None:
        """Change a few addresses, and keep them unless the plan is slower."""
        self.stale += 1
        if self.stale > _STALE * len(self.blocks):
            self._restart()
        if places := self._changed(self.draw.choice(_MOVES)):
            self._time(places)

    def _restart(self) -> None:
        self.stale = 0
        self.now = list(self.best_addresses)
        for _ in range(_KICKS):
            self.now = self._changed(1) or self.now
        self.now_ns = self._period(self.now, _LEAST_PARTS[0], math.inf)[1]
        self.hot = self._shared(self.now) or self.hot

    def _time(self, places: list[int]) -> None:
        draft, period = self._period(places, _LEAST_PARTS[0], self.now_ns)
        if period > self.now_ns:
            return
        if period < self.now_ns:
            self.hot = self._shared(places) or self.hot
        self.now, self.now_ns = places, period
        if period >= self.best_ns:
            return
        self.stale, self.best_addresses = 0, list(places)
        timed = [(draft, period), *(self._period(places, part, period) for part in _LEAST_PARTS[1:])]
        self.best, self.best_ns = min(timed, key=lambda pair: pair[1])

    def _period(self, places: Sequence[int], part: int, enough: float) -> tuple[Draft, int]:
        """The faster of the drafts that addresses allow, and the sum of `periods_ns`."""
        top = max(at + block.size for at, block in zip(places, self.blocks, strict=True))
        occupancy = Occupancy(self.problem, self.blocks, Addressing(tuple(places), top))
        timed = ((draft, sum(draft.periods_ns(self.problem, enough))) for draft in occupancy.drafts(part))
        return min(timed, key=lambda pair: pair[1])

    def _changed(self, moves: int) -> list[int] | None:
        """The addresses after some changes; None where blocks would overlap that may not, or lie outside."""
        places, moved = list(self.now), set()
        for _ in range(moves):
            b = self.draw.choice(self.hot)
            kind = self.draw.random()
            if kind < 0.6:
                other = self.draw.choice(self.sizes[self.blocks[b].size])
                places[b], places[other] = places[other], places[b]
                moved |= {b, other}
                continue
            if kind < 0.75:
                self._slide(places, b)
                moved = set(range(len(places)))
                continue
            if kind < 0.85:
                places[b] += self.draw.choice((-1, 1)) * self.granule << self.draw.randrange(12)
            else:
                other = self.draw.randrange(len(self.blocks))
                start, stop = places[other], places[other] + self.blocks[other].size
                places[b] = self.draw.choice(
                    (start, stop, start - self.blocks[b].size, stop - self.blocks[b].size)
                )
            moved.add(b)
        return places if places != self.now and all(self._fits(places, b) for b in moved) else None

    def _slide(self, places: list[int], hot: int) -> None:
        """Lay any block over an edge of a hot one, and let the blocks above another hot one use its place."""
        b = self.draw.randrange(len(places))
        start, size = places[b], self.blocks[b].size
        for o, at in enumerate(places):
            places[o] = at - size if at >= start + size else at
        edge = places[hot] if self.draw.random() < 0.5 else places[hot] + self.blocks[hot].size - size
        places[b] = edge
        top = max(at + block.size for at, block in zip(places, self.blocks, strict=True))
        cut = places[self.draw.choice(self.hot)]
        for o, at in enumerate(places):
            places[o] = at + self.cap - top if at >= cut else at

    def _fits(self, places: Sequence[int], b: int) -> bool:
        start, stop = places[b], places[b] + self.blocks[b].size
        if start < 0 or stop > self.cap:
            return False
        ends = ((places[o], places[o] + self.blocks[o].size) for o in self.apart[b])
        return all(stop <= low or high <= start for low, high in ends)

    def _shared(self, places: Sequence[int]) -> list[int]:
        """The blocks that share bytes with others."""
        order = sorted(range(len(places)), key=places.__getitem__)
        shared: set[int] = set()
        last = -1
        for b in order:
            if last >= 0 and places[b] < places[last] + self.blocks[last].size:
                shared |= {last, b}
            if last < 0 or places[b] + self.blocks[b].size > places[last] + self.blocks[last].size:
                last = b
        return sorted(b for b in shared if not self.blocks[b].kept)

"""The search for a plan of a contiguous arena: which storages stay, and how much memory the others share.

The search chooses addresses. Which bytes are copied, and when a copy may start, follows from the addresses
alone (`Occupancy`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.search.draft import Draft, Occupancy, Task
from penstock.schedule.space.addresses import (
    Addressing,
    alive_at,
    first_use,
    load_of,
    place_columns,
    place_oldest,
    read_together,
    tight,
)
from penstock.schedule.space.spans import Block

_SIZES = 8
"""How many values are tried for the largest size of a streaming block: small blocks share little memory."""

_SMALLEST = (0.0, 0.5)
"""Values tried for the smallest size of a streaming block, as shares of the largest size.

Few large copies pay fewer latencies than many small ones.
"""

_ROOMS = (1.0, 1.06, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Values tried for the memory that streaming blocks share.

The unit is the number of bytes of such blocks that a single step reads, taken at the step that reads most.
"""

_PAIRS, _DEPTHS = (1, 2, 4, 8, 16), (2, 3, 4, 5, 6, 8, 12)
"""How many pairs of blocks share some bytes, and how many of one size share all, while all others stay."""

_LEAST_PARTS = (16, 0, 4)
"""Values tried for the smallest part of a block that gets a copy of its own.

The unit is the number of bytes that the link carries during one latency. Placements are compared with the
first value; the other values are tried with the best placement only.
"""

_WORTH, _STARTS = 1.6, 5
"""Drafts of up to `_WORTH` times the shortest period are starts for a climb, and the most starts."""

_EFFORT = 60_000
"""The most addresses that one search chooses, summed over the placements that it tries."""

_CLOSE = 1.0001
"""A plan is good enough when its period is at most this multiple of the lower bound."""


@dataclass(frozen=True)
class _Family:
    """A set of blocks from which the streaming ones are chosen.

    `able` holds the indices of these blocks. The streaming ones are chosen so that bytes stream in proportion
    to `wanted`, which has a number for every block of the program. The blocks in `ends`, two at most, stream
    as well: they lie at the ends of the memory, and part of each lies outside the shared memory and stays.
    """

    able: frozenset[int]
    wanted: Sequence[float]
    ends: Sequence[int]


_Candidate = tuple[int, Callable[[], Addressing | None]]
"""The nanoseconds that a pass is expected to take at least, and a function that makes the placement."""


def search(task: Task) -> Draft:
    """The best draft found for a contiguous arena."""
    draft = search_blocks(task, task.pieces.blocks)
    assert draft is not None  # the floor is the size of the tight placement, which is always tried
    return draft


def search_blocks(task: Task, blocks: Sequence[Block]) -> Draft | None:
    """The best draft found for the given blocks, or None if no placement of them is found."""
    return _Search(task, blocks).run(task.relaxed)


class _Search:
    """A running search: the placements that were tried, and the draft of the best of them.

    `period` and `copied` are the steady period in nanoseconds, and the bytes copied in a pass, of that draft,
    both summed over the traces. `effort` is the number of addresses that may still be chosen.
    """

    def __init__(self, task: Task, blocks: Sequence[Block]) -> None:
        problem = task.problem
        self.blocks, self.problem, self.traces, self.arena = blocks, problem, problem.traces, problem.arena
        self.cap = task.cap // problem.arena.granule * problem.arena.granule
        self.hardware = problem.hardware
        self.period: float = math.inf
        self.copied = 0
        self.found: Draft | None = None
        self.best: Addressing | None = None
        self.starts: dict[int, tuple[int, Draft]] = {}
        self.tried: set[tuple[int, ...]] = set()
        self.effort = int(_EFFORT * task.effort)
        self.read_with = read_together(blocks)
        self.compute_ns = sum(trace.compute_ns for trace in self.traces)

    def run(self, relaxed: Sequence[Relaxation | None]) -> Draft | None:
        """Try the candidates in ascending order of their least times, until none can beat the best draft."""
        known = [relaxation for relaxation in relaxed if relaxation]
        enough = sum(relaxation.bound_ns for relaxation in known) * _CLOSE
        shares = [[float(block.size) for block in self.blocks]]
        if len(known) == len(self.traces):
            shares.append(self._copied(known))
        families = (family for wanted in shares for family in self._families(wanted))
        rings = (self._candidate(family, ring) for family in families for ring in self._rings(family))
        candidates = (*(candidate for candidate in rings if candidate), *self._columns())
        for least_ns, place in sorted(candidates, key=lambda candidate: candidate[0]):
            hopeless = least_ns >= self.period or self.period <= enough or self.effort <= 0
            if self.found and hopeless:
                break
            self.effort -= len(self.blocks)
            self._time(place())
        # The tight placement comes last: it replaces a draft of the same period only if it copies less.
        self._time(tight(self.blocks))
        if self.best:
            for part in _LEAST_PARTS[1:]:
                self._decide(self.best, part)
        starts = sorted(self.starts.values(), key=itemgetter(0))[:_STARTS]
        return self.found and replace(self.found, starts=tuple(draft for _, draft in starts))

    def _copied(self, relaxed: Sequence[Relaxation]) -> list[float]:
        """Bytes of each block that the relaxation copies, at the gap and trace where it copies most."""
        wanted = [0.0] * len(self.blocks)
        starts = [block.range.start for block in self.blocks]
        for relaxation in relaxed:
            for gap, kept_bytes in zip(relaxation.gaps, relaxation.kept, strict=True):
                group = relaxation.groups[gap.group]
                for b in {bisect_right(starts, span.start) - 1 for span in group.spans}:
                    copied = self.blocks[b].size * (1 - kept_bytes / group.nbytes)
                    wanted[b] = max(wanted[b], copied)
        return wanted

    def _families(self, wanted: Sequence[float]) -> Iterator[_Family]:
        """Yield the blocks of each range of sizes, with none, the largest, and the two largest at ends."""
        free = [b for b, block in enumerate(self.blocks) if not block.kept]
        free.sort(key=lambda b: self.blocks[b].size)
        for ends in ([], free[-1:], free[-2:]):
            between = set(free).difference(ends, *(self.read_with[b] for b in ends))
            sizes = sorted({self.blocks[b].size for b in between})
            tried = sizes[:: max(1, len(sizes) // _SIZES)] + sizes[-1:]
            ranges = {
                frozenset(b for b in between if share * largest <= self.blocks[b].size <= largest): None
                for largest in tried
                for share in _SMALLEST
            }
            yield from (_Family(able, wanted, ends) for able in ranges)

    def _columns(self) -> Iterator[_Candidate]:
        """Yield columns of blocks that take turns at bytes, spread over the pass, while all others stay.

        In so many pairs, which share as few bytes as they can, or in as many columns of one size as fit; then
        a pair of the smallest blocks shares what is left.
        """
        granule, excess = self.arena.granule, sum(block.size for block in self.blocks) - self.cap
        free = [b for b, block in enumerate(self.blocks) if not block.kept and not block.produced]
        free.sort(key=lambda b: first_use(self.blocks[b]))
        size_of = {b: self.blocks[b].size for b in free}
        sizes = sorted({*size_of.values()})
        shapes = [(2, count, -(-excess // (count * granule)) * granule) for count in _PAIRS]
        for size in sizes[:: max(1, len(sizes) // _SIZES)]:
            shapes += [(depth, excess // ((depth - 1) * size), size) for depth in _DEPTHS]
        for depth, count, shared in shapes:
            pair = depth == 2  # of more blocks, those between two others would reach beyond what they share
            able = [b for b in free if size_of[b] == shared or (pair and size_of[b] > shared)]
            columns = [(column, shared) for column in _spaced(able, depth, count)]
            left = excess - count * (depth - 1) * shared
            if columns and left > 0:
                taken = {b for column, _ in columns for b in column}
                least = min((size_of[b] for b in free if b not in taken and size_of[b] >= left), default=0)
                small = [b for b in free if b not in taken and size_of[b] == least]
                columns += [(column, left) for column in _spaced(small, 2, 1)]
            if columns:
                copied = [nbytes for column, nbytes in columns for _ in column]
                turns_ns = depth * (self.hardware.link_fill_ns + self.hardware.copy_ns(shared))
                place = partial(place_columns, self.blocks, columns)
                yield max(turns_ns, self._least_ns(len(copied), sum(copied))), place

    def _rings(self, family: _Family) -> set[int]:
        """The sizes in bytes of the memory that the streaming blocks of a family may share."""
        granule, blocks = self.arena.granule, [self.blocks[b] for b in family.able]
        read = load_of([block.size for block in blocks], [alive_at(block) for block in blocks])
        return {math.ceil(room * read / granule) * granule for room in _ROOMS}

    def _candidate(self, family: _Family, ring: int) -> _Candidate | None:
        """The candidate whose streaming blocks share `ring` bytes; None if the other blocks do not fit."""
        ends = sum(self.blocks[b].size for b in family.ends)
        other_bytes = sum(b.size for n, b in enumerate(self.blocks) if n not in family.able) - ends
        span = ends + (2 - len(family.ends)) * ring  # an end without a block of its own is `ring` bytes long
        ring = max(ring, span - self.cap + other_bytes)
        beside = max(ring, span - ring)  # the bytes between the ends, shared ones counted once
        resident = self._spread(family.able, family.wanted, self.cap - beside + ends)
        if resident is None:
            return None
        resident -= set(family.ends)
        copied = {b for b, block in enumerate(self.blocks) if not block.produced} - resident
        streamed = [self.blocks[b].size for b in copied]
        least_ns = self._least_ns(len(streamed), sum(streamed) - (beside - ring))
        place = partial(place_oldest, self.blocks, resident, cap=self.cap, ends=family.ends, ring=ring)
        return least_ns, place

    def _least_ns(self, copies: int, nbytes: int) -> int:
        """Nanoseconds that a pass takes at least in which so many copies bring so many bytes."""
        latencies = max(0, copies - 1) * self.hardware.link_latency_ns
        return max(self.compute_ns, self.hardware.copy_ns(nbytes) + latencies)

    def _spread(self, able: frozenset[int], wanted: Sequence[float], room: int) -> frozenset[int] | None:
        """The blocks that stay resident, in at most `room` bytes.

        The streaming blocks are taken from `able`, spread over the trace in proportion to `wanted`. None if
        the blocks outside `able` alone take more than `room`.
        """
        streamed = sum(block.size for block in self.blocks) - room
        if sum(self.blocks[b].size for b in able) < streamed:
            return None
        scale = streamed / max(1.0, sum(wanted[b] for b in able))
        order = sorted(able, key=lambda b: first_use(self.blocks[b]))
        chosen, free, owed = set(range(len(self.blocks))), -streamed, 0.0
        for b in order:
            owed += scale * wanted[b]
            if owed >= self.blocks[b].size / 2:
                chosen.remove(b)
                owed -= self.blocks[b].size
                free += self.blocks[b].size
        for b in order:  # rounding may leave too few streaming blocks: take more, from the start of the trace
            if free < 0 and b in chosen:
                chosen.remove(b)
                free += self.blocks[b].size
        for b in sorted(able - chosen, key=lambda b: -self.blocks[b].size):
            if self.blocks[b].size <= free:
                chosen.add(b)
                free -= self.blocks[b].size
        return frozenset(chosen)

    def _time(self, placement: Addressing | None) -> None:
        """Compare a placement with the best draft, unless it does not fit or was compared before."""
        if placement and placement.addresses not in self.tried and placement.nbytes <= self.cap:
            self.tried.add(placement.addresses)
            self._decide(placement, _LEAST_PARTS[0])

    def _decide(self, placement: Addressing, part: int) -> None:
        """Keep the draft of a placement if its period is the shortest, or ties and fewer bytes are copied.

        Parts of a block that take less than `part` latencies to copy are copied with a neighbouring part.
        """
        for draft in Occupancy(self.problem, self.blocks, placement).drafts(part):
            period = sum(draft.periods_ns(self.problem, _WORTH * self.period))
            copied = sum(t.stop - t.start for transfers, _ in draft.streams for t in transfers)
            copies = sum(len(transfers) for transfers, _ in draft.streams)
            if period < self.starts.get(copies, (math.inf,))[0]:
                self.starts[copies] = period, draft
            if (period, copied) < (self.period, self.copied):
                self.period, self.copied, self.found, self.best = period, copied, draft, placement


def _spaced(able: Sequence[int], depth: int, count: int) -> list[list[int]]:
    """So many columns of `depth` of the blocks, as far apart as possible; none if these are too few."""
    most = depth * count
    if not 0 < most <= len(able):
        return []
    chosen = [able[(2 * k + 1) * len(able) // (2 * most)] for k in range(most)]
    return [chosen[k::count] for k in range(count)]

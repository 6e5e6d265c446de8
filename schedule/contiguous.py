"""The search for a plan of a contiguous arena: which storages stay, and how far ahead others may come.

What is copied, and when it may start, follows from addresses alone: bytes are copied again when
anything else was read at their place since, and may be written once that has been read for the last
time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.schedule.addresses import ORDERS, Block, Placement, blocks_of, first_use, place, tight
from penstock.schedule.bound import Relaxation
from penstock.schedule.model import Arena, Drop, Hardware, Range, Schedule, Storage, Trace, Transfer, Wrap
from penstock.schedule.spans import merged
from penstock.schedule.timeline import steady_period_ns
from penstock.schedule.transfers import MERGED_BYTES, Decisions

_SIZES = 8
"""Largest sizes of what streams that are tried: small blocks take little memory on their way."""

_ROOMS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Memory left for what streams, in multiples of the most of it that one step reads."""

_WINDOWS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Lookahead, in multiples of the largest block."""


@dataclass
class _Moves:
    """What happens to the bytes of one trace, collected piece by piece."""

    copies: dict[tuple[int, int, int], list[Range]] = field(default_factory=dict)
    drops: dict[int, list[Range]] = field(default_factory=dict)
    crossing: list[tuple[int, Range]] = field(default_factory=list)


def search(
    storages: Sequence[Storage],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    cap: int,
    hardware: Hardware,
    keep: Collection[int],
    wrap: Wrap,
    relaxed: Sequence[Relaxation | None],
) -> Decisions:
    """The best decisions found for `cap` bytes of arena, which are at least what is needed."""
    return _Search(storages, traces, arena, cap=cap, hardware=hardware, keep=keep, wrap=wrap).run(relaxed)


class _Search:
    """The placements that are tried, and the decisions of the best so far."""

    def __init__(
        self,
        storages: Sequence[Storage],
        traces: Sequence[Trace],
        arena: Arena,
        *,
        cap: int,
        hardware: Hardware,
        keep: Collection[int],
        wrap: Wrap,
    ) -> None:
        self.traces, self.arena = traces, arena
        self.cap = cap // arena.granule * arena.granule
        self.hardware, self.wrap = hardware, wrap
        self.blocks = blocks_of(storages, traces, arena, keep)
        self.period: float = math.inf
        self.copied = 0
        self.found: Decisions | None = None
        self.tried: set[tuple[int, ...]] = set()
        self.least = sum(trace.compute_ns for trace in traces)

    def run(self, relaxed: Sequence[Relaxation | None]) -> Decisions:
        """Tries residencies from the one that streams least on, while that can still be faster."""
        wanted = self._wanted(relaxed)
        for streamed, resident in sorted(self._residencies(wanted), key=lambda one: one[0]):
            if self.found and self._least_ns(streamed) >= self.period:
                break
            self._widest(resident)
            if self.period <= self.least:
                break
        # Last, because of two plans that take the same time the one that copies less is better.
        self._time(tight(self.blocks, self.traces))
        assert self.found is not None
        return self.found

    def _least_ns(self, streamed: int) -> int:
        """No less than this takes a pass that copies so many bytes."""
        return max(self.least, self.hardware.copy_ns(streamed) - self.hardware.link_latency_ns)

    def _wanted(self, relaxed: Sequence[Relaxation | None]) -> list[float]:
        """Bytes of each block that the relaxation copies; all of them where there is none."""
        wanted = [0.0] * len(self.blocks)
        starts = [block.range.start for block in self.blocks]
        for one in relaxed:
            if one is None:
                continue
            for gap, kept in zip(one.gaps, one.kept, strict=True):
                group = one.groups[gap.group]
                b = bisect_right(starts, group.spans[0].start) - 1
                wanted[b] = max(wanted[b], group.nbytes - kept)
        return wanted if any(wanted) else [float(block.size) for block in self.blocks]

    def _residencies(self, wanted: Sequence[float]) -> Iterator[tuple[int, frozenset[int]]]:
        """What stays, with the bytes that do not: only blocks up to some size stream, through some window."""
        sizes = sorted({block.size for block in self.blocks if not block.kept})
        seen = set()
        for largest in sizes[:: max(1, len(sizes) // _SIZES)] + sizes[-1:]:
            able = {b for b, block in enumerate(self.blocks) if block.size <= largest and not block.kept}
            read = max(self._most_read(able), 1)
            for window in _ROOMS:
                resident = self._spread(able, wanted, self.cap - int(window * read))
                if resident is not None and resident not in seen:
                    seen.add(resident)
                    yield sum(b.size for n, b in enumerate(self.blocks) if n not in resident), resident

    def _most_read(self, able: Collection[int]) -> int:
        """The most bytes of these blocks that one step reads."""
        reads: Counter[tuple[int, int]] = Counter()
        for b in able:
            for which, steps in enumerate(self.blocks[b].reads):
                reads.update({(which, k): self.blocks[b].size for k in steps})
        return max(reads.values(), default=0)

    def _spread(self, able: set[int], wanted: Sequence[float], room: int) -> frozenset[int] | None:
        """Residents of at most `room` bytes: all but some of `able`, spread as the relaxation copies.

        None where the others alone take more.
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
        for b in order:  # what was still owed at the end
            if free < 0 and b in chosen:
                chosen.remove(b)
                free += self.blocks[b].size
        for b in sorted(able - chosen, key=lambda b: -self.blocks[b].size):
            if self.blocks[b].size <= free:
                chosen.add(b)
                free -= self.blocks[b].size
        return frozenset(chosen)

    def _widest(self, resident: frozenset[int]) -> bool:
        """Tries every order at the two widest windows that fit; False where not even the least does."""
        largest = max(block.size for block in self.blocks)
        fitting = False
        for order in ORDERS:
            low, high = 0, len(_WINDOWS)
            placements: dict[int, Placement] = {}
            while low < high:
                middle = (low + high) // 2
                window = int(_WINDOWS[middle] * largest)
                one = place(self.blocks, self.traces, resident, window=window, order=order, cap=self.cap)
                if one is None:
                    high = middle
                else:
                    placements[middle] = one
                    low = middle + 1
            for middle in sorted(placements)[-2:]:
                self._time(placements[middle])
                fitting = True
        return fitting

    def _time(self, placement: Placement) -> None:
        """Keeps the placement when it takes less time than any before, or as much for fewer bytes copied."""
        if placement.addresses in self.tried or placement.nbytes > self.cap:
            return
        self.tried.add(placement.addresses)
        last = max((len(trace.steps) for trace in self.traces), default=1) - 1
        choices = (last,) if self.wrap == "overlap" else (last, 0)
        for early in choices if len(self.traces) == 1 else (-1,):
            decisions = decide(self.blocks, self.traces, self.arena, placement, early=early)
            period = 0
            for trace, (transfers, drops) in zip(self.traces, decisions.streams, strict=True):
                schedule = Schedule(trace.graph, transfers, drops, 0)
                period += steady_period_ns(trace, schedule, self.hardware, self.wrap)
            copied = sum(t.stop - t.start for transfers, _ in decisions.streams for t in transfers)
            if (period, copied) < (self.period, self.copied):
                self.period, self.copied, self.found = period, copied, decisions


def decide(
    blocks: Sequence[Block], traces: Sequence[Trace], arena: Arena, placement: Placement, *, early: int
) -> Decisions:
    """Everything that follows from the addresses.

    Only transfers for steps up to `early` may start before the pass does; with several traces that
    is none, and every call begins with the resident bytes alone.
    """
    pieces, cells = _cells(blocks, arena.granule, placement)
    resident: list[Range] = []
    moves = [_Moves() for _ in traces]
    for cell, users in enumerate(cells):
        if len(users) == 1:
            resident.append(pieces[users[0]][cell])
            continue
        for which, trace in enumerate(traces):
            reads = sorted((k, b) for b in users for k in blocks[b].reads[which])
            ranges = {b: pieces[b][cell] for b in users}
            _move(reads, ranges, len(trace.steps) if len(traces) == 1 else 0, moves[which])
    addresses = [-1] * len(arena.layout)
    for b, block in enumerate(blocks):
        addresses[block.storage] = placement.addresses[b]
    begins = frozenset(block.range.start for block in blocks)
    lasting = merged(resident, begins)
    streams, boundary = [], list(lasting)
    for trace, moved in zip(traces, moves, strict=True):
        transfers = _transfers(moved, len(trace.steps), early, begins)
        drops = tuple(
            Drop(r.start, r.stop, k) for k in sorted(moved.drops) for r in merged(moved.drops[k], begins)
        )
        in_flight = [(t.step, Range(t.start, t.stop)) for t in transfers if t.after < 0]
        boundary += [r for _, r in sorted(moved.crossing + in_flight)]
        streams.append((transfers, drops))
    return Decisions(placement.nbytes, tuple(addresses), lasting, tuple(boundary), tuple(streams))


def _cells(
    blocks: Sequence[Block], granule: int, placement: Placement
) -> tuple[list[dict[int, Range]], list[list[int]]]:
    """The arena cut wherever a block begins or ends.

    For each block its layout range in every cell that it fills, and for each cell its blocks. A
    block whose layout offset is no multiple of the granule cannot be cut.
    """
    places = [Range(at, at + block.size) for at, block in zip(placement.addresses, blocks, strict=True)]
    whole = [r for r, block in zip(places, blocks, strict=True) if block.range.start % granule]
    cuts = sorted(
        {
            edge
            for r in places
            for edge in (r.start, r.stop)
            if not any(one.start < edge < one.stop for one in whole)
        }
    )
    pieces: list[dict[int, Range]] = []
    cells: list[list[int]] = [[] for _ in cuts]
    for b, (block, at) in enumerate(zip(blocks, places, strict=True)):
        mine = {}
        for cell in range(bisect_left(cuts, at.start), bisect_left(cuts, at.stop)):
            shift = block.range.start - at.start
            stop = min(cuts[cell + 1] + shift, block.range.stop)
            mine[cell] = Range(cuts[cell] + shift, stop)
            cells[cell].append(b)
        pieces.append(mine)
    return pieces, cells


def _move(reads: Sequence[tuple[int, int]], ranges: dict[int, Range], steps: int, moves: _Moves) -> None:
    """What the reads (step, block) of one cell imply; `steps` is 0 where calls begin without it."""
    for j, (k, b) in enumerate(reads):
        before, user = reads[j - 1] if j or steps else (0, -1)
        following = reads[(j + 1) % len(reads)][1] if j + 1 < len(reads) or steps else -1
        if user != b:
            after = before if j or not steps else before - steps
            moves.copies.setdefault((k, after, b), []).append(ranges[b])
        elif j == 0:
            moves.crossing.append((k, ranges[b]))
        if following != b:
            moves.drops.setdefault(k, []).append(ranges[b])


def _transfers(moves: _Moves, steps: int, early: int, begins: Collection[int]) -> tuple[Transfer, ...]:
    """In order of deadline; `after` made to grow along the line, as it does in effect."""
    rows = [
        (step, after, piece)
        for (step, after, _), ranges in sorted(moves.copies.items())
        for one in merged(ranges, begins)
        for piece in _parts(one)
    ]
    reached = max((after for _, after, _ in rows), default=0) - steps
    result = []
    for step, after, piece in rows:
        reached = max(reached, after, 0 if step > early else after)
        result.append(Transfer(piece.start, piece.stop, step, reached))
    return tuple(result)


def _parts(one: Range) -> Iterator[Range]:
    for start in range(one.start, one.stop, MERGED_BYTES):
        yield Range(start, min(start + MERGED_BYTES, one.stop))

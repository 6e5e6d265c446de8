"""The search for a plan of a contiguous arena: which storages stay, and how far ahead others may come.

What is copied, and when it may start, follows from addresses alone: bytes are copied again when
anything else was read at their place since, and may be written once that has been read for the last
time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.schedule.addresses import ORDERS, Block, Placement, blocks_of, place, tight
from penstock.schedule.bound import Relaxation
from penstock.schedule.model import Arena, Drop, Hardware, Range, Schedule, Storage, Trace, Transfer, Wrap
from penstock.schedule.spans import merged
from penstock.schedule.timeline import steady_period_ns
from penstock.schedule.transfers import MERGED_BYTES, Decisions

_RATIO = 0.85
"""Between the bytes that two neighbouring candidates leave to be streamed."""

_WINDOWS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Lookahead, in multiples of the largest block."""

_PATIENCE = 3
"""Residencies in a row that may bring nothing before the search ends."""


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
    return _Search(storages, traces, arena, cap=cap, hardware=hardware, keep=keep, wrap=wrap).run()


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

    def run(self) -> Decisions:
        total = sum(block.size for block in self.blocks)
        fruitless = 0
        for streamed in _streamed_sizes(total):
            resident = self._resident(total - streamed)
            if sum(self.blocks[b].size for b in resident) > self.cap:
                continue
            before = self.period
            fits = self._widest(resident)
            fruitless = 0 if self.period < before or not fits else fruitless + 1
            if self.period <= self.least or fruitless == _PATIENCE:
                break
        # Last, because of two plans that take the same time the one that copies less is better.
        self._time(tight(self.blocks, self.traces))
        assert self.found is not None
        return self.found

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

    def _resident(self, nbytes: int) -> frozenset[int]:
        """Blocks of about `nbytes` that stay: those read several times first, then evenly in order of use."""
        latency_bytes = self.hardware.link_latency_ns * self.hardware.link_bytes_per_s / 1e9
        chosen = {b for b, block in enumerate(self.blocks) if block.kept}
        left = nbytes - sum(self.blocks[b].size for b in chosen)
        classes: dict[int, list[int]] = {}
        for b, block in enumerate(self.blocks):
            worth = sum(map(len, block.reads)) * (block.size + latency_bytes) / block.size
            classes.setdefault(-round(math.log2(worth)), []).append(b)
        for key in sorted(classes):
            alike = [b for b in classes[key] if b not in chosen]
            size = sum(self.blocks[b].size for b in alike)
            share = min(1.0, max(0, left) / size) if size else 0.0
            carry = 0.0
            for b in alike:
                carry += share * self.blocks[b].size
                if carry + 1e-6 >= self.blocks[b].size:
                    carry -= self.blocks[b].size
                    chosen.add(b)
                    left -= self.blocks[b].size
        return frozenset(chosen)

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


def _streamed_sizes(total: int) -> Iterator[int]:
    """Bytes that are not resident, from few to all; they do not depend on the cap."""
    steps = math.ceil(math.log(1 / max(1, total)) / math.log(_RATIO))
    for power in itertools.chain(range(steps, 0, -1), (0,)):
        yield math.ceil(total * _RATIO**power)

"""What is copied when, in a contiguous arena, as it follows from addresses alone.

The arena is cut wherever a storage begins or ends. The bytes of such a cell are copied again when another
storage's were read there since, and may be written once those have been read for the last time: a
place is refilled part by part as what was there ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.schedule.clock.joining import MERGED_BYTES
from penstock.schedule.facts.model import Drop, Range, Transfer
from penstock.schedule.facts.problem import Demand
from penstock.schedule.search.task import Draft
from penstock.schedule.space.addresses import Addressing
from penstock.schedule.space.pieces import Block
from penstock.schedule.space.spans import merged


@dataclass
class _Moves:
    """What is copied and dropped in a pass of one trace, and which bytes stay over its end."""

    copies: dict[tuple[int, int, int], list[Range]] = field(default_factory=dict)
    drops: dict[int, list[Range]] = field(default_factory=dict)
    crossing: list[tuple[int, Range]] = field(default_factory=list)


class Occupancy:
    """What the addresses of a placement mean for every trace of a demand."""

    def __init__(self, demand: Demand, blocks: Sequence[Block], placement: Addressing) -> None:
        self._demand, self._blocks, self._placement = demand, blocks, placement
        self._begins = frozenset(block.range.start for block in blocks)
        pieces, cells = _cells(blocks, demand.arena.granule, placement)
        resident: list[Range] = []
        self._moves = [_Moves() for _ in demand.traces]
        for cell, users in enumerate(cells):
            if len(users) == 1:
                resident.append(pieces[users[0]][cell])
                continue
            for which, trace in enumerate(demand.traces):
                reads = sorted((k, b) for b in users for k in blocks[b].reads[which])
                ranges = {b: pieces[b][cell] for b in users}
                _move(reads, ranges, len(trace.steps), self._moves[which])
        self._resident = merged(resident, self._begins)

    def decide(self, early: int, least: int = 0) -> Draft:
        """Everything that follows from the addresses.

        Only transfers for steps up to `early` may start before the pass does. Parts of a block of less than
        `least` bytes are copied together with a neighbour, once both may be.
        """
        begins, resident = self._begins, self._resident
        streams, boundaries = [], []
        for trace, moved in zip(self._demand.traces, self._moves, strict=True):
            transfers = self._transfers(moved, len(trace.steps), early, least)
            drops = tuple(
                Drop(r.start, r.stop, k) for k in sorted(moved.drops) for r in merged(moved.drops[k], begins)
            )
            in_flight = [(t.step, Range(t.start, t.stop)) for t in transfers if t.after < 0]
            boundaries.append((*resident, *(r for _, r in sorted(moved.crossing + in_flight))))
            streams.append((transfers, drops))
        addresses, nbytes = self._addresses(), self._placement.nbytes
        if len(boundaries) == 1:
            return Draft(nbytes, addresses, resident, boundaries[0], tuple(streams))
        return Draft(nbytes, addresses, resident, resident, tuple(streams), tuple(boundaries))

    def _transfers(self, moves: _Moves, steps: int, early: int, least: int) -> tuple[Transfer, ...]:
        """In order of deadline; `after` made to grow along the line, as it does in effect."""
        blocks: dict[tuple[int, int], list[tuple[Range, int]]] = {}
        for (step, after, b), ranges in moves.copies.items():
            blocks.setdefault((step, b), []).extend((one, after) for one in merged(ranges, self._begins))
        rows = sorted(
            (step, after, piece)
            for (step, _), some in blocks.items()
            for one, after in _joined(sorted(some), least, self._begins)
            for piece in _parts(one)
        )
        reached = max((after for _, after, _ in rows), default=0) - steps
        result = []
        for step, after, piece in rows:
            reached = max(reached, after, 0 if step > early else after)
            result.append(Transfer(piece.start, piece.stop, step, reached))
        return tuple(result)

    def _addresses(self) -> tuple[int, ...]:
        """That of every storage in a contiguous arena; a paged one has none to choose."""
        arena = self._demand.arena
        if arena.kind == "paged":
            return ()
        addresses = [-1] * len(arena.layout)
        for block, address in zip(self._blocks, self._placement.addresses, strict=True):
            addresses[block.storage] = address
        return tuple(addresses)


def _cells(
    blocks: Sequence[Block], granule: int, placement: Addressing
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
    """Adds the copies and drops of one cell, which `reads` (step, block) reads in this order every pass."""
    for j, (k, b) in enumerate(reads):
        before, user = reads[j - 1]
        following = reads[(j + 1) % len(reads)][1]
        if user != b:
            after = before if j else before - steps
            moves.copies.setdefault((k, after, b), []).append(ranges[b])
        elif j == 0:
            moves.crossing.append((k, ranges[b]))
        if following != b:
            moves.drops.setdefault(k, []).append(ranges[b])


def _joined(
    pieces: Sequence[tuple[Range, int]], least: int, begins: Collection[int]
) -> Iterator[tuple[Range, int]]:
    """Pieces and the steps that they wait for; neighbours joined while one of them is under `least` bytes."""
    last, waits = pieces[0]
    for one, after in pieces[1:]:
        touches = one.start == last.stop and one.start not in begins
        if touches and min(one.nbytes, last.nbytes) < least:
            last, waits = Range(last.start, one.stop), max(waits, after)
        else:
            yield last, waits
            last, waits = one, after
    yield last, waits


def _parts(one: Range) -> Iterator[Range]:
    for start in range(one.start, one.stop, MERGED_BYTES):
        yield Range(start, min(start + MERGED_BYTES, one.stop))

"""Addresses of blocks in a contiguous arena.

Blocks that no step reads together may share bytes. There are two aims. `tight` places blocks in the least
memory, which is offline dynamic storage allocation (`packing.py`). `place_oldest` places them so that copies
may start early. A copy may start once what it overwrites has been read for the last time, so each block is
placed over the bytes whose last read is longest ago. Memory then works as a ring for blocks of any sizes, and
no memory is wasted where a trace reads in reverse order, as in a backward pass.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from penstock.schedule.facts.model import Range
from penstock.schedule.space.packing import pack_blocks
from penstock.schedule.space.pieces import Block


@dataclass(frozen=True)
class Addressing:
    """The address of each block, and the bytes of arena that they take, up to the end of the highest."""

    addresses: tuple[int, ...]
    nbytes: int


def tight(blocks: Sequence[Block]) -> Addressing:
    """The smallest placement found. Blocks that are always kept share their bytes with no other block."""
    return _tight(tuple(blocks))


@lru_cache(maxsize=8)
def _tight(blocks: tuple[Block, ...]) -> Addressing:
    """`tight`, found once for the floor, each budget and each rung of a ladder, which share their blocks."""
    addresses = [0] * len(blocks)
    base = 0
    for b, block in enumerate(blocks):
        if block.kept:
            addresses[b] = base
            base += block.size
    free = [b for b, block in enumerate(blocks) if not block.kept]
    packing = pack_blocks([blocks[b].size for b in free], [_alive(blocks[b]) for b in free])
    for b, address in zip(free, packing.addresses, strict=True):
        addresses[b] = base + address
    return Addressing(tuple(addresses), base + packing.nbytes)


def least_copied(blocks: Sequence[Block], cap: int) -> int:
    """The least bytes that every pass of one trace copies, whatever the addresses in `cap` bytes are.

    If m > 1 blocks share a byte of the arena, that byte is copied m times in every pass; a byte of a single
    block is never copied. Produced blocks need no copies, and are left out. Let W bytes of the arena be
    shared, and let the blocks have D bytes more than `cap`. A pass then copies D + W bytes. The shared bytes
    form intervals. At most two blocks reach beyond each interval, one at each end; all others in it have at
    most W bytes. So D <= W + S(W), where S(W) is the sum of the bytes of all blocks of at most W bytes. The
    least W that satisfies this gives the bound.
    """
    blocks = [block for block in blocks if not block.produced]
    excess = sum(block.range.nbytes for block in blocks) - cap
    if excess <= 0:
        return 0
    shared, smaller = excess, 0
    for size in sorted(block.range.nbytes for block in blocks if not block.kept):
        if shared < size:
            break
        smaller += size
        shared = max(size, excess - smaller)
    return excess + shared


def first_use(block: Block) -> tuple[int, int]:
    """The first step that reads a block, and the number of its trace."""
    return min((steps[0], number) for number, steps in enumerate(block.reads) if steps)


def _alive(block: Block) -> list[int]:
    """The steps that read a block, as numbers that differ between the traces."""
    return [number << 32 | k for number, steps in enumerate(block.reads) for k in steps]


class _Room:
    """Memory cut into pieces, each with an age: the position, in order of first use, of its last block.

    Piece i reaches from `edges[i]` to `edges[i + 1]`, and no block was placed there yet if its age is -1.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.edges = [start, stop]
        self.ages = [-1]

    def take(self, start: int, stop: int, age: int) -> None:
        """Place a block at these bytes, whose age becomes `age`."""
        low, high = bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop) - 1
        before = [self.edges[low]] * (self.edges[low] < start)
        after = [self.edges[high + 1]] * (stop < self.edges[high + 1])
        ages = [self.ages[low]] * len(before) + [age] + [self.ages[high]] * len(after)
        self.edges[low : high + 2] = [*before, start, stop, *after]
        self.ages[low : high + 1] = ages

    def oldest(self, size: int, within: Range, apart: Sequence[Range], now: int) -> int | None:
        """The address for `size` bytes whose youngest piece is the oldest.

        Only addresses are looked at for which the bytes begin or end at the edge of a piece, of `within` or
        of a range in `apart`. Among equal ones, the one with the fewest bytes of the youngest age wins, then
        the lowest. None if every address has bytes of age `now` or touches a range in `apart`.
        """
        edges, ages = numpy.array(self.edges), numpy.array(self.ages)
        more = [within.start, within.stop - size, *(r.stop for r in apart), *(r.start - size for r in apart)]
        starts = numpy.unique(numpy.concatenate((edges[:-1], edges[1:] - size, numpy.array(more))))
        starts = starts[(starts >= within.start) & (starts + size <= within.stop)]
        for taken in apart:
            starts = starts[(starts >= taken.stop) | (starts + size <= taken.start)]
        if not len(starts):
            return None
        first = numpy.searchsorted(edges, starts, side="right") - 1
        last = numpy.searchsorted(edges, starts + size, side="left") - 1
        youngest = _largest(ages, first, last)
        least = int(youngest.min())
        if least >= now:
            return None
        alike: list[int] = starts[youngest == least].tolist()
        return min(alike, key=lambda start: (self._bytes_of(least, start, start + size), start))

    def _bytes_of(self, age: int, start: int, stop: int) -> int:
        """The bytes of the given age between two addresses."""
        low, high = bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop)
        return sum(
            min(stop, self.edges[i + 1]) - max(start, self.edges[i])
            for i in range(low, high)
            if self.ages[i] == age
        )


def _largest(values: numpy.ndarray, first: numpy.ndarray, last: numpy.ndarray) -> numpy.ndarray:
    """The largest value of each run from `first[i]` to `last[i]`, inclusive, by a table of powers of two."""
    powers = [values]
    while 2 ** len(powers) <= len(values):
        half = 2 ** (len(powers) - 1)
        before = powers[-1]
        powers.append(numpy.maximum(before, numpy.append(before[half:], before[-half:])))
    table = numpy.array(powers)
    level = numpy.log2(last - first + 1).astype(int)
    result: numpy.ndarray = numpy.maximum(table[level, first], table[level, last + 1 - 2**level])
    return result


def place_oldest(
    blocks: Sequence[Block], resident: Collection[int], *, cap: int, ring: int | None = None
) -> Addressing | None:
    """Addresses below `cap` for blocks in order of first use.

    The resident blocks come first and share their bytes with no other block. With `ring`, the two largest of
    the other blocks lie at the two ends of the memory that is left. Each of the two shares at most `ring`
    bytes with other blocks, and its other bytes stay. None if blocks that one step reads would overlap, or if
    a block does not fit.
    """
    addresses = [-1] * len(blocks)
    base = 0
    for b in sorted(resident):
        addresses[b] = base
        base += blocks[b].size
    unplaced = sorted((b for b in range(len(blocks)) if addresses[b] < 0), key=lambda b: first_use(blocks[b]))
    room = Range(base, cap)
    middle, fixed = room, {}
    if ring:
        low, high = sorted(unplaced, key=lambda b: -blocks[b].size)[:2]
        fixed = {low: room.start, high: room.stop - blocks[high].size}
        middle = Range(
            room.start + max(0, blocks[low].size - ring), room.stop - max(0, blocks[high].size - ring)
        )
        if middle.nbytes < ring:
            return None
    read_with = _read_together(blocks)
    left = _Room(base, cap)
    now, used = -1, None
    for b in unplaced:
        now += used != first_use(blocks[b])
        used = first_use(blocks[b])
        apart = [
            Range(addresses[o], addresses[o] + blocks[o].size) for o in read_with[b] if addresses[o] >= 0
        ]
        address = fixed.get(b, left.oldest(blocks[b].size, middle, apart, now))
        if address is None:
            return None
        addresses[b] = address
        left.take(address, address + blocks[b].size, now)
    return None if _overlap(blocks, addresses, read_with) else Addressing(tuple(addresses), cap)


def _read_together(blocks: Sequence[Block]) -> list[set[int]]:
    """For each block, the other blocks that some step reads together with it."""
    together: dict[tuple[int, int], list[int]] = {}
    for b, block in enumerate(blocks):
        for number, steps in enumerate(block.reads):
            for k in steps:
                together.setdefault((number, k), []).append(b)
    result: list[set[int]] = [set() for _ in blocks]
    for some in together.values():
        for b in some if len(some) > 1 else ():
            result[b] |= {o for o in some if o != b}
    return result


def _overlap(blocks: Sequence[Block], addresses: Sequence[int], read_with: Sequence[Collection[int]]) -> bool:
    """Tell whether two blocks that one step reads share bytes."""
    return any(
        addresses[b] < addresses[o] + blocks[o].size and addresses[o] < addresses[b] + blocks[b].size
        for b, neighbours in enumerate(read_with)
        for o in neighbours
    )

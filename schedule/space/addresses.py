"""Addresses of blocks in a contiguous arena: in the least memory, or so that copies may start early.

Storages that no step reads together may share bytes. Placing them in little memory is offline dynamic storage
allocation (`packing.py`). For early copies, each storage lies over the bytes that were last read longest ago:
a copy may start once what it overwrites has been read for the last time, and on a trace that repeats, that
place can be filled earliest. Memory then works as a ring for blocks of any sizes, and nothing is lost where a
trace turns around (a backward pass).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy

from penstock.schedule.facts.model import Range
from penstock.schedule.space.packing import pack_blocks
from penstock.schedule.space.pieces import Block


@dataclass(frozen=True)
class Addressing:
    """Address of each block, and the bytes up to the end of the last."""

    addresses: tuple[int, ...]
    nbytes: int


def tight(blocks: Sequence[Block]) -> Addressing:
    """The smallest placement found: what is always kept is apart from everything."""
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
    """Bytes that every pass of one trace copies at least, whatever the addresses in `cap` bytes are.

    An address with m > 1 blocks has each of them copied every pass, one with a single block none. So with
    W bytes of addresses shared, and D bytes of blocks more than fit, D + W are copied. Shared addresses
    form intervals. At most two blocks stick out of each, since beside it they would share as well; all
    others there are no larger than W. So D <= W + S(W), with S(W) the bytes of all blocks of at most W,
    and the least such W is part of what is copied.
    """
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
    return min((steps[0], which) for which, steps in enumerate(block.reads) if steps)


def _alive(block: Block) -> list[int]:
    """The steps that read a block, those of all traces numbered apart."""
    return [which << 32 | k for which, steps in enumerate(block.reads) for k in steps]


class _Room:
    """Memory as pieces, each with the position in the order of first uses of what was placed there last."""

    def __init__(self, start: int, stop: int) -> None:
        self.edges = [start, stop]
        self.ages = [-1]

    def take(self, start: int, stop: int, age: int) -> None:
        """What is placed at these bytes is the youngest there."""
        low, high = bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop) - 1
        before = [self.edges[low]] * (self.edges[low] < start)
        after = [self.edges[high + 1]] * (stop < self.edges[high + 1])
        ages = [self.ages[low]] * len(before) + [age] + [self.ages[high]] * len(after)
        self.edges[low : high + 2] = [*before, start, stop, *after]
        self.ages[low : high + 1] = ages

    def oldest(self, size: int, within: Range, apart: Sequence[Range], now: int) -> int | None:
        """The address whose youngest bytes are oldest, beginning or ending where another piece does.

        Of equal places the one with the fewest youngest bytes wins. None where all have bytes of
        position `now`, or of what must stay apart.
        """
        edges, ages = numpy.array(self.edges), numpy.array(self.ages)
        more = [within.start, within.stop - size, *(r.stop for r in apart), *(r.start - size for r in apart)]
        starts = numpy.unique(numpy.concatenate((edges[:-1], edges[1:] - size, numpy.array(more))))
        starts = starts[(starts >= within.start) & (starts + size <= within.stop)]
        for one in apart:
            starts = starts[(starts >= one.stop) | (starts + size <= one.start)]
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
        """Bytes of that age in a range."""
        low, high = bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop)
        return sum(
            min(stop, self.edges[i + 1]) - max(start, self.edges[i])
            for i in range(low, high)
            if self.ages[i] == age
        )


def _largest(values: numpy.ndarray, first: numpy.ndarray, last: numpy.ndarray) -> numpy.ndarray:
    """The largest of each run of values, `last` with it, from maxima over runs of every power of two."""
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
    """Addresses below `cap` for blocks in order of first use, the resident ones first and apart.

    With `ring`, the two largest of the others lie at the ends of what the resident ones leave and share all
    but so many bytes with nobody: what sticks out stays. None where blocks read at one step would
    overlap, or something does not fit.
    """
    addresses = [-1] * len(blocks)
    base = 0
    for b in sorted(resident):
        addresses[b] = base
        base += blocks[b].size
    rest = sorted((b for b in range(len(blocks)) if addresses[b] < 0), key=lambda b: first_use(blocks[b]))
    room = Range(base, cap)
    middle, fixed = room, {}
    if ring:
        low, high = sorted(rest, key=lambda b: -blocks[b].size)[:2]
        fixed = {low: room.start, high: room.stop - blocks[high].size}
        middle = Range(
            room.start + max(0, blocks[low].size - ring), room.stop - max(0, blocks[high].size - ring)
        )
        if middle.nbytes < ring:
            return None
    read_with = _read_together(blocks)
    left = _Room(base, cap)
    now, used = -1, None
    for b in rest:
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
    """For each block those that a step reads with it."""
    together: dict[tuple[int, int], list[int]] = {}
    for b, block in enumerate(blocks):
        for which, steps in enumerate(block.reads):
            for k in steps:
                together.setdefault((which, k), []).append(b)
    result: list[set[int]] = [set() for _ in blocks]
    for some in together.values():
        for b in some if len(some) > 1 else ():
            result[b] |= {o for o in some if o != b}
    return result


def _overlap(blocks: Sequence[Block], addresses: Sequence[int], read_with: Sequence[Collection[int]]) -> bool:
    """Whether two blocks that one step reads share bytes."""
    return any(
        addresses[b] < addresses[o] + blocks[o].size and addresses[o] < addresses[b] + blocks[b].size
        for b, others in enumerate(read_with)
        for o in others
    )

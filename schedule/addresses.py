"""Static addresses in a contiguous arena: storages that are never needed together may share bytes.

This is offline dynamic storage allocation with lifetimes that wrap around, as compilers place
buffers: a block is alive from some lookahead before each of its reads until that read ends, blocks
that are alive at one step may not overlap, and each is placed at the first address that fits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.schedule.model import Arena, Range, Storage, Trace
from penstock.schedule.spans import Reads, reads_of

Order = Literal["by use", "by size", "from both ends"]
ORDERS: tuple[Order, ...] = ("by use", "by size", "from both ends")


@dataclass(frozen=True)
class Block:
    """A storage as it is placed: `size` is that of its layout range, in whole granules."""

    storage: int
    range: Range
    size: int
    reads: Reads
    kept: bool


@dataclass(frozen=True)
class Placement:
    """Address of each block, and the bytes up to the end of the last."""

    addresses: tuple[int, ...]
    nbytes: int


def blocks_of(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[Block, ...]:
    """A block for every storage that is read; with several traces, what a first step reads is kept.

    Any of the methods may be called next, so nothing can be on its way when a call begins.
    """
    blocks = []
    for s, reads in reads_of(storages, traces, arena).items():
        first = len(traces) > 1 and any(steps[:1] == (0,) for steps in reads)
        size = -(-storages[s].nbytes // arena.granule) * arena.granule
        place = Range(arena.layout[s], arena.layout[s] + storages[s].nbytes)
        blocks.append(Block(s, place, size, reads, first or s in keep))
    return tuple(blocks)


def need(
    storages: Sequence[Storage], traces: Sequence[Trace], arena: Arena, keep: Collection[int]
) -> tuple[int, int, int, int | None]:
    """Bytes of the arena that a plan needs: a lower and an upper bound, and who sets the lower.

    The last two are the trace and the step (None without any). Below the most that one step reads
    there is no plan; the upper bound is the smallest placement that first fit finds.
    """
    blocks = blocks_of(storages, traces, arena, keep)
    largest: tuple[int, int, int | None] = (0, 0, None)
    for which, trace in enumerate(traces):
        kept = sum(block.range.nbytes for block in blocks if block.kept)
        read = [kept] * len(trace.steps)
        for block in blocks:
            for k in () if block.kept else block.reads[which]:
                read[k] += block.range.nbytes
        for k, nbytes in enumerate(read):
            if largest[2] is None or nbytes > largest[0]:
                largest = (nbytes, which, k)
    tightest = tight(blocks, traces)
    return largest[0], max(largest[0], tightest.nbytes), largest[1], largest[2]


def tight(blocks: Sequence[Block], traces: Sequence[Trace]) -> Placement:
    """The smallest placement found: only what is always kept is apart from everything."""
    kept = {b for b, block in enumerate(blocks) if block.kept}
    found = (place(blocks, traces, kept, window=0, order=order) for order in ORDERS[:2])
    return min((one for one in found if one is not None), key=lambda one: one.nbytes)


def place(
    blocks: Sequence[Block],
    traces: Sequence[Trace],
    resident: Collection[int],
    *,
    window: int,
    order: Order,
    cap: int | None = None,
) -> Placement | None:
    """Addresses such that the steps before a read that read `window` bytes leave its bytes alone.

    The resident blocks come first and are apart from all others. With the order "from both ends"
    every other block is placed as high below `cap` as fits, so that neighbours in time overlap in
    part only. None where something does not fit below `cap`.
    """
    addresses = [-1] * len(blocks)
    base = 0
    for b in sorted(resident):
        addresses[b] = base
        base += blocks[b].size
    rest = [b for b in range(len(blocks)) if addresses[b] < 0]
    rest.sort(key=lambda b: -blocks[b].size if order == "by size" else first_use(blocks[b]))
    alive = _lifetimes(blocks, traces, rest, window)
    taken: list[tuple[int, int, int]] = []
    height = base
    for turn, b in enumerate(rest):
        conflicts = [(start, stop) for start, stop, steps in taken if steps & alive[b]]
        high = order == "from both ends" and turn % 2 == 1
        if high:
            address = _highest(conflicts, blocks[b].size, cap or 0)
        else:
            address = _lowest(conflicts, blocks[b].size, base)
        stop = address + blocks[b].size
        if address < base or (cap is not None and stop > cap):
            return None
        addresses[b] = address
        insort(taken, (address, stop, alive[b]))
        height = max(height, stop)
    return Placement(tuple(addresses), height)


def first_use(block: Block) -> tuple[int, int]:
    return min((steps[0], which) for which, steps in enumerate(block.reads) if steps)


def _lowest(conflicts: Sequence[tuple[int, int]], size: int, base: int) -> int:
    """The lowest address from `base` on; conflicts are sorted by start."""
    address = base
    for start, stop in conflicts:
        if start >= address + size:
            break
        address = max(address, stop)
    return address


def _highest(conflicts: Sequence[tuple[int, int]], size: int, cap: int) -> int:
    """The highest address that ends within `cap`; negative where there is none."""
    address = cap - size
    for start, stop in sorted(conflicts, key=lambda one: -one[1]):
        if stop <= address:
            break
        address = min(address, start - size)
    return address


def _lifetimes(
    blocks: Sequence[Block], traces: Sequence[Trace], streamed: Sequence[int], window: int
) -> dict[int, int]:
    """The steps of all traces at which each block is alive, as the bits of an integer."""
    result = dict.fromkeys(streamed, 0)
    shift = 0
    for which, trace in enumerate(traces):
        n = len(trace.steps)
        read = [0] * n
        for b in streamed:
            for k in blocks[b].reads[which]:
                read[k] += blocks[b].size
        begins = list(_lookahead(read, window, cyclic=len(traces) == 1))
        for b in streamed:
            for k in blocks[b].reads[which]:
                result[b] |= _bits(begins[k], k, n) << shift
        shift += n
    return result


def _lookahead(read: Sequence[int], window: int, *, cyclic: bool) -> Iterator[int]:
    """For each step the first of those before it that read at most `window` bytes together."""
    n = len(read)
    first, total = (1 - n if cyclic else 0), 0
    total = sum(read[j % n] for j in range(first, 0))
    for k in range(n):
        while first < k and (total > window or first <= k - n):
            total -= read[first % n]
            first += 1
        yield first
        total += read[k]


def _bits(first: int, last: int, n: int) -> int:
    """Steps `first` to `last`; negative ones are those of the pass before."""
    ones = (1 << (last - max(first, 0) + 1)) - 1 << max(first, 0)
    return ones if first >= 0 else ones | ((1 << -first) - 1) << (n + first)

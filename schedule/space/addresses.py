"""Storages as blocks of a contiguous arena, and the least memory that holds what each step reads.

Storages that no step reads together may share bytes. Placing them in little memory is offline dynamic
storage allocation (`packing.py`); placing them well, so that copies may start early, is `oldest.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.facts.model import Range
from penstock.schedule.facts.problem import Demand
from penstock.schedule.space.packing import pack
from penstock.schedule.space.spans import Reads, reads_of


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


def blocks_of(demand: Demand) -> tuple[Block, ...]:
    """A block for every storage that is read."""
    arena, blocks = demand.arena, []
    for s, reads in reads_of(demand).items():
        nbytes = demand.storages[s].nbytes
        size = -(-nbytes // arena.granule) * arena.granule
        place = Range(arena.layout[s], arena.layout[s] + nbytes)
        blocks.append(Block(s, place, size, reads, s in demand.keep))
    return tuple(blocks)


def tight(blocks: Sequence[Block]) -> Placement:
    """The smallest placement found: what is always kept is apart from everything."""
    addresses = [0] * len(blocks)
    base = 0
    for b, block in enumerate(blocks):
        if block.kept:
            addresses[b] = base
            base += block.size
    free = [b for b, block in enumerate(blocks) if not block.kept]
    packing = pack([blocks[b].size for b in free], [_alive(blocks[b]) for b in free])
    for b, address in zip(free, packing.addresses, strict=True):
        addresses[b] = base + address
    return Placement(tuple(addresses), base + packing.nbytes)


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

"""Addresses in a contiguous arena by age: each storage over the bytes that were last read longest ago.

A copy may start once what it overwrites has been read for the last time. On a trace that repeats, the
place that was read longest ago is the one that can be filled earliest, so that memory works as a
ring whose blocks may have any sizes, and whose turning points (a backward pass) come for free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.schedule.addresses import Block, Placement, first_use
from penstock.schedule.model import Range


@dataclass(frozen=True)
class _Piece:
    """Bytes of the arena, and the position in the order of first uses of what was placed there last."""

    start: int
    stop: int
    age: int


def place_oldest(
    blocks: Sequence[Block], resident: Collection[int], *, cap: int, ring: int | None = None
) -> Placement | None:
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
    pieces = [_Piece(base, cap, -1)]
    now, used = -1, None
    for b in rest:
        now += used != first_use(blocks[b])
        used = first_use(blocks[b])
        apart = [
            Range(addresses[o], addresses[o] + blocks[o].size) for o in read_with[b] if addresses[o] >= 0
        ]
        address = fixed.get(b, _oldest(pieces, blocks[b].size, now=now, within=middle, apart=apart))
        if address is None:
            return None
        addresses[b] = address
        pieces = _replaced(pieces, _Piece(address, address + blocks[b].size, now))
    return None if _overlap(blocks, addresses, read_with) else Placement(tuple(addresses), cap)


def _oldest(
    pieces: Sequence[_Piece], size: int, *, now: int, within: Range, apart: Sequence[Range]
) -> int | None:
    """The address whose youngest bytes are oldest, beginning or ending where another piece does.

    Of equal places the one with the fewest youngest bytes wins. None where all have bytes of this step,
    or of what must stay apart.
    """
    starts = {within.start, within.stop - size}
    starts |= {piece.start for piece in pieces} | {piece.stop - size for piece in pieces}
    starts |= {one.stop for one in apart} | {one.start - size for one in apart}
    best: tuple[int, int, int] | None = None
    for address in starts:
        if address < within.start or address + size > within.stop:
            continue
        if any(address < one.stop and one.start < address + size for one in apart):
            continue
        youngest = nbytes = -1
        for piece in pieces:
            shared = min(piece.stop, address + size) - max(piece.start, address)
            if shared > 0 and piece.age >= youngest:
                nbytes = shared + (nbytes if piece.age == youngest else 0)
                youngest = piece.age
        rank = (youngest, nbytes, address)
        if youngest < now and (best is None or rank < best):
            best = rank
    return best[2] if best else None


def _replaced(pieces: Sequence[_Piece], new: _Piece) -> list[_Piece]:
    """The pieces, ascending, with the new one in place of what it covers."""
    below = [_Piece(p.start, min(p.stop, new.start), p.age) for p in pieces if p.start < new.start]
    above = [_Piece(max(p.start, new.stop), p.stop, p.age) for p in pieces if p.stop > new.stop]
    return [*below, new, *above]


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

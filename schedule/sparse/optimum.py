"""What no policy can do without: the least bytes that reads of units move through a pool of some size.

Belady's algorithm (A study of replacement algorithms, 1966) drops what is asked for last. Of pieces of one
size it misses the fewest possible. Units are of several sizes, and may share granules at their edges; for
these the best choice is NP-hard. So the algorithm drops single bytes here, of which each is a piece: a unit
may stay in part. What it misses is a lower bound for every policy that holds units whole, since each such
policy could be run on bytes as well. If all units have the same size, it never pays to keep a part, and the
bound is what the best policy misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from penstock.schedule.facts.model import Pool, SparseRead, Storage

Round = tuple[SparseRead, Sequence[int]]
"""Units of one read that have to be in a pool together."""


def least_missed(parts: Sequence[Round], pool: Pool, storages: Sequence[Storage]) -> tuple[int, bool]:
    """The least bytes that have to be brought for parts that come one after another, and whether it is exact.

    At first the pool is empty. If it is exact, there is a policy that brings so few.
    """
    pieces = _Pieces(pool, storages)
    asked = [list(dict.fromkeys(p for n in numbers for p in pieces.of(read, n))) for read, numbers in parts]
    exact, room = pieces.alike, pool.nbytes
    if exact and pieces.sizes:
        room -= room % pieces.sizes[0]
    return _missed(asked, pieces.sizes, room), exact


class _Pieces:
    """Units in pieces, the bytes that the same units have: of most units one, besides edges that are shared.

    Of the granules at the ends of a storage, only its own bytes count.
    """

    def __init__(self, pool: Pool, storages: Sequence[Storage]) -> None:
        self.sizes: list[int] = []
        self.alike = True  # each piece is a unit of whole granules, and all have one size
        self._pool, self._storages = pool, storages
        self._known: dict[tuple[int, int], int] = {}  # by the granules: first, and behind the last
        self._of: dict[tuple[int, int], list[int]] = {}

    def of(self, read: SparseRead, number: int) -> list[int]:
        """The numbers of the pieces of a unit."""
        key = (read.storage, number)
        if key not in self._of:
            self._of[key] = [self._number(read, *cut) for cut in self._cuts(read, number)]
            self.alike &= not any(self._shares(read, number)) and self._whole(read, number)
        return self._of[key]

    def _cuts(self, read: SparseRead, number: int) -> Iterator[tuple[int, int]]:
        """The granules of a unit, cut where another unit has bytes in the first or the last of them."""
        first, stop = self._pool.granules(read, number)
        before, behind = self._shares(read, number)
        left, right = first + before, stop - behind
        if before:
            yield first, left
        if behind and (stop - 1 > first or not before):
            yield right, stop
        if left < right:
            yield left, right

    def _shares(self, read: SparseRead, number: int) -> tuple[bool, bool]:
        """Tells whether other units have bytes in the first and in the last granule of a unit."""
        first, stop = self._pool.granules(read, number)
        before = number > 0 and self._pool.granules(read, number - 1)[1] > first
        return before, number + 1 < read.count and self._pool.granules(read, number + 1)[0] < stop

    def _number(self, read: SparseRead, first: int, stop: int) -> int:
        known = self._known.get((first, stop))
        if known is not None:
            return known
        granule, place = self._pool.granule, self._pool.layout[read.storage]
        end = min(stop * granule, place + self._storages[read.storage].nbytes)
        self.sizes.append(end - max(first * granule, place))
        self._known[first, stop] = len(self.sizes) - 1
        return len(self.sizes) - 1

    def _whole(self, read: SparseRead, number: int) -> bool:
        granules = self._pool.granules(read, number)
        start, stop = self._pool.bytes_in(granules, read.storage, self._storages[read.storage].nbytes)
        return (stop - start) % self._pool.granule == 0 and stop - start == self.sizes[0]


def _missed(asked: Sequence[Sequence[int]], sizes: Sequence[int], room: int) -> int:
    """Bytes that are brought if those leave first that are asked for last."""
    following = _following(asked, len(sizes))
    is_held, coming = [0] * len(sizes), [0] * len(sizes)
    leaving: list[tuple[int, int]] = []  # minus the part that asks next, and the piece; some are outdated
    total = missed = 0
    for part, later in zip(asked, following, strict=True):
        for piece, at in zip(part, later, strict=True):
            missed += sizes[piece] - is_held[piece]
            total += sizes[piece] - is_held[piece]
            is_held[piece], coming[piece] = sizes[piece], at
        while total > room:  # what this part needs is entered below, and so cannot leave yet
            at, piece = heappop(leaving)
            if -at != coming[piece]:
                continue
            gone = min(is_held[piece], total - room)
            is_held[piece], total = is_held[piece] - gone, total - gone
            if is_held[piece]:
                heappush(leaving, (at, piece))
        for piece, at in zip(part, later, strict=True):
            heappush(leaving, (-at, piece))
    return missed


def _following(asked: Sequence[Sequence[int]], pieces: int) -> list[list[int]]:
    """For each piece of each part, the number of the next part that asks for it."""
    coming = [len(asked)] * pieces
    following: list[list[int]] = []
    for k in range(len(asked) - 1, -1, -1):
        following.append([coming[piece] for piece in asked[k]])
        for piece in asked[k]:
            coming[piece] = k
    return following[::-1]

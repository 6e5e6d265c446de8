"""Ways to join neighbouring copies.

Joining two copies saves a latency, but the first bytes then wait until there is memory for the last bytes.
`in_sizes` joins copies up to a size. `Joiner.fastest` goes through the copies of two passes and works out,
for each way to cut them into copies, when the link and the compute would be done; at each place it keeps the
ways that are ahead in one of the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.schedule.facts.model import Hardware, Trace, Transfer

MERGED_BYTES = 1 << 30
"""Neighbouring spans are copied together up to this size in bytes, since each copy pays a latency.

The threads that read files divide a copy among themselves, in smaller pieces.
"""


def in_sizes(pieces: Sequence[Transfer], most: int, breaks: Collection[int]) -> list[Transfer]:
    """Join neighbouring transfers up to `most` bytes, where all may start before the step of the first runs.

    Neighbours that may start at the same time are joined up to MERGED_BYTES.
    """
    joined: list[Transfer] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        largest = MERGED_BYTES if last and piece.after == last.after else most
        if last and _follows(last, piece, breaks) and piece.stop - last.start <= largest:
            joined[-1] = Transfer(last.start, piece.stop, last.step, piece.after)
        else:
            joined.append(piece)
    return joined


def _follows(last: Transfer, piece: Transfer, breaks: Collection[int]) -> bool:
    """Tell whether `piece` may become the end of transfer `last`."""
    return piece.start == last.stop and piece.start not in breaks and piece.after < last.step


class _Way(NamedTuple):
    """One way to join the first `pieces` pieces into copies, and the times that follow from it.

    The link is done with these copies at `link_ns`, and the step of the next piece would begin at `steps_ns`.
    `step` is the last step that may have waited for a copy, -1 if it is not known, and `ended_ns` its end.
    `before` is the same way without its last copy.
    """

    link_ns: int
    steps_ns: int
    step: int
    ended_ns: int
    before: _Way | None
    pieces: int


class _Copy(NamedTuple):
    """A copy of neighbours that ends with number `pieces` of all, and may start when step `after` ends.

    The next copy is for step `following`.
    """

    pieces: int
    after: int
    ns: int
    following: int


class Joiner:
    """Finds the fastest way to join the copies of one trace on one machine."""

    def __init__(self, trace: Trace, hardware: Hardware, breaks: Collection[int]) -> None:
        self._hardware, self._breaks = hardware, breaks
        self._link_fill_ns = hardware.link_fill_ns
        self._steps = len(trace.steps)
        self._read_ns = [step.read_ns for step in trace.steps]
        between = trace.tail_ns + trace.gap_ns
        each = [step.lead_ns + step.read_ns for step in trace.steps]
        second = [each[0] + between, *each[1:]] if each else []
        self._ended_ns = list(itertools.accumulate((*each, *second), initial=0))
        """The times at which the steps of two passes begin if none waits, and at which the last one ends."""

    def fastest(self, pieces: Sequence[Transfer]) -> list[Transfer]:
        """Join the pieces of one pass as the best way found joins them in the second of two passes."""
        m, n = len(pieces), self._steps
        if not m:
            return []
        twice = [*pieces, *(t.__class__(t.start, t.stop, t.step + n, t.after + n) for t in pieces)]
        ways: list[list[_Way]] = [[] for _ in range(2 * m + 1)]
        ways[0].append(_Way(0, self._ended_ns[pieces[0].step], -1, 0, None, 0))
        for index in range(2 * m):
            best = _best(ways[index])
            copies = self._copies(twice, index, m if index < m else 2 * m) if best else []
            for way in best:
                self._extend(way, twice[index].step, copies, ways)
        last = min(ways[-1], key=lambda way: (max(way.link_ns, way.steps_ns), way.link_ns + way.steps_ns))
        return self._cut(pieces, last)

    def _copies(self, twice: Sequence[Transfer], begin: int, end: int) -> list[_Copy]:
        """All copies that bring piece `begin` and others that follow it, but none from `end` on."""
        first, copies = twice[begin], []
        stop = first.start
        for index in range(begin, end):
            piece = twice[index]
            if index > begin and (piece.start != stop or piece.start in self._breaks):
                break
            stop = piece.stop
            if piece.after >= first.step or stop - first.start > MERGED_BYTES:
                break
            following = twice[index + 1].step if index + 1 < len(twice) else 2 * self._steps
            copy_ns = self._hardware.copy_ns(stop - first.start)
            copies.append(_Copy(index + 1, piece.after, copy_ns, following))
        return copies

    def _extend(self, way: _Way, step: int, copies: Sequence[_Copy], ways: list[list[_Way]]) -> None:
        """Add to `ways` the ways that extend a way by one of some copies, for which `step` waits."""
        ended, read_ns = self._ended_ns, self._read_ns[step % self._steps]
        lead_ns = ended[step + 1] - ended[step] - read_ns
        for pieces, after, copy_ns, following in copies:
            starts_ns = self._ended(way, after) + self._link_fill_ns
            link_ns = max(way.link_ns, starts_ns) + copy_ns
            if following == step:
                ways[pieces].append(_Way(link_ns, way.steps_ns, -1, 0, way, pieces))
                continue
            done_ns = max(way.steps_ns + lead_ns, link_ns) + read_ns
            steps_ns = done_ns + ended[following] - ended[step + 1]
            ways[pieces].append(_Way(link_ns, steps_ns, step, done_ns, way, pieces))

    def _ended(self, way: _Way | None, step: int) -> int:
        """The time at which a step ends, if the copies of a way are all that it may wait for."""
        if step < 0:
            return 0
        while way is not None:
            if 0 <= way.step <= step:
                return way.ended_ns + self._ended_ns[step + 1] - self._ended_ns[way.step + 1]
            way = way.before
        return self._ended_ns[step + 1]

    def _cut(self, pieces: Sequence[Transfer], last: _Way) -> list[Transfer]:
        """The transfers of one pass, joined as way `last` joins the pieces of its second pass."""
        edges = []
        way: _Way | None = last
        while way is not None and way.pieces >= len(pieces):
            edges.append(way.pieces - len(pieces))
            way = way.before
        return [
            Transfer(pieces[a].start, pieces[b - 1].stop, pieces[a].step, pieces[b - 1].after)
            for a, b in itertools.pairwise(reversed(edges))
        ]


def _best(ways: list[_Way]) -> list[_Way]:
    """The ways with the least time of the link, with the least time of the steps, and with the least sum."""
    if len(ways) < 2:
        return ways
    chosen = (
        min(ways),
        min(ways, key=lambda way: (way.steps_ns, way.link_ns)),
        min(ways, key=lambda way: (way.steps_ns + way.link_ns, way.link_ns)),
    )
    return list({(way.link_ns, way.steps_ns): way for way in chosen}.values())

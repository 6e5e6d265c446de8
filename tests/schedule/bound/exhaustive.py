"""The least time that a pass can take, whatever is copied and dropped when, by trying everything.

For problems of a few chunks of equal size and steps of a few ticks. Shares nothing with the planner but
the facts that it reads. Memory holds whole chunks; a chunk takes its room from the start of its copy
until it is dropped, and a link makes one copy at a time. A step reads when its lead has ended and its
chunks are there, which then stay for just its read time. With a disk, a copy to the device has to find its
chunk on the host, which may drop it as soon as that copy has begun.

What can happen is a graph of states whose edges take ticks. Some edges end a pass, and the states after
those are joined by the least ticks of a pass between them; the answer is the least mean of a closed walk
among them, by the theorem of Karp (A characterization of the minimum cycle mean in a digraph, Discrete
Mathematics 23, 1978).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy

TICK_NS = 1000

Tier = tuple[int, int, int]
"""Chunks that are there, chunks on their way, and the ticks that those still take; sets are bit masks."""

State = tuple[int, tuple[Tier, ...]]
"""The item of the pass that is next, and the tiers, the device's first."""

Edge = tuple[int, int, State]
"""Ticks, passes that end, and where it leads."""

_NEVER = 1 << 40
"""More ticks than any way takes."""


@dataclass(frozen=True)
class Memory:
    """Room for some chunks, and the link that fills it: ticks for each chunk and for each copy."""

    chunks: int
    chunk_ticks: int
    latency_ticks: int = 0


@dataclass(frozen=True)
class Item:
    """A tick of computing, or a moment (`ticks` 0): a read that takes no time, or the end of a call.

    `needs` has to be on the device. `held` may not be dropped before, because a read is going on.
    A `quiet` item waits until no copy is on its way, and lets none start.
    """

    ticks: int
    needs: int = 0
    held: int = 0
    quiet: bool = False


@dataclass(frozen=True)
class Tiny:
    """A problem: its pass item by item, its memories, the device's first, and what never leaves that.

    With `joint`, any chunks may come as one copy, which then has one latency.
    """

    items: tuple[Item, ...]
    chunks: int
    memories: tuple[Memory, ...]
    pinned: int
    joint: bool

    @property
    def link_ticks(self):
        """Ticks in which the slower link copies every chunk once, one after the other."""
        return self.chunks.bit_count() * max(memory.chunk_ticks for memory in self.memories)


def tiny_of(problem, memories):
    """The problem whose chunks are the arena's granules, and whose ticks are TICK_NS.

    Its budget and its hardware do not count, but the memories and their links.
    """
    arena, trace = problem.arena, problem.traces[0]

    def mask(some):
        chunks = set()
        for s in some:
            stop = arena.layout[s] + problem.storages[s].nbytes
            chunks |= set(range(arena.layout[s] // arena.granule, -(-stop // arena.granule)))
        return sum(1 << chunk for chunk in chunks)

    items = []
    for step in trace.steps:
        chunks = mask(step.reads)
        items += [Item(1)] * (step.lead_ns // TICK_NS)
        items += [Item(1, chunks), *[Item(1, chunks, held=chunks)] * (step.read_ns // TICK_NS - 1)]
        if not step.read_ns:
            items[-1] = Item(0, chunks)
    items += [Item(1)] * (trace.tail_ns // TICK_NS)
    quiet = problem.wrap == "barrier"
    items += [Item(0, quiet=True)] * quiet + [Item(1, quiet=quiet)] * (trace.gap_ns // TICK_NS)
    everything = mask({s for step in trace.steps for s in step.reads})
    joint = any(memory.latency_ticks for memory in memories)
    return Tiny(tuple(items), everything, memories, mask(problem.keep), joint)


def least_ticks(tiny, *, passes=0):
    """The least ticks of a pass, on average, when all repeats after `passes` passes, or whenever (0).

    Nothing is gained by computing later than possible, by starting a copy at a moment at which nothing
    ends, or by dropping before room is needed, so that is left out. What is kept for longer can take more
    passes to repeat, so that with `passes` it may be dropped when a pass ends.
    """
    moves = _Moves(tiny, lighten=passes > 0)
    between = _least_between_passes(moves)
    if not passes:
        return _least_mean(between)
    walks = between
    for _ in range(passes - 1):
        walks = (walks[:, :, None] + between[None, :, :]).min(axis=1)
    return Fraction(int(walks.diagonal().min()), passes)


class _Moves:
    """What may happen next in any state."""

    def __init__(self, tiny, *, lighten):
        self.tiny, self.lighten = tiny, lighten

    def states(self):
        """States without copies from which all others follow: all of them with memory full."""
        chunks = list(_bits(self.tiny.chunks))
        for at, item in enumerate(self.tiny.items):
            here = [
                [sum(some) for some in itertools.combinations(chunks, min(memory.chunks, len(chunks)))]
                for memory in self.tiny.memories
            ]
            for masks in itertools.product(*here):
                if not (item.held | self.tiny.pinned) & ~masks[0]:
                    tiers = tuple((mask, 0, 0) for mask in masks)
                    yield self._settled(at, tiers)[1]

    def after(self, state):
        for edge in self._eagerly(state):
            yield edge
            if self.lighten and edge[1]:
                yield from self._lightened(edge)

    def _eagerly(self, state):
        """Copies start or not, and time passes until a link is idle; the program runs when it can."""
        choices = [state[1]]
        for tier in range(len(self.tiny.memories)):
            choices += [
                _with(tiers, tier, start)
                for tiers in choices
                for start in self._starts(state[0], tiers, tier)
            ]
        for tiers in choices:
            at, ticks, passes = state[0], 0, 0
            if not self._can(at, tiers) and not any(left for _, _, left in tiers):
                continue
            while not ticks or all(left for _, _, left in tiers):
                begins = self._can(at, tiers)
                ticks, tiers = ticks + 1, _tick(tiers)  # noqa: PLW2901
                ended, (at, _) = self._settled(at + begins, tiers)
                passes += ended
            yield ticks, passes, (at, tiers)

    def _settled(self, at, tiers):
        """Behind all items that take no time and can happen now, with the passes that end."""
        passes, at = divmod(at, len(self.tiny.items))
        while not self.tiny.items[at].ticks and self._can(at, tiers):
            ended, at = divmod(at + 1, len(self.tiny.items))
            passes += ended
        return passes, (at, tiers)

    def _can(self, at, tiers):
        item = self.tiny.items[at]
        return not item.needs & ~tiers[0][0] and not (item.quiet and any(left for _, _, left in tiers))

    def _starts(self, at, tiers, tier):
        """The tier after the start of each copy that its link can start, what makes room dropped."""
        memory, (there, coming, _) = self.tiny.memories[tier], tiers[tier]
        if coming or (self.tiny.items[at].quiet and self.tiny.items[at].ticks):
            return
        source = tiers[tier + 1][0] if tier + 1 < len(tiers) else self.tiny.chunks
        absent, leaving = list(_bits(source & ~there)), list(_bits(there & ~self._fixed(at, tier)))
        for count in range(1, (min(len(absent), memory.chunks) if self.tiny.joint else 1) + 1):
            short = max(0, there.bit_count() + count - memory.chunks)
            ticks = memory.latency_ticks + count * memory.chunk_ticks
            for some in itertools.combinations(absent, count):
                for dropped in itertools.combinations(leaving, short):
                    yield there - sum(dropped), sum(some), ticks

    def _fixed(self, at, tier):
        return 0 if tier else self.tiny.items[at].held | self.tiny.pinned

    def _lightened(self, edge):
        """The same, but for something that is dropped at its end."""
        ticks, passes, (at, tiers) = edge
        options = []
        for tier, (there, coming, left) in enumerate(tiers):
            may = list(_bits(there & ~self._fixed(at, tier)))
            options.append(
                [
                    (there - sum(some), coming, left)
                    for count in range(len(may) + 1)
                    for some in itertools.combinations(may, count)
                ]
            )
        for fewer in itertools.product(*options):
            if fewer != tiers:
                yield ticks, passes, (at, fewer)


def _bits(mask):
    while mask:
        yield mask & -mask
        mask &= mask - 1


def _with(tiers, tier, changed):
    return (*tiers[:tier], changed, *tiers[tier + 1 :])


def _tick(tiers):
    """A tick later on all links."""
    return tuple(
        (there | coming, 0, 0) if left <= 1 else (there, coming, left - 1) for there, coming, left in tiers
    )


def _least_between_passes(moves):
    """Least ticks from each state in which a pass has just ended to each other, one pass later."""
    number = {state: n for n, state in enumerate(dict.fromkeys(moves.states()))}
    waiting, rows = list(number), []
    while waiting:
        state = waiting.pop()
        for ticks, passes, following in moves.after(state):
            if following not in number:
                number[following] = len(number)
                waiting.append(following)
            rows.append((number[following], number[state], ticks, passes))
    assert max(row[3] for row in rows) <= 1, "memory for everything"
    edges = numpy.array(sorted(rows), dtype=numpy.int64)
    inside, ending = edges[edges[:, 3] == 0], edges[edges[:, 3] == 1]
    starts, where = numpy.unique(ending[:, 0], return_inverse=True)

    reached = numpy.full((len(number), len(starts)), _NEVER, dtype=numpy.int64)
    reached[starts, numpy.arange(len(starts))] = 0
    targets, first = numpy.unique(inside[:, 0], return_index=True)
    while True:
        ways = numpy.minimum.reduceat(reached[inside[:, 1]] + inside[:, 2:3], first, axis=0)
        if (ways >= reached[targets]).all():
            break
        reached[targets] = numpy.minimum(reached[targets], ways)
    between = numpy.full((len(starts), len(starts)), _NEVER, dtype=numpy.int64)
    numpy.minimum.at(between, where, reached[ending[:, 1]] + ending[:, 2:3])
    return between.T


def _least_mean(between):
    """The least mean weight of a cycle: over the ends of walks, of the worst rest of a walk of n edges."""
    count = len(between)
    walks = [numpy.zeros(count, dtype=numpy.int64)]
    for _ in range(count):
        walks.append((walks[-1][:, None] + between).min(axis=0))
    means = []
    for end in range(count):
        if walks[count][end] < _NEVER:
            rest = ((int(walks[count][end] - walks[k][end]), count - k) for k in range(count))
            means.append(max(Fraction(ticks, passes) for ticks, passes in rest))
    return min(means)

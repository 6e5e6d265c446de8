"""What a search is given and gives: a task, a draft, and the transfers that follow from addresses."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.clock.event_graph import leaving_storages, steady_period_ns, streamed_steps
from penstock.schedule.clock.transfers import MERGED_BYTES
from penstock.schedule.facts.model import Drop, Range, Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.addresses import Addressing
from penstock.schedule.space.spans import Block, Pieces, merged


@dataclass(frozen=True)
class Task:
    """A problem, and `cap` bytes of arena for it, in which a plan exists.

    `relaxed` has the relaxation of each trace within these bytes, None where the solver failed. `effort` is
    how much to search, as a multiple of the usual amount.
    """

    problem: Problem
    pieces: Pieces
    cap: int
    relaxed: tuple[Relaxation | None, ...]
    effort: float = 1.0


@dataclass(frozen=True)
class Draft:
    """All decisions of a plan, without its times; the fields are as in `Decisions`.

    `streams` has the transfers and the drops of each trace. `boundaries` has the boundary of each trace, and
    is empty where `boundary` holds for all. `starts` are slower drafts with other numbers of copies, from
    which a climb may get further.
    """

    arena_bytes: int
    addresses: tuple[int, ...]
    resident: tuple[Range, ...]
    boundary: tuple[Range, ...]
    streams: tuple[tuple[tuple[Transfer, ...], tuple[Drop, ...]], ...]
    boundaries: tuple[tuple[Range, ...], ...] = ()
    starts: tuple[Draft, ...] = field(default=(), compare=False, repr=False)

    def periods_ns(self, problem: Problem, enough: float = math.inf) -> list[int]:
        """The steady period of each trace, in nanoseconds; of one above `enough`, some number above it."""
        schedules = [
            Schedule(trace.graph, *stream, 0)
            for trace, stream in zip(problem.traces, self.streams, strict=True)
        ]
        facts = zip(problem.traces, schedules, self._launched(problem, schedules), strict=True)
        return [
            steady_period_ns(
                trace, schedule, problem.hardware, problem.wrap, enough=enough, launched=launched
            )
            for trace, schedule, launched in facts
        ]

    def _launched(self, problem: Problem, schedules: Sequence[Schedule]) -> list[tuple[int, ...]]:
        """The streamed steps of each trace; none where nothing streams, or launches take no time."""
        if not problem.hardware.host_step_ns or not self.arena_bytes:
            return [()] * len(schedules)
        sizes = [storage.nbytes for storage in problem.storages]
        leaving = leaving_storages(problem.arena, sizes, problem.outside, self.resident)
        return [
            streamed_steps(trace, schedule, schedule, leaving)
            for trace, schedule in zip(problem.traces, schedules, strict=True)
        ]


_TIMES_AS_LONG = 2
"""Bytes that are copied out stay for this many times as long as their copy takes, if there is room."""


@dataclass
class _Moves:
    """What is copied and dropped in a pass of one trace, and which bytes stay until the next pass.

    `outs` maps (step that writes, step that waits, block) to the layout ranges to copy out.
    `copies` maps (step, step that must have ended, block) to the layout ranges to copy, and `drops` maps a
    step to the ranges that leave when it ends. `crossing` pairs each range that stays with the first step of
    the next pass that reads it.
    """

    copies: dict[tuple[int, int, int], list[Range]] = field(default_factory=dict)
    drops: dict[int, list[Range]] = field(default_factory=dict)
    outs: dict[tuple[int, int, int], list[Range]] = field(default_factory=dict)
    crossing: list[tuple[int, Range]] = field(default_factory=list)


class Occupancy:
    """The copies and drops that the addresses of a placement cause in every trace of a demand."""

    def __init__(self, demand: Problem, blocks: Sequence[Block], placement: Addressing) -> None:
        self._demand, self._blocks, self._placement = demand, blocks, placement
        self._begins = frozenset(block.range.start for block in blocks)
        pieces, cells = _cells(blocks, placement)
        resident: list[Range] = []
        self._moves = [_Moves() for _ in demand.traces]
        self._waits = [_Waits(demand, number) for number in range(len(demand.traces))]
        for cell, users in enumerate(cells):
            if len(users) == 1 and not blocks[users[0]].produced:
                resident.append(pieces[users[0]][cell])
                continue
            for number, trace in enumerate(demand.traces):
                reads = sorted((k, b) for b in users for k in blocks[b].reads[number])
                ranges = {b: pieces[b][cell] for b in users}
                used = (b for b in users if blocks[b].produced and blocks[b].reads[number])
                written = {b: blocks[b].reads[number][0] for b in used}
                _move(
                    _Cell(reads, ranges, written, self._waits[number]), len(trace.steps), self._moves[number]
                )
        self._resident = merged(resident, self._begins)

    def drafts(self, part: int) -> list[Draft]:
        """The drafts worth timing; parts of a block that take less than `part` latencies join neighbours."""
        hardware, last = self._demand.hardware, max(len(trace.steps) for trace in self._demand.traces) - 1
        least = int(part * hardware.link_latency_ns * hardware.link_bytes_per_s / 1e9)
        choices = (last,) if self._demand.wrap == "overlap" else (last, 0)
        return [self.decide(early, least) for early in choices]

    def decide(self, early: int, least: int) -> Draft:
        """The draft with the transfers, drops and boundaries that follow from the addresses.

        Only transfers for steps up to `early` may start before the pass does. A part of a block that has
        fewer than `least` bytes is copied together with a neighbouring part, as soon as both may be copied.
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
        """The transfers of one trace, in the order of the steps that need them.

        A link copies in issue order, so a transfer never starts before the one issued before it. `after` is
        therefore raised where needed, so that it never decreases from one transfer to the next.
        """
        blocks: dict[tuple[int, int], list[tuple[Range, int]]] = {}
        for (step, after, b), ranges in moves.copies.items():
            blocks.setdefault((step, b), []).extend((piece, after) for piece in merged(ranges, self._begins))
        rows = sorted(
            (step, after, piece)
            for (step, _), some in blocks.items()
            for joined, after in _joined(sorted(some), least, self._begins)
            for piece in _parts(joined)
        )
        last = [after for _, after, _ in rows] + [written for written, _, _ in moves.outs]
        reached = max(last, default=0) - steps
        result = []
        for step, after, piece in rows:
            reached = max(reached, after, 0 if step > early else after)
            result.append(Transfer(piece.start, piece.stop, step, reached))
        outs = [
            Transfer(piece.start, piece.stop, step, written, "out")
            for (written, step, _), ranges in moves.outs.items()
            for joined in merged(ranges, self._begins)
            for piece in _parts(joined)
        ]
        return tuple(sorted((*result, *outs), key=lambda t: (t.after, t.step)) if outs else result)

    def _addresses(self) -> tuple[int, ...]:
        """The address of every storage in a contiguous arena (-1 for one outside); () for a paged arena."""
        arena = self._demand.arena
        if arena.kind == "paged":
            return ()
        addresses = [-1] * len(arena.layout)
        for block, address in zip(self._blocks, self._placement.addresses, strict=True):
            addresses[block.storage] = address + block.shift
        return tuple(addresses)


def _cells(blocks: Sequence[Block], placement: Addressing) -> tuple[list[dict[int, Range]], list[list[int]]]:
    """For each block, its layout range in each cell that it fills; for each cell, the blocks that fill it."""
    places = [Range(at, at + block.size) for at, block in zip(placement.addresses, blocks, strict=True)]
    cuts = sorted({edge for place in places for edge in (place.start, place.stop)})
    pieces: list[dict[int, Range]] = []
    cells: list[list[int]] = [[] for _ in cuts]
    for b, (block, at) in enumerate(zip(blocks, places, strict=True)):
        mine = {}
        for cell in range(bisect_left(cuts, at.start), bisect_left(cuts, at.stop)):
            back = block.range.start - block.shift - at.start
            start = max(cuts[cell] + back, block.range.start)
            mine[cell] = Range(start, min(cuts[cell + 1] + back, block.range.stop))
            cells[cell].append(b)
        pieces.append(mine)
    return pieces, cells


class _Waits:
    """How long what is copied out stays, in the steps of one trace."""

    def __init__(self, problem: Problem, number: int) -> None:
        self._problem, self._which = problem, number
        steps = problem.traces[number].steps
        self._ended = list(itertools.accumulate(step.lead_ns + step.read_ns for step in steps))

    def until(self, written: int, nbytes: int, least: int, most: int) -> int:
        """The step of the same call, from `least` to `most`, by whose end a copy out has had time enough."""
        done = self._ended[written] + _TIMES_AS_LONG * self._problem.hardware.write_ns(nbytes)
        most = min(most, self._problem.call_ends(self._which, written))
        return max(least, min(most, bisect_left(self._ended, done)))


@dataclass(frozen=True)
class _Cell:
    """One cell of the arena: who uses it in a pass.

    `reads` has a pair (step, block) for each use, in order of time, and `ranges` the layout range in the cell
    of each block. `written` has the first use of each produced block, which writes it.
    """

    reads: Sequence[tuple[int, int]]
    ranges: dict[int, Range]
    written: dict[int, int]
    waits: _Waits

    def writes(self, j: int) -> bool:
        k, b = self.reads[j]
        return self.written.get(b) == k

    def leaves(self, j: int) -> int:
        """The step at whose end the block of use number j leaves the cell at the earliest."""
        k, b = self.reads[j]
        if self.written.get(b) != k - 1 or not self.out(j):
            return k
        following = self.reads[j + 1][0]  # there is one, as the block is read again
        return self.waits.until(self.written[b], self.ranges[b].nbytes, k, following - 1)

    def out(self, j: int) -> bool:
        """True if the block of use number j is produced, leaves behind it, and is read again."""
        _, b = self.reads[j]
        if b not in self.written:
            return False
        return any(other == b for _, other in self.reads[j + 1 :]) and self.reads[j + 1][1] != b


def _move(cell: _Cell, steps: int, moves: _Moves) -> None:
    reads, ranges = cell.reads, cell.ranges
    saved: set[int] = set()
    for j, (k, b) in enumerate(reads):
        user = reads[j - 1][1]
        following = (j + 1) % len(reads)
        if cell.writes(j):
            pass  # its bytes come from the step itself
        elif user != b:
            before = cell.leaves((j - 1) % len(reads))
            moves.copies.setdefault((k, before if j else before - steps, b), []).append(ranges[b])
        elif j == 0:
            moves.crossing.append((k, ranges[b]))
        if reads[following][1] != b or cell.writes(following):
            leaves = cell.leaves(j)
            moves.drops.setdefault(leaves, []).append(ranges[b])
            if cell.out(j) and b not in saved:
                saved.add(b)
                moves.outs.setdefault((cell.written[b], leaves, b), []).append(ranges[b])


def _joined(
    pieces: Sequence[tuple[Range, int]], least: int, begins: Collection[int]
) -> Iterator[tuple[Range, int]]:
    """Join neighbours with fewer than `least` bytes; each comes with the step that its copy waits for."""
    last, waits = pieces[0]
    for piece, after in pieces[1:]:
        touches = piece.start == last.stop and piece.start not in begins
        if touches and min(piece.nbytes, last.nbytes) < least:
            last, waits = Range(last.start, piece.stop), max(waits, after)
        else:
            yield last, waits
            last, waits = piece, after
    yield last, waits


def _parts(whole: Range) -> Iterator[Range]:
    for start in range(whole.start, whole.stop, MERGED_BYTES):
        yield Range(start, min(start + MERGED_BYTES, whole.stop))

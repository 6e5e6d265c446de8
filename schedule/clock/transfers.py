"""The transfers of a plan for the clock: what each waits for, and which are joined to one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy

from penstock.schedule.bound.gaps import Gap
from penstock.schedule.facts.model import Direction, Drop, Hardware, Range, Trace, Transfer
from penstock.schedule.space.spans import Group, merged

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
        touches = last is not None and piece.start == last.stop and piece.start not in breaks
        if last and touches and piece.after < last.step and piece.stop - last.start <= largest:
            joined[-1] = Transfer(last.start, piece.stop, last.step, piece.after)
        else:
            joined.append(piece)
    return joined


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
    """A copy that ends with piece `pieces` and starts when step `after` ends; `following` has the next."""

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


Join = Callable[[Sequence[Transfer]], Iterable[Transfer]]
"""A function that joins neighbours among the transfers of a pass."""


@dataclass(frozen=True)
class Holding:
    """The drops of a pass, the ranges held between passes, and the most bytes that are ever held."""

    drops: tuple[Drop, ...]
    boundary: tuple[Range, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Streaming:
    """What moves in one pass, before its times are known.

    The period follows from the transfers alone, so `holding` is worked out by `follow` only when it is asked
    for.
    """

    transfers: tuple[Transfer, ...]
    follow: Callable[[], Holding]

    @cached_property
    def holding(self) -> Holding:
        """What the arena holds while these transfers run."""
        return self.follow()


class Loads:
    """Every copy that a trace could need: one row for each span and gap, in issue order.

    `call_ends` gives the last step of the call to which a step belongs, in which what it writes leaves if it
    leaves before it is read.

    The row is the copy of a span for step `step`, after the span was dropped. The earliest that it can be
    dropped is the end of step `dropped`, which is negative for a step of the pass before. The columns are
    arrays with one element a row.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        gaps: Sequence[Gap],
        steps: int,
        *,
        breaks: Collection[int],
        number: int = 0,
        call_ends: Callable[[int], int] | None = None,
    ) -> None:
        rows = [
            (
                gap.closes % steps,
                gap.opens - gap.closes // steps * steps,
                span.start,
                span.stop,
                number,
                index,
            )
            for index, gap in enumerate(gaps)
            for number, span in enumerate(groups[gap.group].spans)
        ]
        table = numpy.array(sorted(rows), dtype=numpy.int64).reshape(len(rows), 6)
        self.step, self.dropped, self.start, self.stop, self.number, self.gap = table.T
        self.nbytes = self.stop - self.start
        self.spans = [span for group in groups for span in group.spans]
        self.span_bytes = numpy.array([span.nbytes for span in self.spans], dtype=numpy.int64)
        counts = [len(group.spans) for group in groups]
        first = numpy.array([0, *itertools.accumulate(counts)], dtype=numpy.int64)
        of_gap = numpy.array([first[gap.group] for gap in gaps], dtype=numpy.int64)
        written = [
            group.reads[number][0] if group.produced and group.reads[number] else -1 for group in groups
        ]
        ends = [group.reads[number][-1] if written[g] >= 0 else -1 for g, group in enumerate(groups)]
        self.written, self.ends = (
            numpy.repeat(numpy.array(column, dtype=numpy.int64), counts) for column in (written, ends)
        )
        """By span, the steps that write it and that use it last; -1 for weights."""
        self.span = of_gap[self.gap] + self.number
        last = [call_ends(k) if call_ends and k >= 0 else steps - 1 for k in written]
        self.call_ends = numpy.repeat(numpy.array(last, dtype=numpy.int64), counts)
        self.produced = self.written[self.span] >= 0
        self.steps = steps
        self.gaps = gaps
        self.breaks = breaks

    def after_first(self, counts: Sequence[int]) -> numpy.ndarray:
        """The mask of the rows of all spans except the leading `counts[g]` spans of each gap g."""
        rows: numpy.ndarray = self.number >= numpy.array(counts, dtype=numpy.int64)[self.gap]
        return rows

    def steps_using(self, spans: numpy.ndarray) -> list[int]:
        """The steps that use one of some spans, of which `spans` is a mask."""
        steps: list[int] = numpy.unique(self.step[spans[self.span]]).tolist()
        return steps

    def never_in(self, rows: numpy.ndarray) -> numpy.ndarray:
        """A mask over all spans: true for those that none of these rows copies."""
        never: numpy.ndarray = self.written < 0
        never[self.span[rows]] = False
        return never

    def stream(
        self,
        rows: numpy.ndarray,
        resident: numpy.ndarray,
        *,
        cap: int,
        early: int,
        join: Join | None = None,
        put_off: int = 0,
    ) -> Streaming | None:
        """The transfers and drops that copy the chosen `rows` in `cap` bytes of memory.

        `rows` is a mask over the rows, and `resident` a mask over the spans that never leave. Only transfers
        for steps up to `early` may start before the pass does. The memory that each step needs by itself must
        be within `cap`. `join` joins neighbouring transfers; without it, only those with equal step and
        `after` are joined. Copies out are put off as long as no more than `put_off` bytes wait for them. None
        if a copy then finds no memory in time.
        """
        nbytes, dropped = self.nbytes[rows], self._left(rows, put_off)
        crossing = ~rows & (self.dropped < 0) & ~resident[self.span] & ~self.produced
        base = int(self.span_bytes[resident].sum() + self.nbytes[crossing].sum())

        freed, taken = self._gone(dropped, nbytes), self._made(self.written)
        after = numpy.searchsorted(self._free(freed, taken, nbytes.sum()), base + nbytes.cumsum() - cap)
        after = numpy.maximum.accumulate(numpy.maximum(after - self.steps, dropped))
        outs = self._outs(rows, dropped)
        if len(after):
            after = numpy.maximum(after, max([after[-1], *(t.after for t in outs)]) - self.steps)
        after = numpy.maximum(after, numpy.where(self.step[rows] > early, 0, -self.steps))
        if put_off and (after >= self.step[rows]).any():
            return None

        pieces = self._merged(rows, after)
        transfers = tuple(join(pieces)) if join else pieces

        def follow() -> Holding:
            in_flight = [(t.step, Range(t.start, t.stop)) for t in transfers if t.after < 0]
            resident = [(int(self.step[i]), self.spans[self.span[i]]) for i in numpy.nonzero(crossing)[0]]
            boundary = tuple(span for _, span in sorted(resident + in_flight))
            drops = self._drops(rows, dropped)
            return Holding(drops, boundary, self._peak(base, freed, taken, transfers))

        both = sorted((*transfers, *outs), key=lambda t: (t.after, t.step)) if outs else transfers
        return Streaming(tuple(both), follow)

    def _made(self, at: numpy.ndarray) -> numpy.ndarray:
        """The bytes of produced spans up to each step; `at` has the step at which each span counts."""
        is_produced = self.written >= 0
        result = numpy.zeros(self.steps, dtype=numpy.int64)
        numpy.add.at(result, at[is_produced], self.span_bytes[is_produced])
        return result.cumsum()

    def _gone(self, dropped: numpy.ndarray, nbytes: numpy.ndarray) -> numpy.ndarray:
        """The bytes that have left in a pass when each step ends."""
        freed = numpy.zeros(self.steps, dtype=numpy.int64)
        numpy.add.at(freed, dropped % self.steps, nbytes)
        gone: numpy.ndarray = freed.cumsum() + self._made(self.ends)
        return gone

    def _free(self, freed: numpy.ndarray, taken: numpy.ndarray, copied: int) -> numpy.ndarray:
        """The memory that is free from the end of each step on, of the pass before and of this one.

        It counts from what is free when a pass begins, and without copies in. A step takes memory for what it
        writes when it begins.
        """
        if not taken.any():
            return numpy.concatenate((freed - copied, freed))
        following = numpy.append(taken[1:], taken[-1] + taken[0])
        free = freed - following
        passes = numpy.concatenate((free - copied, free, free + copied))
        least: numpy.ndarray = numpy.minimum.accumulate(passes[::-1])[::-1]
        return least[: 2 * self.steps]

    def _left(self, rows: numpy.ndarray, put_off: int) -> numpy.ndarray:
        """The step at whose end each row's span leaves, which is later if too many bytes wait to go out."""
        dropped: numpy.ndarray = self.dropped[rows]
        fresh = numpy.nonzero(self.produced[rows] & (dropped == self.written[self.span[rows]] + 1))[0]
        if not put_off or not len(fresh):
            return dropped
        fresh = fresh[numpy.argsort(dropped[fresh], kind="stable")]
        waiting = self.nbytes[rows][fresh].cumsum()
        full = numpy.searchsorted(waiting, waiting - self.nbytes[rows][fresh] + put_off, side="right")
        begins = numpy.append(dropped[fresh] - 1, 2 * self.steps)[full]
        dropped = dropped.copy()
        most = numpy.minimum(self.step[rows][fresh] - 1, self.call_ends[self.span[rows][fresh]])
        dropped[fresh] = numpy.maximum(dropped[fresh], numpy.minimum(begins - 1, most))
        return dropped

    def _outs(self, rows: numpy.ndarray, dropped: numpy.ndarray) -> list[Transfer]:
        """The copies out of produced spans that leave before their last read, once for each span."""
        first: dict[int, tuple[int, int, int, int]] = {}
        produced_rows = numpy.nonzero(self.produced[rows])[0]
        spans = self.span[rows][produced_rows]
        columns = (
            spans,
            self.written[spans],
            dropped[produced_rows],
            self.start[rows][produced_rows],
            self.stop[rows][produced_rows],
        )
        for span, *facts in zip(*(column.tolist() for column in columns), strict=True):
            first.setdefault(span, tuple(facts))
        pieces = ((start, stop, step, written) for written, step, start, stop in sorted(first.values()))
        return self._joined(pieces, "out", math.inf)

    def _merged(self, rows: numpy.ndarray, after: numpy.ndarray) -> tuple[Transfer, ...]:
        """Make one transfer of neighbouring rows for the same step that may start at the same time."""
        columns = (self.start[rows], self.stop[rows], self.step[rows], after)
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(self._joined(pieces, "in", MERGED_BYTES))

    def _joined(
        self, pieces: Iterable[tuple[int, int, int, int]], direction: Direction, most: float
    ) -> list[Transfer]:
        """The transfers of pieces (start, stop, step, `after`); like neighbours join up to `most` bytes."""
        result: list[Transfer] = []
        start = stop = step = earliest = -1
        for next_start, next_stop, next_step, next_after in pieces:
            same = next_start == stop and next_after == earliest and next_step == step
            if same and next_start not in self.breaks and next_stop - start <= most:
                stop = next_stop
                continue
            if start >= 0:
                result.append(Transfer(start, stop, step, earliest, direction))
            start, stop, step, earliest = next_start, next_stop, next_step, next_after
        if start >= 0:
            result.append(Transfer(start, stop, step, earliest, direction))
        return result

    def _drops(self, row: numpy.ndarray, dropped: numpy.ndarray) -> tuple[Drop, ...]:
        """The drops of the spans that the chosen rows copy again, and of what is produced, by step."""
        spans: dict[int, list[Range]] = {}
        for span, step in enumerate(self.ends.tolist()):
            if step >= 0:
                spans.setdefault(step, []).append(self.spans[span])
        columns = (dropped % self.steps, self.start[row], self.stop[row])
        for step, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            spans.setdefault(step, []).append(Range(start, stop))
        return tuple(
            Drop(r.start, r.stop, step) for step in sorted(spans) for r in merged(spans[step], self.breaks)
        )

    def _peak(
        self, base: int, freed: numpy.ndarray, taken: numpy.ndarray, transfers: Sequence[Transfer]
    ) -> int:
        """The most bytes that are on the device, or on their way to it, during any step."""
        after = numpy.array([t.after for t in transfers], dtype=numpy.int64)
        copied = numpy.array([t.stop - t.start for t in transfers], dtype=numpy.int64)
        copied = numpy.concatenate(([0], copied.cumsum()))
        steps = numpy.arange(self.steps)
        arrived = copied[numpy.searchsorted(after, steps)]
        arrived += copied[numpy.searchsorted(after, steps - self.steps)]
        gone = numpy.concatenate(([0], freed[:-1]))
        return int((base + arrived + taken - gone).max(initial=base))

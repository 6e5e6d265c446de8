"""From residency in a paged arena to transfers, in order of deadline, each as early as memory has room.

In the steady state, the arena holds what crosses the boundary of the pass, plus what has been
copied, minus what has been dropped. A transfer may start after the first step by whose end enough
has been dropped for it and for everything before it on the link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.schedule.model import Drop, Range, Transfer
from penstock.schedule.residency import Gap
from penstock.schedule.spans import Group, merged

if TYPE_CHECKING:
    import numpy

MERGED_BYTES = 1 << 30
"""Neighbouring spans with the same deadline and start are copied together up to this size.

Each copy pays a latency. Readers share one in pieces of their own.
"""


@dataclass(frozen=True)
class Memory:
    """What leaves when, what is there between passes, and the most ever held."""

    drops: tuple[Drop, ...]
    boundary: tuple[Range, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Streaming:
    """What moves in one pass, before its times are known.

    The transfers alone say how long that takes; the rest is worked out when it is asked for.
    """

    transfers: tuple[Transfer, ...]
    follow: Callable[[], Memory]

    @cached_property
    def memory(self) -> Memory:
        return self.follow()


@dataclass(frozen=True)
class Decisions:
    """All of a plan but its times; `streams` has the transfers and drops of each trace."""

    arena_bytes: int
    addresses: tuple[int, ...]
    resident: tuple[Range, ...]
    boundary: tuple[Range, ...]
    streams: tuple[tuple[tuple[Transfer, ...], tuple[Drop, ...]], ...]


class Loads:
    """Every copy that a trace could need, one row for each span and gap, in issue order.

    A row is a copy for step `step` of a span that was dropped, at the earliest, at the end of step
    `dropped` (negative: of the pass before).
    """

    def __init__(
        self, groups: Sequence[Group], gaps: Sequence[Gap], steps: int, *, breaks: Collection[int]
    ) -> None:
        import numpy

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
        self.steps = steps
        self.groups = groups
        self.gaps = gaps
        self.breaks = breaks

    def stream(
        self, counts: Sequence[int], fixed: Sequence[int], *, cap: int, early: int, coalesce: int = 0
    ) -> Streaming:
        """Transfers and drops when each gap keeps `counts` leading spans, in `cap` bytes.

        `fixed[g]` leading spans of group g are resident. Only transfers for steps up to `early` may
        start before the pass does. The memory that each step needs by itself must be within `cap`.
        """
        import numpy

        row = self.number >= numpy.array(counts, dtype=numpy.int64)[self.gap]
        step, nbytes, dropped = self.step[row], self.nbytes[row], self.dropped[row]
        base = sum(g.bytes_of_first[count] for g, count in zip(self.groups, fixed, strict=True))
        base += sum(
            self.groups[gap.group].bytes_of_first[count]
            - self.groups[gap.group].bytes_of_first[min(count, fixed[gap.group])]
            for gap, count in zip(self.gaps, counts, strict=True)
            if gap.closes >= self.steps
        )

        freed = numpy.zeros(self.steps, dtype=numpy.int64)
        numpy.add.at(freed, dropped % self.steps, nbytes)
        freed = freed.cumsum()
        two_passes = numpy.concatenate((freed - nbytes.sum(), freed))
        after = numpy.searchsorted(two_passes, base + nbytes.cumsum() - cap) - self.steps
        after = numpy.maximum.accumulate(numpy.maximum(after, dropped))
        if len(after):
            after = numpy.maximum(after, after[-1] - self.steps)
        after = numpy.maximum(after, numpy.where(step > early, 0, -self.steps))

        after = self._coalesced(row, after, coalesce) if coalesce else after
        transfers = self._merged(row, after, across=bool(coalesce))

        def follow() -> Memory:
            in_flight = [(t.step, Range(t.start, t.stop)) for t in transfers if t.after < 0]
            boundary = [span for _, span in sorted(self._crossing(counts, fixed) + in_flight)]
            return Memory(self._drops(row), tuple(boundary), self._peak(base, freed, after, nbytes))

        return Streaming(transfers, follow)

    def _crossing(self, counts: Sequence[int], fixed: Sequence[int]) -> list[tuple[int, Range]]:
        """Spans that are kept over the end of the pass without being resident, with their first step."""
        return [
            (gap.closes % self.steps, span)
            for gap, count in zip(self.gaps, counts, strict=True)
            if gap.closes >= self.steps
            for span in self.groups[gap.group].spans[fixed[gap.group] : count]
        ]

    def _coalesced(self, row: numpy.ndarray, after: numpy.ndarray, most: int) -> numpy.ndarray:
        """Starts put off so that neighbours of up to `most` bytes start together, in time for the first."""
        starts = after.tolist()
        columns = (self.start[row].tolist(), self.stop[row].tolist(), self.step[row].tolist())
        first, nbytes, stop = 0, 0, -1
        for index, (start, end, _) in enumerate(zip(*columns, strict=True)):
            joins = start == stop and start not in self.breaks and nbytes + end - start <= most
            if not joins or starts[index] >= columns[2][first]:
                first, nbytes = index, 0
            nbytes += end - start
            stop = end
            if starts[index] != starts[first]:
                starts[first : index + 1] = [starts[index]] * (index + 1 - first)
        result: numpy.ndarray = after.__class__(after.shape, dtype=after.dtype)
        result[:] = starts
        return result

    def _merged(self, row: numpy.ndarray, after: numpy.ndarray, *, across: bool) -> tuple[Transfer, ...]:
        result: list[Transfer] = []
        columns = (self.start[row].tolist(), self.stop[row].tolist(), self.step[row].tolist(), after.tolist())
        start = stop = step = earliest = -1
        for next_start, next_stop, next_step, next_after in zip(*columns, strict=True):
            same = next_start == stop and next_after == earliest and (across or next_step == step)
            if same and next_start not in self.breaks and next_stop - start <= MERGED_BYTES:
                stop = next_stop
                continue
            if start >= 0:
                result.append(Transfer(start, stop, step, earliest))
            start, stop, step, earliest = next_start, next_stop, next_step, next_after
        if start >= 0:
            result.append(Transfer(start, stop, step, earliest))
        return tuple(result)

    def _drops(self, row: numpy.ndarray) -> tuple[Drop, ...]:
        spans: dict[int, list[Range]] = {}
        columns = (self.dropped[row] % self.steps, self.start[row], self.stop[row])
        for step, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            spans.setdefault(step, []).append(Range(start, stop))
        return tuple(
            Drop(r.start, r.stop, step) for step in sorted(spans) for r in merged(spans[step], self.breaks)
        )

    def _peak(self, base: int, freed: numpy.ndarray, after: numpy.ndarray, nbytes: numpy.ndarray) -> int:
        """The most bytes that any step finds on the device or on their way to it."""
        import numpy

        copied = numpy.concatenate(([0], nbytes.cumsum()))
        steps = numpy.arange(self.steps)
        arrived = copied[numpy.searchsorted(after, steps)]
        arrived += copied[numpy.searchsorted(after, steps - self.steps)]
        gone = numpy.concatenate(([0], freed[:-1]))
        return int((base + arrived - gone).max(initial=base))

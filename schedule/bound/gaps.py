"""What a storage may save by staying in memory between two of its reads."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from penstock.schedule.facts.model import Trace
from penstock.schedule.space.spans import Group, Run


@dataclass(frozen=True)
class Gap:
    """The time from the read of a group at step `opens` to its next read, at step `closes`.

    `closes` counts on into the next pass: a step k there is n + k, where a pass has n steps.
    """

    group: int
    opens: int
    closes: int

    @property
    def inside(self) -> int:
        """The number of steps at which the spans are on the device only if they are kept over the gap."""
        return self.closes - self.opens - 1


def gaps_of(groups: Sequence[Group], trace: Trace, *, number: int = 0) -> tuple[Gap, ...]:
    """The gaps of every group that trace number `number` reads and that a plan may drop.

    A produced storage has no gap from its last read to the step that writes it: no copy can bring it then.
    """
    n = len(trace.steps)
    return tuple(
        Gap(index, opens, closes)
        for index, group in enumerate(groups)
        if not group.kept and group.reads[number]
        for opens, closes in itertools.pairwise((*group.reads[number], *_again(group, n, number)))
    )


def _again(group: Group, steps: int, number: int) -> tuple[int, ...]:
    """The first use of a group in the next pass of `steps` steps, if what it holds then is the same."""
    return () if group.produced else (group.reads[number][0] + steps,)


def needed_bytes(pieces: Sequence[Group] | Sequence[Run], steps: int, *, number: int = 0) -> list[int]:
    """Bytes that must be on the device at each step: the pieces that it reads, and those always kept."""
    needed = [sum(piece.nbytes for piece in pieces if piece.kept)] * steps
    for piece in pieces:
        for k in () if piece.kept else piece.reads[number]:
            needed[k] += piece.nbytes
    return needed


class Residency:
    """Counts the memory of one pass of a trace, and rounds the bytes kept over each gap to whole spans."""

    def __init__(self, groups: Sequence[Group], gaps: Sequence[Gap], needed: Sequence[int]) -> None:
        self.groups = groups
        self.gaps = gaps
        self.needed = numpy.array(needed, dtype=numpy.int64)
        self._opens = numpy.array([gap.opens for gap in gaps], dtype=numpy.int64)
        self._closes = numpy.array([gap.closes for gap in gaps], dtype=numpy.int64)

    def rounded(self, kept_bytes: Sequence[float], *, quantum: int = 0) -> list[int]:
        """The number of leading spans to keep over each gap, so that about `kept_bytes` bytes are kept.

        Gaps are rounded in the order of their closing steps. Each one makes up for the rounding error of
        those before it, so that sums over neighbouring gaps stay close. Gaps of less than `quantum` bytes are
        copied whole or not at all, in runs of about `quantum` bytes, so that one copy can bring a run. Larger
        gaps are copied in multiples of `quantum` bytes.
        """
        gaps, steps = self.gaps, len(self.needed)
        counts = [0] * len(gaps)
        owed = 0.0  # bytes still to be copied
        running = False
        for index in sorted(range(len(gaps)), key=lambda i: (gaps[i].closes % steps, gaps[i].group)):
            prefix = self.groups[gaps[index].group].bytes_of_first
            owed += prefix[-1] - kept_bytes[index]
            if not gaps[index].inside:
                counts[index] = len(prefix) - 1
            elif prefix[-1] < quantum:
                running = owed > -quantum / 2 if running else owed >= quantum / 2
                counts[index] = 0 if running else len(prefix) - 1
            else:
                wanted = prefix[-1] - (round(owed / quantum) * quantum if quantum else owed)
                above = min(bisect_right(prefix, wanted), len(prefix) - 1)
                below = max(0, above - 1)
                counts[index] = above if prefix[above] - wanted < wanted - prefix[below] else below
            owed -= prefix[-1] - prefix[counts[index]]
        return counts

    def held(self, counts: Sequence[int]) -> numpy.ndarray:
        """Bytes on the device at each step if `counts` spans are kept and transfers arrive just in time."""
        total: numpy.ndarray = self.needed + self._profile(range(len(self.gaps)), counts)
        return total

    def held_bytes(self, kept_bytes: Sequence[float]) -> numpy.ndarray:
        """Bytes on the device at each step, as `held` counts them, if gap g keeps `kept[g]` bytes."""
        total: numpy.ndarray = self.needed + self._over(numpy.arange(len(self.gaps)), numpy.array(kept_bytes))
        return total

    def trim(self, counts: Sequence[int], kept_bytes: Sequence[float], limit: int) -> list[int]:
        """The counts, lowered so that no step holds more than `limit` bytes, or more than it needs itself.

        Where a step holds too much, the count is lowered first at the gap whose spans exceed its `kept_bytes`
        bytes by most.
        """
        counts = list(counts)
        held_at_step, steps = self.held(counts), len(self.needed)
        most = numpy.maximum(self.needed, limit)
        for step in numpy.nonzero(held_at_step > most)[0].tolist():
            if held_at_step[step] <= most[step]:
                continue
            inside = (self._opens < step) & (step < self._closes) | (self._opens < step + steps) & (
                step + steps < self._closes
            )
            for gap in sorted(
                numpy.nonzero(inside)[0].tolist(), key=lambda g: self._short(g, counts, kept_bytes)
            ):
                excess = int(held_at_step[step] - most[step])
                if excess <= 0:
                    break
                prefix = self.groups[self.gaps[gap].group].bytes_of_first
                count = max(0, bisect_right(prefix, prefix[counts[gap]] - excess) - 1)
                freed = numpy.array([prefix[counts[gap]] - prefix[count]])
                held_at_step -= self._over(numpy.array([gap]), freed)
                counts[gap] = count
        return counts

    def _short(self, gap: int, counts: Sequence[int], kept_bytes: Sequence[float]) -> float:
        """Bytes that the spans kept over a gap lack of its `kept_bytes` bytes; negative if they have more."""
        return kept_bytes[gap] - self.groups[self.gaps[gap].group].bytes_of_first[counts[gap]]

    def _profile(self, gaps: Sequence[int], counts: Sequence[int]) -> numpy.ndarray:
        """Bytes held at each step only because each of these gaps keeps its count of spans."""
        gap_numbers = numpy.fromiter(gaps, dtype=numpy.int64, count=len(gaps))
        nbytes = numpy.array(
            [
                self.groups[self.gaps[gap].group].bytes_of_first[count]
                for gap, count in zip(gaps, counts, strict=True)
            ],
            dtype=numpy.int64,
        )
        return self._over(gap_numbers, nbytes)

    def _over(self, gap_numbers: numpy.ndarray, nbytes: numpy.ndarray) -> numpy.ndarray:
        """Bytes held at each step only because these gaps keep `nbytes` each."""
        steps = len(self.needed)
        change = numpy.zeros(2 * steps + 1, dtype=nbytes.dtype)
        numpy.add.at(change, self._opens[gap_numbers] + 1, nbytes)
        numpy.add.at(change, self._closes[gap_numbers], -nbytes)
        twice = change[:-1].cumsum()
        folded: numpy.ndarray = twice[:steps] + twice[steps:]
        return folded

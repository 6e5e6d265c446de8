"""Which spans of a paged arena stay on the device, for each gap between two reads: keep, or copy again.

A gap reaches from one read of a group of spans to the next; the last of a pass reaches into the
next pass. Keeping it costs memory at the steps inside it and saves one copy. Gaps of short duration
are kept first, and what is left is spread evenly over gaps of like duration: on a cyclic scan that
is the fluid optimum, where keeping the most recent is the worst there is.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from penstock.schedule.facts.model import Hardware, Trace
from penstock.schedule.space.spans import Group

_BISECTIONS = 10
_CLASS_RATIO = 1.5
"""Gaps whose cost differs by less than this are like one another."""


@dataclass(frozen=True)
class Gap:
    """From the read at step `opens` to the next, at `closes` (n more than the step when it wraps).

    `hidden` is the share of what the closing step copies that its compute hides.
    """

    group: int
    opens: int
    closes: int
    hidden: float = 1.0

    @property
    def inside(self) -> int:
        """Steps at which the spans are on the device only because they are kept."""
        return self.closes - self.opens - 1


def gaps_between_reads(
    groups: Sequence[Group], trace: Trace, hardware: Hardware, *, which: int = 0
) -> tuple[Gap, ...]:
    """As `gaps_of`, with the share that compute hides."""
    n = len(trace.steps)
    copied = needed_bytes(groups, n, which=which)
    idle_ns = [step.lead_ns + step.read_ns for step in trace.steps]
    if n:
        idle_ns[0] += trace.tail_ns + trace.gap_ns
    hidden = [
        min(1.0, ns * hardware.link_bytes_per_s / 1e9 / max(1, nbytes))
        for ns, nbytes in zip(idle_ns, copied, strict=True)
    ]
    gaps = gaps_of(groups, trace, which=which)
    return tuple(replace(gap, hidden=hidden[gap.closes % n]) for gap in gaps)


def gaps_of(groups: Sequence[Group], trace: Trace, *, which: int = 0) -> tuple[Gap, ...]:
    """The gaps of every group that trace number `which` reads and that may be dropped at all."""
    n = len(trace.steps)
    return tuple(
        Gap(index, opens, closes)
        for index, group in enumerate(groups)
        if not group.kept and group.reads[which]
        for opens, closes in itertools.pairwise((*group.reads[which], group.reads[which][0] + n))
    )


def needed_bytes(groups: Sequence[Group], steps: int, *, which: int = 0) -> list[int]:
    """Bytes that must be on the device at each step: what it reads, and what is always kept."""
    needed = [sum(group.nbytes for group in groups if group.kept)] * steps
    for group in groups:
        for k in () if group.kept else group.reads[which]:
            needed[k] += group.nbytes
    return needed


class Residency:
    """Counts the memory of one pass of a trace, and decides how many leading spans to keep over each gap."""

    def __init__(self, groups: Sequence[Group], gaps: Sequence[Gap], needed: Sequence[int]) -> None:
        self.groups = groups
        self.gaps = gaps
        self.needed = numpy.array(needed, dtype=numpy.int64)
        self._opens = numpy.array([gap.opens for gap in gaps], dtype=numpy.int64)
        self._closes = numpy.array([gap.closes for gap in gaps], dtype=numpy.int64)

    def keep(self, level: int, *, latency_bytes: float, spread: bool) -> list[int]:
        """Leading spans kept over each gap, so that no step holds more than `level` bytes.

        A step that needs more than `level` by itself holds just what it needs. With `spread`, copies go first
        to gaps whose closing steps can hide them behind compute; without, all gaps get equal shares.
        """
        limit = numpy.maximum(self.needed, level)
        held = self.needed.copy()
        counts = [0] * len(self.gaps)
        for alike in self._alike(latency_bytes):
            chosen = self._largest_share(alike, limit - held, spread=spread)
            for gap, count in zip(alike, chosen, strict=True):
                counts[gap] = count
            held += self._profile(alike, chosen)
        self._fill(counts, limit - held, latency_bytes)
        return counts

    def rounded(self, kept: Sequence[float], *, quantum: int = 0) -> list[int]:
        """Leading spans to keep over each gap, near to `kept` bytes.

        In the order of their closing steps each gap makes up for what was rounded before it, so that sums
        over neighbours stay close. Gaps of less than `quantum` bytes are copied whole or not at all, in runs
        of about that many bytes: one copy can then bring a run.
        """
        gaps, steps = self.gaps, len(self.needed)
        counts = [0] * len(gaps)
        owed = 0.0  # bytes still to be copied
        running = False
        for index in sorted(range(len(gaps)), key=lambda i: (gaps[i].closes % steps, gaps[i].group)):
            prefix = self.groups[gaps[index].group].bytes_of_first
            owed += prefix[-1] - kept[index]
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
        """Bytes on the device at each step when transfers arrive just in time."""
        total: numpy.ndarray = self.needed + self._profile(range(len(self.gaps)), counts)
        return total

    def held_bytes(self, kept: Sequence[float]) -> numpy.ndarray:
        """As `held`, of bytes kept over each gap."""
        total: numpy.ndarray = self.needed + self._over(numpy.arange(len(self.gaps)), numpy.array(kept))
        return total

    def trim(self, counts: Sequence[int], kept: Sequence[float], limit: int) -> list[int]:
        """Fewer spans over some gaps, so that no step holds more than `limit` bytes, or what it needs itself.

        Where a step holds too much, spans leave first from gaps that have more than their `kept` bytes.
        """
        counts = list(counts)
        held, steps = self.held(counts), len(self.needed)
        most = numpy.maximum(self.needed, limit)
        for step in numpy.nonzero(held > most)[0].tolist():
            if held[step] <= most[step]:
                continue
            inside = (self._opens < step) & (step < self._closes) | (self._opens < step + steps) & (
                step + steps < self._closes
            )
            for gap in sorted(numpy.nonzero(inside)[0].tolist(), key=lambda g: self._short(g, counts, kept)):
                excess = int(held[step] - most[step])
                if excess <= 0:
                    break
                prefix = self.groups[self.gaps[gap].group].bytes_of_first
                count = max(0, bisect_right(prefix, prefix[counts[gap]] - excess) - 1)
                freed = numpy.array([prefix[counts[gap]] - prefix[count]])
                held -= self._over(numpy.array([gap]), freed)
                counts[gap] = count
        return counts

    def _short(self, gap: int, counts: Sequence[int], kept: Sequence[float]) -> float:
        return kept[gap] - self.groups[self.gaps[gap].group].bytes_of_first[counts[gap]]

    def _cost(self, gap: Gap, latency_bytes: float) -> float:
        """Steps of memory for each byte of copying saved; a copy's latency counts as bytes."""
        nbytes = self.groups[gap.group].nbytes
        return gap.inside * nbytes / (nbytes + latency_bytes)

    def _alike(self, latency_bytes: float) -> list[list[int]]:
        """The gaps in classes of like cost, cheapest first."""
        classes: dict[int, list[int]] = {}
        for index, gap in enumerate(self.gaps):
            cost = self._cost(gap, latency_bytes)
            key = round(math.log(cost, _CLASS_RATIO)) if gap.inside else -(10**6)
            classes.setdefault(key, []).append(index)
        return [classes[key] for key in sorted(classes)]

    def _largest_share(self, alike: Sequence[int], room: numpy.ndarray, *, spread: bool) -> list[int]:
        """Spans of each gap for the largest common share that leaves no step without room."""
        full = [len(self.groups[self.gaps[gap].group].spans) for gap in alike]
        if (self._profile(alike, full) <= room).all():
            return full
        best, low, high = [0] * len(alike), 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = (low + high) / 2
            counts = self._shares(alike, share, spread=spread)
            if (self._profile(alike, counts) <= room).all():
                best, low = counts, share
            else:
                high = share
        return best

    def _shares(self, alike: Sequence[int], share: float, *, spread: bool) -> list[int]:
        """`share` of the bytes in whole spans, what is rounded off carried to the next gap."""
        sizes = [self.groups[self.gaps[gap].group].nbytes for gap in alike]
        hidden = [self.gaps[gap].hidden if spread else 1.0 for gap in alike]
        mean = sum(h * size for h, size in zip(hidden, sizes, strict=True)) / sum(sizes)
        copied = 1.0 - share
        first = min(1.0, copied / mean) if mean else 0.0
        then = (copied - mean) / (1.0 - mean) if copied > mean else 0.0
        counts, carry = [], 0.0
        for gap, size, h in zip(alike, sizes, hidden, strict=True):
            prefix = self.groups[self.gaps[gap].group].bytes_of_first
            carry += size * (1.0 - h * first - (1.0 - h) * then)
            count = max(0, bisect_right(prefix, carry + 1e-6) - 1)
            carry -= prefix[count]
            counts.append(count)
        return counts

    def _profile(self, gaps: Sequence[int], counts: Sequence[int]) -> numpy.ndarray:
        """Bytes held at each step only because these gaps keep that many spans."""
        which = numpy.fromiter(gaps, dtype=numpy.int64, count=len(gaps))
        nbytes = numpy.array(
            [
                self.groups[self.gaps[gap].group].bytes_of_first[count]
                for gap, count in zip(gaps, counts, strict=True)
            ],
            dtype=numpy.int64,
        )
        return self._over(which, nbytes)

    def _over(self, which: numpy.ndarray, nbytes: numpy.ndarray) -> numpy.ndarray:
        steps = len(self.needed)
        change = numpy.zeros(2 * steps + 1, dtype=nbytes.dtype)
        numpy.add.at(change, self._opens[which] + 1, nbytes)
        numpy.add.at(change, self._closes[which], -nbytes)
        twice = change[:-1].cumsum()
        folded: numpy.ndarray = twice[:steps] + twice[steps:]
        return folded

    def _fill(self, counts: list[int], room: numpy.ndarray, latency_bytes: float) -> None:
        """Gives what is still free, step by step, to the cheapest gaps that can use it."""
        steps = len(room)
        order = sorted(range(len(counts)), key=lambda gap: self._cost(self.gaps[gap], latency_bytes))
        for index in order:
            gap = self.gaps[index]
            prefix = self.groups[gap.group].bytes_of_first
            if not gap.inside or counts[index] == len(prefix) - 1:
                continue
            here = [room[gap.opens + 1 : min(gap.closes, steps)], room[: max(0, gap.closes - steps)]]
            free = min(int(part.min()) for part in here if len(part))
            if free <= 0:
                continue
            count = bisect_right(prefix, prefix[counts[index]] + free) - 1
            taken = prefix[count] - prefix[counts[index]]
            room[gap.opens + 1 : min(gap.closes, steps)] -= taken
            room[: max(0, gap.closes - steps)] -= taken
            counts[index] = count

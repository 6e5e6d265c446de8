"""What memory forces: copies that no plan avoids, and what a storage saves by staying between two reads."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

from penstock.schedule.facts.model import Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.spans import Block, Group, Run


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
        counted = zip(self.gaps, counts, strict=True)
        return self.held_bytes([self.groups[gap.group].bytes_of_first[count] for gap, count in counted])

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

    def _over(self, gap_numbers: numpy.ndarray, nbytes: numpy.ndarray) -> numpy.ndarray:
        """Bytes held at each step only because these gaps keep `nbytes` each."""
        steps = len(self.needed)
        change = numpy.zeros(2 * steps + 1, dtype=nbytes.dtype)
        numpy.add.at(change, self._opens[gap_numbers] + 1, nbytes)
        numpy.add.at(change, self._closes[gap_numbers], -nbytes)
        twice = change[:-1].cumsum()
        folded: numpy.ndarray = twice[:steps] + twice[steps:]
        return folded


_LONGEST = 96
"""The most steps of a window: a longer one seldom says what the linear program does not."""

_POINTS = 4000
"""Into how many intervals the possible numbers of shared bytes are divided."""

_DUST = 1e-9
"""The largest error, as a share, that floating point makes here."""


@dataclass(frozen=True)
class FixedPlaces:
    """The weights that trace number `number` of a problem reads, each at one address of a contiguous arena.

    The arena and the weights outside of it have `nbytes` of memory together.
    """

    problem: Problem
    number: int
    blocks: Sequence[Block]
    nbytes: int

    @cached_property
    def excess(self) -> int:
        """The bytes of all blocks that are more than the memory."""
        return sum(block.range.nbytes for block in self.blocks) - self.nbytes

    @cached_property
    def least_shared(self) -> int:
        """The least bytes of the arena that two or more blocks share, whatever the addresses are.

        Let W bytes be shared, and let the blocks have D bytes more than the memory. The shared bytes form
        intervals. At most two blocks reach beyond each interval, one at each end; all others in it have at
        most W bytes. So D <= W + S(W), where S(W) is the sum of the bytes of all blocks of at most W bytes.
        """
        shared, smaller = max(0, self.excess), 0
        for nbytes in sorted(block.range.nbytes for block in self.blocks if not block.kept):
            if shared < nbytes:
                break
            smaller += nbytes
            shared = max(nbytes, self.excess - smaller)
        return shared

    @property
    def least_copied(self) -> int:
        """The least bytes that every pass copies.

        If m > 1 blocks share a byte of the arena, that byte is copied m times in every pass; a byte of a
        single block is never copied. With W and D as above, a pass copies D + W bytes.
        """
        return max(0, self.excess) + self.least_shared

    def turns_ns(self) -> int:
        """Return a time that no pass is shorter than, because blocks take turns at the bytes that they share.

        See "Turns" in docs/planning.md: the least P for which some W satisfies all inequalities there. They
        are checked for intervals of W, each with the least left side and the greatest right side in it.
        """
        free = [block for block in self.blocks if not block.kept]
        if self.excess <= 0 or len(free) < 2:
            return 0
        nbytes = numpy.array([block.range.nbytes for block in free], dtype=float)
        parts = numpy.array([self._least_part(block) for block in free], dtype=float)
        steps, hardware = self.problem.traces[self.number].steps, self.problem.hardware
        reads = numpy.array([min(steps[k].read_ns for k in block.reads[self.number]) for block in free])
        ns, latency_ns = 1e9 / hardware.link_bytes_per_s, hardware.link_latency_ns
        starts_ns = hardware.link_fill_ns + latency_ns
        turns = numpy.sort(starts_ns + parts * ns + reads).cumsum()
        edges = numpy.geomspace(max(self.least_shared, self.excess / (len(free) - 1)), self.excess, _POINTS)
        shared, most_shared = edges[:-1], edges[1:] * (1 + _DUST)
        copied = self.excess + shared
        order = numpy.argsort(reads)
        read_ns = numpy.interp(
            copied,
            numpy.concatenate(([0.0], nbytes[order].cumsum())),
            numpy.concatenate(([0.0], (nbytes * reads)[order].cumsum())),
        )

        first, second, *smaller = numpy.argsort(-nbytes, kind="stable")
        third = nbytes[smaller[0]] if smaller else _DUST
        apart = not {*free[first].reads[self.number]} & {*free[second].reads[self.number]}
        most = numpy.minimum(nbytes[first], most_shared), numpy.minimum(nbytes[second], most_shared)

        def fits(period_ns: float) -> bool:
            takers = numpy.searchsorted(turns, period_ns, side="right")
            copies = (period_ns - copied * ns) // max(latency_ns, _DUST)
            between = max(0.0, (period_ns - reads[first] - reads[second]) / 2 - starts_ns) / ns * apart
            of_two = numpy.minimum(most_shared + between, most[0] + most[1])
            small, alone = (numpy.maximum(0, copied * (1 - _DUST) - large) for large in (of_two, most[0]))
            fewest = numpy.minimum(2 + small / third, 1 + alone / third)
            possible = (copied <= takers * most_shared) & (copies >= numpy.maximum(2, fewest))
            mean_bytes = copied / numpy.maximum(copies, 1)
            large = (copied - small) ** 2 / numpy.maximum(copies - small / third, 1)
            squares = numpy.where(mean_bytes > third, small * third + large, copied * mean_bytes)
            taken_ns = copied * starts_ns + numpy.maximum(squares, copied * parts.min()) * ns + read_ns
            return bool((possible & (taken_ns <= period_ns * most_shared)).any())

        low, high = 0.0, float(turns[-1] + nbytes.sum() * ns + 1)
        while not fits(high):
            low, high = high, 2 * high
        while high - low > max(1.0, high * 1e-6):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return math.floor(low * (1 - _DUST))

    def windows_ns(self, needed: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Yield pairs of steps j < k with the least ns from the end of j to the start of the read of k.

        See "Windows" in docs/planning.md. `needed` is as `needed_bytes` counts it. k counts on into the next
        pass.
        """
        n, hardware = len(needed), self.problem.hardware
        ns, latency_ns = 1e9 / hardware.link_bytes_per_s, hardware.link_latency_ns
        reading: list[list[int]] = [[] for _ in needed]
        for b, block in enumerate(self.blocks):
            for k in () if block.kept else block.reads[self.number]:
                reading[k].append(b)
        parts = [self._least_part(block) for block in self.blocks]
        for j in range(n):
            room, seen = max(0, self.nbytes - needed[j]), set(reading[j])
            staying: list[int] = []
            stays, cut, copy_ns, least = 0, 0, 0.0, math.inf
            for k in range(j + 1, j + 1 + min(n, _LONGEST)):
                fresh = [b for b in reading[k % n] if b not in seen]
                seen.update(fresh)
                for b in fresh:
                    # Of equal memory, small blocks save the most latencies: the largest leaves first.
                    heapq.heappush(staying, -self.blocks[b].range.nbytes)
                    stays, least = stays + self.blocks[b].range.nbytes, min(least, parts[b])
                    while stays > room:
                        largest = -heapq.heappop(staying)
                        cut = min(cut or largest, largest)
                        stays, copy_ns = stays - largest, copy_ns + latency_ns + largest * ns
                if fresh and cut:
                    saved = (room - stays) * (latency_ns / cut + ns)
                    yield j, k, hardware.link_fill_ns + max(copy_ns - saved, latency_ns + least * ns)

    def _least_part(self, block: Block) -> int:
        """The fewest bytes that a copy of a block can have: copies are cut where granules begin."""
        granule, end = self.problem.arena.granule, block.shift + block.range.nbytes
        return min(block.range.nbytes, granule - block.shift, (end - 1) % granule + 1)


def copies_ns(problem: Problem, number: int, groups: Sequence[Group], nbytes: int) -> int:
    """Return a time that no pass of trace number `number` is shorter than, as few copies bring much.

    See "Copies that follow each other" in docs/planning.md. Granules that segments cut count as whole ones.
    """
    steps, hardware = problem.traces[number].steps, problem.hardware
    unit = problem.arena.granule if problem.arena.kind == "paged" else 1
    free = [group for group in groups if not group.kept and group.reads[number]]
    room = nbytes - sum(group.nbytes for group in groups if group.kept)
    total = sum(-(-span.nbytes // unit) * unit for group in free for span in group.spans)
    lost = total - sum(group.nbytes for group in free)
    excess = total - (room + lost) // unit * unit
    if excess <= 0:
        return 0
    shared = numpy.unique(numpy.geomspace(1, max(1, room // unit), _POINTS).astype(int)) * unit
    copied, most_shared = excess + shared, numpy.append(shared[1:] - unit, shared[-1])
    latency_ns, fill_ns, ns = hardware.link_latency_ns, hardware.link_fill_ns, 1e9 / hardware.link_bytes_per_s
    reads = numpy.sort([min(steps[k].read_ns for k in group.reads[number]) for group in free]).cumsum()
    pauses = numpy.sort([fill_ns + step.read_ns for step in steps if step.reads])
    both = numpy.ceil(2 + 2 * excess / most_shared * (1 - _DUST)).astype(int)
    idle = numpy.minimum(both // 2, numpy.searchsorted(pauses, latency_ns))
    line_ns = (copied - lost) * ns + (both - idle) * latency_ns + numpy.append(0, pauses.cumsum())[idle]
    takers = numpy.minimum(copied // most_shared, len(free))
    turns_ns = copied / most_shared * (fill_ns + latency_ns) + numpy.append(0, reads)[takers]
    turns_ns += (copied - lost) / most_shared * unit * ns
    return math.floor(float(numpy.maximum(line_ns, turns_ns).min()) * (1 - _DUST))

"""The linear program of `period.py`: its variables, its constraints, and the value of its dual."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    import scipy.sparse

APART = 4
"""The number of sets of long reads whose pauses are counted apart from those of all other reads.

The sets are: no read, the longest read, the two longest reads, and so on.
"""

_TIE = 1e-6
"""The price of copying a byte, as a share of its copying time.

Among solutions of equal period, the solver then finds one that copies the fewest bytes.
"""


@dataclass(frozen=True)
class Tier:
    """Memory that holds weights, in bytes, and the link that fills it, in nanoseconds a byte.

    Copies out take `out_ns_per_byte`, and with `duplex` no time of the copies in.

    `nbytes` is the memory of this tier and of all tiers before it, and `granule` the fewest bytes that one
    copy brings. Two fields say what fixed addresses force: at least `least_copied` bytes are copied in every
    pass, and a copy of a group brings at most `most_at_once[group]` bytes (None: as many as there are).
    """

    nbytes: int
    ns_per_byte: float
    latency_ns: int = 0
    granule: int = 1
    least_copied: int = 0
    most_at_once: Mapping[int, int] | None = None
    out_ns_per_byte: float = 0.0
    duplex: bool = False


@dataclass(frozen=True)
class Phases:
    """The trace at its checkpoints, which are the steps whose constraints count.

    Gap g is open over the checkpoints from `first[g]` to `last[g]`, the latter excluded; these numbers count
    through two passes. `lead_ns` and `read_ns` are the times in which copies may go on: between the read of
    the checkpoint before and the read of each checkpoint, and during its read.
    """

    checkpoints: numpy.ndarray
    first: numpy.ndarray
    last: numpy.ndarray
    lead_ns: numpy.ndarray
    read_ns: numpy.ndarray

    @property
    def count(self) -> int:
        return len(self.checkpoints)

    @property
    def complete(self) -> bool:
        """True if every step is a checkpoint."""
        return int(self.checkpoints[-1]) + 1 == self.count

    def covered(self, sizes: numpy.ndarray) -> numpy.ndarray:
        """The bytes of all gaps that are open over each checkpoint, if gap g has `sizes[g]` bytes."""
        change = numpy.zeros(2 * self.count + 1)
        numpy.add.at(change, self.first, sizes)
        numpy.add.at(change, self.last, -sizes)
        twice = change[:-1].cumsum()
        covered: numpy.ndarray = twice[: self.count] + twice[self.count :]
        return covered


class _Rows:
    """Constraints under construction: the entries of a sparse matrix, and its right-hand side."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.count = 0
        self._entries: list[tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]] = []
        self._limits: list[numpy.ndarray] = []

    def add(self, limits: numpy.ndarray) -> numpy.ndarray:
        """Add a row for each of these right-hand sides, and return the numbers of the new rows."""
        rows = numpy.arange(self.count, self.count + len(limits))
        self.count += len(limits)
        self._limits.append(limits)
        return rows

    def put(self, rows: numpy.ndarray, columns: numpy.ndarray, value: float | numpy.ndarray) -> None:
        """Add an entry at each pair of row and column: `value`, or the element of it at that place."""
        self._entries.append((rows, columns, numpy.broadcast_to(value, len(columns)).astype(float)))

    def limits(self) -> numpy.ndarray:
        return numpy.concatenate(self._limits)

    def matrix(self) -> scipy.sparse.csr_matrix:
        import scipy.sparse

        rows, columns, values = (numpy.concatenate(part) for part in zip(*self._entries, strict=True))
        return scipy.sparse.csr_matrix((values, (rows, columns)), shape=(self.count, self.columns))


@dataclass(frozen=True)
class _Columns:
    """The columns of a tier's variables in the linear program.

    `kept` has one for each gap, and `resident` one for each group (and unused ones up to the number of gaps).
    `spent` has APART columns, and `pause` and `largest` have one each. The others have one for each
    checkpoint.
    """

    kept: numpy.ndarray
    resident: numpy.ndarray
    over: numpy.ndarray
    early: numpy.ndarray
    lead: numpy.ndarray
    read: numpy.ndarray
    lead_pause: numpy.ndarray
    read_pause: numpy.ndarray
    idle: numpy.ndarray
    pause: numpy.ndarray
    spent: numpy.ndarray
    largest: numpy.ndarray


class LinearProgram:
    """The linear program, in units that keep its numbers near 1, and the value of its dual.

    Bytes are counted in multiples of `unit_bytes`, and times in multiples of `unit_ns` nanoseconds.
    """

    def __init__(
        self,
        sizes: numpy.ndarray,
        needed: numpy.ndarray,
        phases: Phases,
        tiers: Sequence[Tier],
        *,
        groups: numpy.ndarray,
        spilled: numpy.ndarray,
    ) -> None:
        """`groups` has the group of each gap, and `spilled` is true for gaps of what is produced."""
        self.groups, self.spilled = groups, spilled
        self.unit_bytes = float(sizes.mean())
        self.unit_ns = self.unit_bytes * max(tier.ns_per_byte for tier in tiers)
        self.needed = needed
        self.sizes, self.phases, self.tiers = sizes / self.unit_bytes, phases, tiers
        self._room = [
            numpy.minimum(tier.nbytes - needed, phases.covered(sizes)) / self.unit_bytes for tier in tiers
        ]
        self._copy = [tier.ns_per_byte * self.unit_bytes / self.unit_ns for tier in tiers]
        m = phases.count
        self._tier_columns = 2 * len(sizes) + 7 * m + 2 + APART
        columns = self._tier_columns * len(tiers) + m
        self._wait = numpy.arange(columns - m, columns)
        outs = 2 * m + len(sizes) if spilled.any() else 0
        self._outs = numpy.split(numpy.arange(columns, columns + outs), (m, 2 * m))
        self._out = tiers[0].out_ns_per_byte * self.unit_bytes / self.unit_ns
        columns += outs
        self.equals, self.at_most = _Rows(columns), _Rows(columns)
        self.cost = numpy.zeros(columns)
        self.cost[self._wait] = 1.0
        most = sum(self._copy) + (self._out if outs else 0.0)
        self.tie = _TIE * most * float(self.sizes.sum())  # the most that all copies cost
        self.longest_pause = [0.0] * len(tiers)
        self.least_shared = [0.0] * len(tiers)
        for tier in range(len(tiers)):
            self._add_tier(tier)
        if outs:
            self._add_outs()

    def close(self) -> None:
        """Build the matrices and the bounds, once all constraints have been added."""
        self.equal, self.equal_values = self.equals.matrix(), self.equals.limits()
        self.upper, self.upper_limits = self.at_most.matrix(), self.at_most.limits()
        self.bounds = self._bounds()

    def columns(self, tier: int) -> _Columns:
        """The columns of the variables of tier number `tier`."""
        g, m = len(self.sizes), self.phases.count
        edges = itertools.accumulate(
            (g, g, m, m, m, m, m, m, m, 1, APART, 1), initial=tier * self._tier_columns
        )
        return _Columns(*(numpy.arange(a, b) for a, b in itertools.pairwise(edges)))

    def dual_value(self, inequalities: numpy.ndarray, equalities: numpy.ndarray) -> float:
        """The minimum of the Lagrangian over all variables within their bounds, for these multipliers.

        By weak duality it is a lower bound of the program's optimum for any multipliers.
        """
        multipliers = numpy.minimum(inequalities, 0.0)
        reduced = self.cost - self.upper.T @ multipliers - self.equal.T @ equalities
        low, high = self.bounds.T
        least = numpy.where(reduced > 0, reduced * low, reduced * high).sum()
        return float(self.upper_limits @ multipliers + self.equal_values @ equalities + least)

    def _add_tier(self, tier: int) -> None:
        self._add_flow(tier)
        self._add_limits(tier)

    def _add_flow(self, tier: int) -> None:
        """Add the equations of the bytes kept over each checkpoint and of those that have arrived early."""
        its, equal, phases, m = self.columns(tier), self.equals, self.phases, self.phases.count
        begins, ends = phases.first % m, phases.last % m

        rows = equal.add(numpy.zeros(m))
        # The gaps that are open over the first checkpoint of the next pass.
        spans_first = (phases.first <= m) & (phases.last > m)
        equal.put(rows, its.over, 1.0)
        equal.put(rows[1:], its.over[:-1], -1.0)
        equal.put(rows[begins[begins > 0]], its.kept[begins > 0], -1.0)
        equal.put(rows[ends[ends > 0]], its.kept[ends > 0], 1.0)
        equal.put(numpy.full(spans_first.sum(), rows[0]), its.kept[spans_first], -1.0)

        rows = equal.add(-numpy.bincount(ends, weights=self.sizes, minlength=m))
        equal.put(rows, its.early, 1.0)
        equal.put(rows, numpy.roll(its.early, 1), -1.0)
        equal.put(rows, its.lead, -1.0)
        equal.put(rows, its.read, -1.0)
        equal.put(rows[ends], its.kept, -1.0)

    def _add_limits(self, tier: int) -> None:
        """Add the inequalities that memory and link impose."""
        its, upper, phases = self.columns(tier), self.at_most, self.phases
        rows = upper.add(numpy.zeros(phases.count))
        upper.put(rows, its.read, 1.0)
        upper.put(rows, its.early, -1.0)
        rows = upper.add(self._room[tier])
        upper.put(rows, its.over, 1.0)
        upper.put(rows, its.early, 1.0)
        lead, read, _ = self._outs
        shared = len(lead) > 0 and not tier and not self.tiers[0].duplex
        rows = upper.add(phases.lead_ns / self.unit_ns)
        if shared:
            upper.put(rows, lead, self._out)
        upper.put(rows, its.lead, self._copy[tier])
        upper.put(rows, its.lead_pause, 1.0)
        upper.put(rows, self._wait, -1.0)
        rows = upper.add(phases.read_ns / self.unit_ns)
        if shared:
            upper.put(rows, read, self._out)
        upper.put(rows, its.read, self._copy[tier])
        upper.put(rows, its.read_pause, 1.0)
        upper.put(rows, its.idle, 1.0)
        self.cost[its.lead] = self.cost[its.read] = _TIE * self._copy[tier]
        least = self.tiers[tier].least_copied / self.unit_bytes
        if least:
            rows = upper.add(numpy.array([float(self.sizes.sum()) - least]))
            upper.put(numpy.zeros(len(its.kept), dtype=int) + rows, its.kept, 1.0)
        if tier:
            rows = upper.add(numpy.zeros(len(its.kept)))
            upper.put(rows, self.columns(tier - 1).kept, 1.0)
            upper.put(rows, its.kept, -1.0)

    def _add_outs(self) -> None:
        """Add the copies out: what leaves over any gap of a produced group has been copied out once."""
        lead, read, spilled = self._outs
        upper, its, phases = self.at_most, self.columns(0), self.phases
        mine = numpy.nonzero(self.spilled)[0]
        _, number = numpy.unique(self.groups[mine], return_inverse=True)
        rows = upper.add(-self.sizes[mine])
        upper.put(rows, its.kept[mine], -1.0)
        upper.put(rows, spilled[number], -1.0)
        row = upper.add(numpy.zeros(1))
        upper.put(numpy.zeros(number.max() + 1, dtype=int) + row, spilled[: number.max() + 1], 1.0)
        for copied in (lead, read):
            upper.put(numpy.zeros(len(copied), dtype=int) + row, copied, -1.0)
        self.cost[lead] = self.cost[read] = _TIE * self._out
        if self.tiers[0].duplex:
            rows = upper.add(phases.lead_ns / self.unit_ns)
            upper.put(rows, lead, self._out)
            upper.put(rows, self._wait, -1.0)
            rows = upper.add(phases.read_ns / self.unit_ns)
            upper.put(rows, read, self._out)

    def _bounds(self) -> numpy.ndarray:
        """Bounds of all variables within which an optimum lies: no step waits longer than all copies take."""
        total = float(self.sizes.sum())
        bounds = numpy.zeros((self.at_most.columns, 2))
        bounds[:, 1] = total
        waits = 0.0
        for tier, copy in enumerate(self._copy):
            its = self.columns(tier)
            longest = self.longest_pause[tier]
            bounds[its.kept, 1] = self.sizes
            bounds[its.read, 1] = self.phases.read_ns / self.unit_ns / copy
            bounds[its.idle, 1] = self.phases.read_ns / self.unit_ns
            bounds[its.largest] = self.least_shared[tier], self.tiers[tier].nbytes / self.unit_bytes
            for pauses in (its.lead_pause, its.read_pause, its.pause):
                bounds[pauses, 1] = longest
            bounds[its.spent, 1] = longest + float(self.phases.read_ns.sum()) / self.unit_ns
            waits += total * copy + longest
        if self._outs[0].size:
            waits += total * self._out
            bounds[self._outs[1], 1] = self.phases.read_ns / self.unit_ns / self._out
        bounds[self._wait, 1] = waits
        return bounds

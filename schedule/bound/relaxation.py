"""The bound on every plan's time: a linear program over residency, and the waits that no plan avoids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy

from penstock.schedule.bound.gaps import FixedPlaces, Gap, copies_ns, gaps_of, needed_bytes
from penstock.schedule.facts.model import Hardware, Range, Trace, Wrap
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.spans import Group, Pieces, merged

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
    copy brings.
    """

    nbytes: int
    ns_per_byte: float
    latency_ns: int = 0
    granule: int = 1
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
        self.room = [
            numpy.minimum(tier.nbytes - needed, phases.covered(sizes)) / self.unit_bytes for tier in tiers
        ]
        self._copy = [tier.ns_per_byte * self.unit_bytes / self.unit_ns for tier in tiers]
        m = phases.count
        self._tier_columns = 2 * len(sizes) + 7 * m + 2 + APART
        columns = self._tier_columns * len(tiers) + m
        self.wait = numpy.arange(columns - m, columns)
        outs = 2 * m + len(sizes) if spilled.any() else 0
        self._outs = numpy.split(numpy.arange(columns, columns + outs), (m, 2 * m))
        self._out = tiers[0].out_ns_per_byte * self.unit_bytes / self.unit_ns
        columns += outs
        self.equals, self.at_most = _Rows(columns), _Rows(columns)
        self.cost = numpy.zeros(columns)
        self.cost[self.wait] = 1.0
        most = sum(self._copy) + (self._out if outs else 0.0)
        self.tie = _TIE * most * float(self.sizes.sum())  # the most that all copies cost
        self.longest_pause, self.longest_wait = [0.0] * len(tiers), 0.0
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
        """The least Lagrangian for these multipliers, by weak duality a lower bound of the optimum."""
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
        rows = upper.add(self.room[tier])
        upper.put(rows, its.over, 1.0)
        upper.put(rows, its.early, 1.0)
        lead, read, _ = self._outs
        shared = len(lead) > 0 and not tier and not self.tiers[0].duplex
        rows = upper.add(phases.lead_ns / self.unit_ns)
        if shared:
            upper.put(rows, lead, self._out)
        upper.put(rows, its.lead, self._copy[tier])
        upper.put(rows, its.lead_pause, 1.0)
        upper.put(rows, self.wait, -1.0)
        rows = upper.add(phases.read_ns / self.unit_ns)
        if shared:
            upper.put(rows, read, self._out)
        upper.put(rows, its.read, self._copy[tier])
        upper.put(rows, its.read_pause, 1.0)
        upper.put(rows, its.idle, 1.0)
        self.cost[its.lead] = self.cost[its.read] = _TIE * self._copy[tier]
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
            upper.put(rows, self.wait, -1.0)
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
        bounds[self.wait, 1] = waits + self.longest_wait
        return bounds


_DUST = 1e-9
"""The largest difference, as a share, that floating point leaves between sums that should be equal."""

_TANGENTS = 24
_SMALLEST_COPY = 1e-5
"""How many tangents bound the number of copies, and the smallest z with a tangent, as a share of memory."""

_POINTS_AN_OCTAVE = 24
_LARGE = 8
"""The points of the curve in each octave of z; and the multiple of the mean bytes of a step from which on a
step counts as one that reads much more than others.
"""


def add_latency(program: LinearProgram, groups: numpy.ndarray, always: int) -> None:
    """Add the pauses to a program; `groups` are those of gaps, `always` the bytes that never leave."""
    _, first, group = numpy.unique(groups, return_index=True, return_inverse=True)
    sizes = program.sizes[first]
    gaps = numpy.bincount(group)
    produced_bytes = program.spilled[first]  # of the produced bytes, none has to be copied
    for tier, shape in enumerate(program.tiers):
        its = program.columns(tier)
        room = (shape.nbytes - always) / program.unit_bytes
        excess = float(sizes[~produced_bytes].sum()) - room
        resident = its.resident[: len(sizes)]
        # Bytes of a group that no gap copies again are never dropped.
        rows = program.at_most.add((gaps - 1 + produced_bytes) * sizes)
        program.at_most.put(rows[group], its.kept, 1.0)
        program.at_most.put(rows, resident, -1.0)
        rows = program.equals.add(numpy.array([room]))
        program.equals.put(rows, its.largest, 1.0)
        program.equals.put(numpy.zeros(len(sizes), dtype=int) + rows, resident, 1.0)
        _add_copies(program, tier, room)
        if room > 0 and excess > _DUST * room:
            program.least_shared[tier] = shape.granule / program.unit_bytes
            if shape.latency_ns:
                _add_fewest(program, tier, room, excess)
            if shape.latency_ns and not tier and program.phases.complete and not produced_bytes.any():
                _add_pairs(program, group, room, excess)


def _add_copies(program: LinearProgram, tier: int, room: float) -> None:
    """Constrain the sum of all pauses: at least one latency for each copy, none larger than the memory."""
    its, upper, m = program.columns(tier), program.at_most, program.phases.count
    latency = program.tiers[tier].latency_ns / program.unit_ns
    rows = upper.add(numpy.zeros(2))
    upper.put(rows[:1], its.pause, 1.0)
    for pauses in (its.lead_pause, its.read_pause):
        upper.put(numpy.zeros(m, dtype=int) + rows[0], pauses, -1.0)
    upper.put(rows[1:], its.pause, -1.0)
    for copied in (its.lead, its.read):
        upper.put(numpy.zeros(m, dtype=int) + rows[1], copied, latency / max(room, 1e-9))
    program.longest_pause[tier] = latency * (1 + float(program.sizes.sum()) / max(room, 1e-9))


def _add_fewest(program: LinearProgram, tier: int, room: float, excess: float) -> None:
    """Constrain the number of copies to at least (D + z) / z, a convex function of z, by its tangents."""
    its, upper = program.columns(tier), program.at_most
    latency = program.tiers[tier].latency_ns / program.unit_ns
    at = numpy.geomspace(room * _SMALLEST_COPY, room, _TANGENTS)
    slope = latency * excess / at
    rows = upper.add(-(at / excess + 2.0))
    upper.put(rows, numpy.repeat(its.largest, _TANGENTS), -1.0 / at)
    upper.put(rows, numpy.repeat(its.pause, _TANGENTS), -1.0 / slope)
    program.longest_pause[tier] = float(latency * (1 + 2 * excess / at[0]) * 1.01)


def _add_pairs(program: LinearProgram, group: numpy.ndarray, room: float, excess: float) -> None:
    """Add that neighbouring copies share the memory unless the link idles; `group` is that of each gap."""
    its, upper, phases, shape = program.columns(0), program.at_most, program.phases, program.tiers[0]
    read = phases.read_ns / program.unit_ns
    ends = phases.last % phases.count
    by_length = numpy.lexsort((read[ends], group))
    longest = by_length[numpy.searchsorted(group[by_length], numpy.arange(group.max() + 1), side="right") - 1]
    at, nbytes = ends[longest], program.sizes[longest]
    dropped = numpy.bincount(at, weights=nbytes, minlength=phases.count)
    curve = _PauseCurve(excess, shape.latency_ns / program.unit_ns, dropped, read)
    counted = numpy.where(curve.large, 0.0, read)
    rows = upper.add(counted)  # bytes that are never dropped are not dropped during a read either
    upper.put(rows, its.idle, 1.0)
    upper.put(rows[at], its.resident[: len(at)], (counted / numpy.maximum(dropped, _DUST))[at])

    smallest = min(room, max(shape.granule / program.unit_bytes, room * _SMALLEST_COPY))
    by_length = numpy.argsort(-read, kind="stable")
    for apart, spent in enumerate(its.spent):
        rows = upper.add(numpy.zeros(1))
        upper.put(rows, numpy.array([spent]), 1.0)
        for counted in (its.lead_pause, numpy.delete(its.read_pause, by_length[:apart]), its.idle):
            upper.put(numpy.zeros(len(counted), dtype=int) + rows, counted, -1.0)
        slopes, values = curve.lines(smallest, room, apart=apart)
        rows = upper.add(-values)
        upper.put(rows, numpy.repeat(its.largest, len(rows)), slopes)
        upper.put(rows, numpy.repeat(spent, len(rows)), -1.0)
        program.longest_pause[0] = max(program.longest_pause[0], 1.01 * float(values.max()))


def _add_fixed(program: LinearProgram, fixed: FixedPlaces) -> None:
    """Add what fixed addresses force: bytes that are copied, and a latency for each block that is copied."""
    its, upper, gaps = program.columns(0), program.at_most, len(program.sizes)
    rows = upper.add(numpy.array([float(program.sizes.sum()) - fixed.least_copied / program.unit_bytes]))
    upper.put(numpy.zeros(gaps, dtype=int) + rows, its.kept, 1.0)
    latency = fixed.problem.hardware.link_latency_ns / program.unit_ns
    rows = upper.add(numpy.array([-latency * gaps]))
    upper.put(rows, its.pause, -1.0)
    upper.put(numpy.zeros(gaps, dtype=int) + rows, its.kept, -latency / program.sizes)
    program.longest_pause[0] = max(program.longest_pause[0], 1.01 * latency * gaps)


def _add_windows(program: LinearProgram, windows: Iterable[tuple[int, int, float]]) -> None:
    """Add a row over the waits for each window that neither compute nor windows within it imply."""
    phases, n = program.phases, program.phases.count
    least_ns: dict[int, numpy.ndarray] = {}
    for j, k, ns in windows:
        least_ns.setdefault(k - j, numpy.zeros(n))[j] = ns
        program.longest_wait = max(program.longest_wait, ns / program.unit_ns)
    steps, useful, compute_ns = numpy.arange(n), [1], -phases.read_ns
    ways = [compute_ns]
    """By the number of steps, the least time from the end of each step to the read that many steps later."""
    most_rows = program.at_most.count + _WINDOWS
    for span in range(1, max(least_ns, default=0) + 1):
        if program.at_most.count > most_rows:
            break
        ends = (steps + span) % n
        compute_ns = compute_ns + phases.read_ns[ends - 1] + phases.lead_ns[ends]
        parts = ((first, (steps + first) % n) for first in useful if first < span)
        implied = [ways[first] + phases.read_ns[k] + ways[span - first][k] for first, k in parts]
        ways.append(numpy.maximum.reduce([compute_ns, *implied]))
        least = least_ns.get(span, ways[span])
        chosen = numpy.nonzero(least > ways[span] * _GAIN)[0]
        if len(chosen):
            useful.append(span)
            rows = program.at_most.add((compute_ns - least)[chosen] / program.unit_ns)
            for offset in range(1, span + 1):
                program.at_most.put(rows, program.wait[(chosen + offset) % n], -1.0)
            ways[span] = numpy.maximum(ways[span], least)


def _add_arrivals(program: LinearProgram, hardware: Hardware) -> None:
    """Add that the bytes of a copy flow late: of those that come between two steps, many have room before.

    See "Arrivals" in docs/planning.md. For each first step, the nearest last ones count.
    """
    its, phases, n = program.columns(0), program.phases, program.phases.count
    copy_ns = program.tiers[0].ns_per_byte * program.unit_bytes
    starts_ns = hardware.link_fill_ns + hardware.link_latency_ns
    first, last = (numpy.concatenate((edge, edge - n)) for edge in (phases.first, phases.last))
    for j, room in enumerate(program.room[0]):
        steps = numpy.arange(j + 1, j + n + 1) % n
        passed_ns = (phases.lead_ns[steps] + phases.read_ns[steps]).cumsum() - phases.read_ns[steps]
        over = (first <= j) & (j < last)
        due = numpy.bincount(last[over] - j - 1, numpy.tile(program.sizes, 2)[over], n).cumsum()
        late = numpy.nonzero((passed_ns >= starts_ns) | (due > room * (1 + _DUST)))[0]
        for k in late[:_NEAREST].tolist():
            row = program.at_most.add(numpy.array([room + (passed_ns[k] - starts_ns) / copy_ns]))
            between = steps[: k + 1]
            program.at_most.put(row, its.over[[j]], 1.0)
            program.at_most.put(row, its.early[[j]], 1.0)
            for columns, value in (
                (its.lead[between], 1.0),
                (its.read[between[:-1]], 1.0),
                (program.wait[between], -program.unit_ns / copy_ns),
            ):
                program.at_most.put(numpy.repeat(row, len(columns)), columns, value)
    program.longest_wait += n * starts_ns / program.unit_ns


class _PauseCurve:
    """The right-hand side of the second inequality above as a function of z, for given reads."""

    def __init__(self, excess: float, latency: float, nbytes: numpy.ndarray, read: numpy.ndarray) -> None:
        self.large = nbytes > _LARGE * nbytes.mean()
        nbytes = numpy.where(self.large, 0.0, nbytes)
        nbytes, read = nbytes[nbytes > 0], read[nbytes > 0]
        with numpy.errstate(divide="ignore"):
            density = nbytes / read
        order = numpy.argsort(-density, kind="stable")
        self._excess, self._latency, self._density = excess, latency, density[order]
        self._nbytes = numpy.concatenate(([0.0], nbytes[order].cumsum()))
        self._read = numpy.concatenate(([0.0], read[order].cumsum()))

    def lines(
        self, smallest: float, largest: float, *, apart: int = 0
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The slopes, and the values at z = 0, of lines that lie nowhere above the curve up to z = `largest`.

        For z below `smallest` they lie below the least value that the curve can have there. The copies that
        begin within `apart` reads are left out.
        """
        octaves = max(1.0, float(numpy.log2(largest / smallest)))
        grid = numpy.geomspace(smallest, largest, int(octaves * _POINTS_AN_OCTAVE) + 2)
        lost = (4 * apart + int(self.large.sum())) * self._latency
        values = self._least_between(grid[:-1], grid[1:]) - lost
        below = self._latency * (1 + self._excess / smallest) - lost
        points = [(0.0, below)]
        for z, following, value in zip(grid[:-1].tolist(), grid[1:].tolist(), values.tolist(), strict=True):
            points += [(z, value), (following, value)]
        x, y = numpy.array(_lower_hull(points)).T
        slopes = numpy.diff(y) / numpy.diff(x)
        return slopes, y[:-1] - slopes * x[:-1]

    def _least_between(self, low: numpy.ndarray, high: numpy.ndarray) -> numpy.ndarray:
        """For each pair of `low` and `high`, a value that the curve does not go below between them."""
        gaining = numpy.searchsorted(-self._density, -low / self._latency)
        bytes_dropped = numpy.minimum(self._nbytes[gaining], self._excess + high)
        idle = numpy.interp(bytes_dropped, self._nbytes, self._read)
        gain = self._latency * bytes_dropped / low - idle
        least: numpy.ndarray = 2 * self._latency * (1 + self._excess / high) - gain
        return least


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull, by Andrew's monotone chain; among points of equal x the lowest counts."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and hull[-1][0] == x:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


MOST_STEPS = 4000
"""The most steps whose constraints count. Leaving out those of other steps can only lower the bound."""

SECONDS = 60.0
"""The most seconds that the solver may take."""


_CUT = 8
"""The most spans that are no whole granules for which all sums of their sizes are looked at."""

_FEW_GRANULES, _NEARLY_WHOLE = 12, 0.01
"""The most granules of refilled memory that are rounded to a whole number, and the largest rounding error."""

_NEAREST = 3
"""The number of last steps for each first one; more of them did not raise the bound of any drawn problem."""

_GAIN, _WINDOWS = 1.003, 800
"""A window counts if it is so many times as long as compute and shorter windows make it; and the most windows
that count, the shortest first. With all 17,000 of a decoder of 194 steps the solver took 2.2 s instead of
0.1 s, for the same bound.
"""

_MARGIN = 1e-9
"""The share by which the reported bound stays below the computed one, for errors of floating point."""


@dataclass(frozen=True)
class Relaxation:
    """The solution of the relaxation: a bound in ns, and the bytes that the device keeps over each gap.

    `shared_bytes` is the memory that is refilled during a pass; no copy is larger.
    """

    bound_ns: int
    kept: tuple[float, ...]
    gaps: tuple[Gap, ...]
    groups: tuple[Group, ...]
    shared_bytes: float


def tier_of(nbytes: int, hardware: Hardware, granule: int = 1) -> Tier:
    """The device's tier with `nbytes` of memory, into which whole granules are copied."""
    out = 1e9 / (hardware.write_bytes_per_s or hardware.link_bytes_per_s)
    tier = Tier(nbytes, 1e9 / hardware.link_bytes_per_s, hardware.link_latency_ns, granule)
    return replace(tier, out_ns_per_byte=out, duplex=hardware.duplex)


def usable_bytes(groups: Sequence[Group], granule: int, nbytes: int) -> int:
    """The most of `nbytes` bytes that spans can fill: whole granules, and the few spans cut by segments."""
    cut = [span.nbytes % granule for group in groups for span in group.spans if span.nbytes % granule]
    if len(cut) > _CUT:
        return nbytes
    sums = {sum(some) for count in range(len(cut) + 1) for some in itertools.combinations(cut, count)}
    return max((t + (nbytes - t) // granule * granule for t in sums if t <= nbytes), default=nbytes)


def relax(
    problem: Problem, pieces: Pieces, tiers: Sequence[Tier], number: int = 0, *, strong: bool = False
) -> Relaxation | None:
    """Solve the relaxation of one trace; None if the solver fails. The device's tier comes first.

    A `strong` one knows when copies may start and how they follow each other, and takes longer to solve.
    """
    groups, trace = pieces.copied, problem.traces[number]
    granule, nbytes = tiers[0].granule, tiers[0].nbytes
    gaps = gaps_of(groups, trace, number=number)
    if not gaps:
        return Relaxation(trace.compute_ns, (), (), groups, 0.0)
    sizes = numpy.array([groups[gap.group].nbytes for gap in gaps], dtype=float)
    phases = _phases(gaps, trace, problem.wrap)
    needed = needed_bytes(groups, len(trace.steps), number=number)
    shares = numpy.array([gap.group for gap in gaps])
    always = sum(group.nbytes for group in groups if group.kept)
    spilled = numpy.array([groups[gap.group].produced for gap in gaps])
    read = numpy.array(needed, dtype=float)[phases.checkpoints]
    if len(tiers) == 1 and granule > 1:
        # What a step does not read fills whole granules, as copies on their way do.
        for place, k in enumerate(phases.checkpoints.tolist()):
            unread = [group for group in groups if k not in group.reads[number]]
            read[place] = nbytes - usable_bytes(unread, granule, nbytes - needed[k])
    program = LinearProgram(sizes, read, phases, tiers, groups=shares, spilled=spilled)
    add_latency(program, shares, always)
    turns_ns = 0
    if problem.arena.kind == "contiguous":
        blocks = [block for block in pieces.blocks if block.kept or block.reads[number]]
        weights = [block for block in blocks if not block.produced]
        fixed = FixedPlaces(problem, number, weights, nbytes)
        _add_fixed(program, fixed)
        if len(weights) == len(blocks):
            turns_ns = fixed.turns_ns()
            _add_windows(program, fixed.windows_ns(needed) if phases.complete else ())
    if strong and not any(group.produced for group in groups):
        turns_ns = max(turns_ns, copies_ns(problem, number, groups, nbytes))
        if phases.complete:
            _add_arrivals(program, problem.hardware)
    program.close()
    solved = _solve_in_granules(program, granule)
    if solved is None:
        return None
    dual, solution = solved
    wait_ns = max(0.0, dual * program.unit_ns * (1 - _MARGIN) - trace.compute_ns * _MARGIN)
    kept_bytes = solution[program.columns(0).kept] * program.unit_bytes
    shared = float(solution[program.columns(0).largest[0]]) * program.unit_bytes
    launching = problem.hardware.host_step_ns * _fewest_streamed(groups, trace, nbytes, number)
    bound = max(trace.compute_ns + math.floor(wait_ns), launching, turns_ns)
    return Relaxation(bound, tuple(kept_bytes.tolist()), gaps, groups, shared)


def _fewest_streamed(groups: Sequence[Group], trace: Trace, nbytes: int, number: int) -> int:
    """The fewest steps of trace number `number` that can read bytes which do not always stay in `nbytes`."""
    weights = [group for group in groups if not group.produced and (group.kept or group.reads[number])]
    always = sum(group.nbytes for group in weights if group.kept)
    excess = sum(group.nbytes for group in weights) - nbytes
    needed = needed_bytes(weights, len(trace.steps), number=number)
    read = itertools.accumulate(
        sorted((nbytes_at_step - always for nbytes_at_step in needed), reverse=True), initial=0
    )
    return sum(total < excess for total in read) + (excess > 0)


def _solve_in_granules(program: LinearProgram, granule: int) -> tuple[float, numpy.ndarray] | None:
    """The value of the dual, and the variables; None if the solver fails.

    The memory that is refilled is a whole number of granules. Where the solution has a small number that is
    not whole, the program is solved again with at most the number below and with at least the number above,
    and the better of the two solutions counts.
    """
    column, whole = program.columns(0).largest[0], granule / program.unit_bytes
    solved = _solve(program)
    count = solved[1][column] / whole if solved else 0.0
    if count > _FEW_GRANULES or abs(count - round(count)) < _NEARLY_WHOLE:
        return solved
    least, most = program.bounds[column]
    sides = []
    for bounds in ((least, math.floor(count) * whole), (math.ceil(count) * whole, most)):
        program.bounds[column] = bounds
        sides.append(_solve(program) if bounds[0] <= bounds[1] else (math.inf, program.cost))
    solved_sides = [side for side in sides if side]
    return min(solved_sides, key=lambda side: side[0]) if len(solved_sides) == len(sides) else solved


def _solve(program: LinearProgram) -> tuple[float, numpy.ndarray] | None:
    """The value of the dual, and the variables; None if the solver fails."""
    from scipy.optimize import linprog

    solution = linprog(
        program.cost,
        A_ub=program.upper,
        b_ub=program.upper_limits,
        A_eq=program.equal,
        b_eq=program.equal_values,
        bounds=program.bounds,
        method="highs",
        options={"time_limit": SECONDS},
    )
    if solution.status != 0:
        return None
    dual = program.dual_value(solution.ineqlin.marginals, solution.eqlin.marginals) - program.tie
    return dual, solution.x


def _phases(gaps: Sequence[Gap], trace: Trace, wrap: Wrap) -> Phases:
    """The checkpoints of a trace, spread evenly over its steps, and its gaps and times between them."""
    n = len(trace.steps)
    checkpoints = numpy.unique(numpy.linspace(0, n - 1, min(n, MOST_STEPS)).round().astype(int))
    twice = numpy.concatenate((checkpoints, checkpoints + n))
    first = numpy.searchsorted(twice, [gap.opens for gap in gaps], side="right")
    last = numpy.searchsorted(twice, [gap.closes for gap in gaps])
    lead = numpy.array([step.lead_ns for step in trace.steps], dtype=float)
    read = numpy.array([step.read_ns for step in trace.steps], dtype=float)
    lead[0] += trace.tail_ns + (trace.gap_ns if wrap == "overlap" else 0)
    ended = (lead + read).cumsum()
    before = ended[checkpoints] - read[checkpoints]
    since = numpy.concatenate(([ended[checkpoints[-1]] - ended[-1]], ended[checkpoints[:-1]]))
    return Phases(checkpoints, first, last, before - since, read[checkpoints])


def pass_ns(problem: Problem, trace: Trace, room: int) -> int:
    """Nanoseconds of a pass of a method of which `room` bytes stay: those of compute, or of copies.

    No plan takes less.
    """
    copied = copied_bytes(problem, trace, room)
    return max(trace.compute_ns, problem.hardware.copy_ns(copied) if copied else 0)


def copied_bytes(problem: Problem, trace: Trace, room: int) -> int:
    """The least bytes that a pass copies where an arena has `room` bytes.

    Granules stay and come as a whole, unless everything that is read whole fits, and none are needed.
    """
    if room >= problem.streamed_bytes:
        return 0
    read = {s for step in trace.steps for s in step.reads if problem.storages[s].kind == "streamable"}
    arena = problem.arena
    if arena.kind == "contiguous":
        return max(0, sum(problem.storages[s].nbytes for s in read) - max(0, room))
    places = (Range(arena.layout[s], arena.layout[s] + problem.storages[s].nbytes) for s in read)
    granules = merged(
        Range(place.start // arena.granule * arena.granule, -(-place.stop // arena.granule) * arena.granule)
        for place in places
    )
    overlaps = (min(a.stop, b.stop) - max(a.start, b.start) for a in granules for b in arena.segments)
    nbytes = sum(overlap for overlap in overlaps if overlap > 0)
    cut = sum(piece.nbytes for piece in granules) - nbytes  # by which some are smaller
    stays = min(room, (room + cut) // arena.granule * arena.granule)
    return max(0, nbytes - max(0, stays))

"""Latency in the relaxation: a lower bound on the time for which the link pauses in a pass.

Let z be the bytes of memory that are refilled during a pass (`largest`, since no copy is larger), and let D
be the bytes that do not fit into memory. A pass copies at least D + z bytes, in at least (D + z) / z copies,
each of which pauses the link for one latency. If the link never idles, there are twice as many copies:

Copies follow one another on the link. When a copy begins, its memory is free, and all bytes of the copy
before it are still there, except those that were read and dropped since they arrived. So two neighbouring
copies together are no larger than z plus the bytes dropped between them. Summed around the pass, this gives

    2 (D + z) <= n z + dropped,

for n copies. Bytes that are dropped between two copies were read there from beginning to end, while the link
was idle. Let l be the latency, and let y[k] be the share of the read of step k (which takes r[k] and reads
s[k] bytes) for which the link is idle. Then

    l n + sum y[k] r[k]  >=  2 l (D + z) / z - max over y of sum y[k] (l s[k] / z - r[k]),

where sum y[k] s[k] <= D + z. The right-hand side is a convex curve in z (`_PauseCurve`). Bytes that several
steps read are dropped after the last of these reads, so they count only at the longest of the reads; if they
are copied more than once, each further copy adds twice as many bytes on the left as are dropped after it. The
maximum takes the steps with most bytes a nanosecond first: this is a knapsack whose items may be divided.
Also, no more than z bytes are dropped at once: steps that read much more than others (an embedding) are left
out of both sums, and cost one latency each.

Some inequalities leave out the copies that begin within a few long reads. Two copies that begin within one
read never replace each other, so all copies of that read together are no larger than z. Leaving them out
takes z from the bytes that are copied. It also separates two neighbours: the last copy before the read and
the first one after it, of at most z each, then have one neighbour only. So n is less by at most 3 for each
read left out, and one copy that begins before the read may pause within it.
"""

from __future__ import annotations

import numpy

from penstock.schedule.bound.relaxation import LinearProgram

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
    """Add the variables and constraints of the pauses to a program.

    `groups` has the group of each gap, and `always` is the bytes of the groups that never leave.
    """
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
        if shape.most_at_once:
            _add_single(program, tier, groups)


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
    """Add the constraint that neighbouring copies share the memory unless the link idles between them.

    `group` has the group of each gap. The bytes of a group count at the longest of its reads.
    """
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


def _add_single(program: LinearProgram, tier: int, groups: numpy.ndarray) -> None:
    """Add the pauses of copies that bring bytes of one group only, at most `most_at_once` of them each."""
    its, upper, shape = program.columns(tier), program.at_most, program.tiers[tier]
    known = shape.most_at_once or {}
    most = numpy.array([known[g] for g in groups.tolist()]) / program.unit_bytes
    each = shape.latency_ns / program.unit_ns / most
    pauses = float(each @ program.sizes)
    rows = upper.add(numpy.array([-pauses]))
    upper.put(rows, its.pause, -1.0)
    upper.put(numpy.zeros(len(most), dtype=int) + rows, its.kept, -each)
    program.longest_pause[tier] = max(program.longest_pause[tier], 1.01 * pauses)


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

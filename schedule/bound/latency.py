"""Latency in the relaxation: the pauses of the link that a pass has at least.

A pause takes time of the link in some phase. How many there are depends on z, the memory that does not hold
the same bytes all the time (`largest`: no copy is larger). With D the bytes that do not fit, a pass copies
D + z at least, in (D + z) / z copies, and in twice as many where the link never idles (`pauses.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule.bound.pauses import PauseCurve
from penstock.schedule.bound.relaxation import LinearProgram

if TYPE_CHECKING:
    import numpy

_DUST = 1e-9
"""Of sums that should be equal, floating point leaves a difference of this share at most."""

_TANGENTS = 24
_SMALLEST_COPY = 1e-5
"""Tangents of the number of copies, and the smallest copy, as a share of memory, that has one."""


def add_latency(program: LinearProgram, groups: numpy.ndarray, always: int) -> None:
    """Adds the pauses; `groups` has the group of each gap, `always` the bytes that never leave."""
    import numpy

    _, first, group = numpy.unique(groups, return_index=True, return_inverse=True)
    sizes = program.sizes[first]
    gaps = numpy.bincount(group)
    for tier, shape in enumerate(program.tiers):
        its = program.columns(tier)
        room = (shape.nbytes - always) / program.unit_bytes
        excess = float(sizes.sum()) - room
        resident = its.resident[: len(sizes)]
        rows = program.at_most.add((gaps - 1) * sizes)  # never dropped: all but what some gap copies again
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
            if shape.latency_ns and not tier and program.phases.complete:
                _add_pairs(program, group, room, excess)
        if shape.most_at_once:
            _add_single(program, tier, groups)


def _add_copies(program: LinearProgram, tier: int, room: float) -> None:
    """The pauses sum up to a latency for each copy, none of which is larger than the memory."""
    import numpy

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
    """At least (D + z) / z copies, a convex function of z, by its tangents."""
    import numpy

    its, upper = program.columns(tier), program.at_most
    latency = program.tiers[tier].latency_ns / program.unit_ns
    at = numpy.geomspace(room * _SMALLEST_COPY, room, _TANGENTS)
    slope = latency * excess / at
    rows = upper.add(-(at / excess + 2.0))
    upper.put(rows, numpy.repeat(its.largest, _TANGENTS), -1.0 / at)
    upper.put(rows, numpy.repeat(its.pause, _TANGENTS), -1.0 / slope)
    program.longest_pause[tier] = float(latency * (1 + 2 * excess / at[0]) * 1.01)


def _add_pairs(program: LinearProgram, group: numpy.ndarray, room: float, excess: float) -> None:
    """Copies that follow one another share the memory, unless the link idles between them.

    `group` has the group of each gap. Its bytes count at the longest of its reads.
    """
    import numpy

    its, upper, phases, shape = program.columns(0), program.at_most, program.phases, program.tiers[0]
    read = phases.read_ns / program.unit_ns
    ends = phases.last % phases.count
    by_length = numpy.lexsort((read[ends], group))
    longest = by_length[numpy.searchsorted(group[by_length], numpy.arange(group.max() + 1), side="right") - 1]
    at, nbytes = ends[longest], program.sizes[longest]
    dropped = numpy.bincount(at, weights=nbytes, minlength=phases.count)
    curve = PauseCurve(excess, shape.latency_ns / program.unit_ns, dropped, read)
    counted = numpy.where(curve.large, 0.0, read)
    rows = upper.add(counted)  # what is never dropped is not dropped then
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
    """A copy brings bytes of one group, and of those no more than is known."""
    import numpy

    its, upper, shape = program.columns(tier), program.at_most, program.tiers[tier]
    known = shape.most_at_once or {}
    most = numpy.array([known[g] for g in groups.tolist()]) / program.unit_bytes
    each = shape.latency_ns / program.unit_ns / most
    pauses = float(each @ program.sizes)
    rows = upper.add(numpy.array([-pauses]))
    upper.put(rows, its.pause, -1.0)
    upper.put(numpy.zeros(len(most), dtype=int) + rows, its.kept, -each)
    program.longest_pause[tier] = max(program.longest_pause[tier], 1.01 * pauses)

"""Latency in the relaxation: the pauses of the link that a pass has at least.

A pause takes time of the link in some phase. How many there are depends on z, the memory that does not hold
the same bytes all the time (`largest`: no copy is larger). With D the bytes that do not fit, a pass copies
D + z at least, in (D + z) / z copies, and in twice as many where the link never idles (`pauses.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule.bound.pauses import PauseCurve
from penstock.schedule.bound.relaxation import Problem

if TYPE_CHECKING:
    import numpy

_DUST = 1e-9
"""Of sums that should be equal, floating point leaves a difference of this share at most."""

_TANGENTS = 24
_SMALLEST_COPY = 1e-5
"""Tangents of the number of copies, and the smallest copy, as a share of memory, that has one."""


def add_latency(problem: Problem, groups: numpy.ndarray, always: int) -> None:
    """Adds the pauses; `groups` has the group of each gap, `always` the bytes that never leave."""
    import numpy

    _, first, group = numpy.unique(groups, return_index=True, return_inverse=True)
    sizes = problem.sizes[first]
    gaps = numpy.bincount(group)
    for tier, shape in enumerate(problem.tiers):
        its = problem.columns(tier)
        room = (shape.nbytes - always) / problem.unit_bytes
        excess = float(sizes.sum()) - room
        resident = its.resident[: len(sizes)]
        rows = problem.at_most.add((gaps - 1) * sizes)  # never dropped: all but what some gap copies again
        problem.at_most.put(rows[group], its.kept, 1.0)
        problem.at_most.put(rows, resident, -1.0)
        rows = problem.equals.add(numpy.array([room]))
        problem.equals.put(rows, its.largest, 1.0)
        problem.equals.put(numpy.zeros(len(sizes), dtype=int) + rows, resident, 1.0)
        _add_copies(problem, tier, room)
        if room > 0 and excess > _DUST * room:
            problem.least_shared[tier] = shape.granule / problem.unit_bytes
            if shape.latency_ns:
                _add_fewest(problem, tier, room, excess)
            if shape.latency_ns and not tier and problem.phases.complete:
                _add_pairs(problem, group, room, excess)
        if shape.most_at_once:
            _add_single(problem, tier, groups)


def _add_copies(problem: Problem, tier: int, room: float) -> None:
    """The pauses sum up to a latency for each copy, none of which is larger than the memory."""
    import numpy

    its, upper, m = problem.columns(tier), problem.at_most, problem.phases.count
    latency = problem.tiers[tier].latency_ns / problem.unit_ns
    rows = upper.add(numpy.zeros(2))
    upper.put(rows[:1], its.pause, 1.0)
    for pauses in (its.lead_pause, its.read_pause):
        upper.put(numpy.zeros(m, dtype=int) + rows[0], pauses, -1.0)
    upper.put(rows[1:], its.pause, -1.0)
    for copied in (its.lead, its.read):
        upper.put(numpy.zeros(m, dtype=int) + rows[1], copied, latency / max(room, 1e-9))
    problem.longest_pause[tier] = latency * (1 + float(problem.sizes.sum()) / max(room, 1e-9))


def _add_fewest(problem: Problem, tier: int, room: float, excess: float) -> None:
    """At least (D + z) / z copies, a convex function of z, by its tangents."""
    import numpy

    its, upper = problem.columns(tier), problem.at_most
    latency = problem.tiers[tier].latency_ns / problem.unit_ns
    at = numpy.geomspace(room * _SMALLEST_COPY, room, _TANGENTS)
    slope = latency * excess / at
    rows = upper.add(-(at / excess + 2.0))
    upper.put(rows, numpy.repeat(its.largest, _TANGENTS), -1.0 / at)
    upper.put(rows, numpy.repeat(its.pause, _TANGENTS), -1.0 / slope)
    problem.longest_pause[tier] = float(latency * (1 + 2 * excess / at[0]) * 1.01)


def _add_pairs(problem: Problem, group: numpy.ndarray, room: float, excess: float) -> None:
    """Copies that follow one another share the memory, unless the link idles between them.

    `group` has the group of each gap. Its bytes count at the longest of its reads.
    """
    import numpy

    its, upper, phases, shape = problem.columns(0), problem.at_most, problem.phases, problem.tiers[0]
    read = phases.read_ns / problem.unit_ns
    ends = phases.last % phases.count
    by_length = numpy.lexsort((read[ends], group))
    longest = by_length[numpy.searchsorted(group[by_length], numpy.arange(group.max() + 1), side="right") - 1]
    at, nbytes = ends[longest], problem.sizes[longest]
    dropped = numpy.bincount(at, weights=nbytes, minlength=phases.count)
    curve = PauseCurve(excess, shape.latency_ns / problem.unit_ns, dropped, read)
    counted = numpy.where(curve.large, 0.0, read)
    rows = upper.add(counted)  # what is never dropped is not dropped then
    upper.put(rows, its.idle, 1.0)
    upper.put(rows[at], its.resident[: len(at)], (counted / numpy.maximum(dropped, _DUST))[at])

    smallest = min(room, max(shape.granule / problem.unit_bytes, room * _SMALLEST_COPY))
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
        problem.longest_pause[0] = max(problem.longest_pause[0], 1.01 * float(values.max()))


def _add_single(problem: Problem, tier: int, groups: numpy.ndarray) -> None:
    """A copy brings bytes of one group, and of those no more than is known."""
    import numpy

    its, upper, shape = problem.columns(tier), problem.at_most, problem.tiers[tier]
    known = shape.most_at_once or {}
    most = numpy.array([known[g] for g in groups.tolist()]) / problem.unit_bytes
    each = shape.latency_ns / problem.unit_ns / most
    pauses = float(each @ problem.sizes)
    rows = upper.add(numpy.array([-pauses]))
    upper.put(rows, its.pause, -1.0)
    upper.put(numpy.zeros(len(most), dtype=int) + rows, its.kept, -each)
    problem.longest_pause[tier] = max(problem.longest_pause[tier], 1.01 * pauses)

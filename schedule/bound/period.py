"""A period that no plan can beat: the dual value of a linear relaxation, rounded down.

The relaxation keeps only constraints that every plan obeys. Time is cut into two phases for each step: the
lead, in which a pass may also wait, and the read, which takes just its time. There is a tier for the device,
and a tier for the host behind it, which is counted together with the device. In each tier let, in bytes,

  kept[g]    of gap g between two reads of a group stay, so that the rest is copied again;
  over[k]    are kept over step k, which does not read them;
  early[k]   have arrived by the end of step k for later steps;
  lead[k], read[k]   are copied during the two phases of step k.

Then, where indices wrap around the pass:

  over[k] = over[k-1] + kept[gaps opened by k-1] - kept[gaps closed by k]
  early[k] = early[k-1] + lead[k] + read[k] - (size - kept)[gaps closed by k]
  early[k] >= read[k]                                  what step k reads is there when it begins
  over[k] + early[k] <= room[k]                        the memory left beside what step k reads, and
                                                       never more than the gaps over step k could use
  lead[k] <= rate * (lead time + wait[k]),  read[k] <= rate * read time

and the period is the compute plus the sum of all waits. A byte that a plan brings from the disk is neither
on the host nor on the device. So the tier of the host has the same constraints, with the memory of both and
the rate of the disk, and it keeps at least what the device keeps.

What is produced is there when it has been written, and has no gap from its last read to the next time that it
is written. The bytes that leave over any of its gaps are copied out once, at some time in the pass, over the
same link unless that carries both at once.

Any plan, of any number of passes, gives a solution: the mean over its passes. In the relaxation copies may be
split at will, follow no order and arrive in parts, so its optimum can be better than every plan.

Latency adds a pause for each copy, which takes time of the link in some phase. The least number of pauses
(`latency.py`) only holds for plans that repeat every pass, as a schedule does: over several passes, no byte
has to stay for good, and larger copies can take turns.

The reported bound is a dual objective, computed here from the solver's multipliers with every variable
bounded: by weak duality it is a bound whatever the solver did. (The fluid relaxation of integrated
prefetching and caching: Albers, Garg and Leonardi, J. ACM 47(6), 2000.)

The calling thread launches every step that reads bytes which do not always stay. What stays has room beside
the other bytes that any one step reads. So without one of them, the launched steps still read all bytes that
do not fit into the memory, and are no fewer than the largest steps of the trace that read as many. The time
of that many launches and one more is reported where it is above the dual objective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from penstock.schedule.bound.latency import add_latency
from penstock.schedule.bound.relaxation import LinearProgram, Phases, Tier
from penstock.schedule.bound.residency import Gap, gaps_of, needed_bytes
from penstock.schedule.facts.model import Hardware, Trace, Wrap
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.pieces import Pieces
from penstock.schedule.space.spans import Group

MOST_STEPS = 4000
"""The most steps whose constraints count. Leaving out those of other steps can only lower the bound."""

SECONDS = 60.0
"""The most seconds that the solver may take."""


_CUT = 8
"""The most spans that are no whole granules for which all sums of their sizes are looked at."""

_FEW_GRANULES, _NEARLY_WHOLE = 12, 0.01
"""The most granules of refilled memory that are rounded to a whole number, and the largest rounding error."""

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
    return max(total + (nbytes - total) // granule * granule for total in sums if total <= nbytes)


def relax(problem: Problem, pieces: Pieces, tiers: Sequence[Tier], number: int = 0) -> Relaxation | None:
    """Solve the relaxation for trace number `number` of the problem; None if the solver fails in time.

    The first tier is the device's.
    """
    groups, trace = pieces.copied, problem.traces[number]
    gaps = gaps_of(groups, trace, number=number)
    if not gaps:
        return Relaxation(trace.compute_ns, (), (), groups, 0.0)
    sizes = numpy.array([groups[gap.group].nbytes for gap in gaps], dtype=float)
    phases = _phases(gaps, trace, problem.wrap)
    needed = numpy.array(needed_bytes(groups, len(trace.steps), number=number), dtype=float)
    shares = numpy.array([gap.group for gap in gaps])
    always = sum(group.nbytes for group in groups if group.kept)
    spilled = numpy.array([groups[gap.group].produced for gap in gaps])
    program = LinearProgram(sizes, needed[phases.checkpoints], phases, tiers, groups=shares, spilled=spilled)
    add_latency(program, shares, always)
    program.close()
    solved = _solve_in_granules(program, tiers[0].granule)
    if solved is None:
        return None
    dual, solution = solved
    wait_ns = max(0.0, dual * program.unit_ns * (1 - _MARGIN) - trace.compute_ns * _MARGIN)
    kept_bytes = solution[program.columns(0).kept] * program.unit_bytes
    shared = float(solution[program.columns(0).largest[0]]) * program.unit_bytes
    launching = problem.hardware.host_step_ns * _fewest_streamed(groups, trace, tiers[0].nbytes, number)
    bound = max(trace.compute_ns + math.floor(wait_ns), launching)
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

"""What a schedule does on a virtual clock: the first pass, the steady one, and where it waits.

The same event graph as the prediction's, followed event by event instead of by its cycles.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.clock.event_graph import PassTimes, simulate
from penstock.schedule.facts.model import Hardware, Schedule, Trace, Wrap

_SETTLING = 24
"""Passes before the steady ones: transients end when the link has caught up, usually in two."""

_WINDOW = 12
"""Passes over which the steady period is taken: a multiple of 1, 2, 3, 4 and 6, after which it repeats."""


@dataclass(frozen=True)
class Stall:
    """Nanoseconds that step `step` waits for its weights in one pass."""

    step: int
    ns: int


@dataclass(frozen=True)
class Simulation:
    """Two passes of a schedule, and the period to which it settles.

    `first_ns` is the first pass, from a cold start to the next call; `period_ns` one more pass in the steady
    state, rounded up.
    """

    first: PassTimes
    steady: PassTimes
    first_ns: int
    period_ns: int

    def stalls(self, trace: Trace, *, steady: bool = True) -> tuple[Stall, ...]:
        """The steps of a pass that wait, in order."""
        times = self.steady if steady else self.first
        ended, found = times.call_start, []
        for k, (step, (start, end)) in enumerate(zip(trace.steps, times.reads, strict=True)):
            waited = start - ended - step.lead_ns
            if waited > 0:
                found.append(Stall(k, waited))
            ended = end
        return tuple(found)


def run(trace: Trace, schedule: Schedule, hardware: Hardware, wrap: Wrap) -> Simulation:
    """Simulate passes until they are steady."""
    passes = simulate(trace, schedule, hardware, wrap, _SETTLING + _WINDOW + 1)
    period = -(-(passes[-1].call_start - passes[-1 - _WINDOW].call_start) // _WINDOW)
    return Simulation(passes[0], passes[-2], passes[1].call_start - passes[0].call_start, period)

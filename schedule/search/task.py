"""The input and output of a search: `search` in `contiguous.py` and `paged.py` makes a Draft of a Task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.launches import leaving_storages, streamed_steps
from penstock.schedule.facts.model import Drop, Range, Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.pieces import Pieces


@dataclass(frozen=True)
class Task:
    """A problem, and `cap` bytes of arena for it, in which a plan exists.

    `relaxed` has the relaxation of each trace within these bytes, None where the solver failed. `effort` is
    how much to search, as a multiple of the usual amount.
    """

    problem: Problem
    pieces: Pieces
    cap: int
    relaxed: tuple[Relaxation | None, ...]
    effort: float = 1.0


@dataclass(frozen=True)
class Draft:
    """All decisions of a plan, without its times; the fields are as in `Decisions`.

    `streams` has the transfers and the drops of each trace. `boundaries` has the boundary of each trace, and
    is empty where `boundary` holds for all.
    """

    arena_bytes: int
    addresses: tuple[int, ...]
    resident: tuple[Range, ...]
    boundary: tuple[Range, ...]
    streams: tuple[tuple[tuple[Transfer, ...], tuple[Drop, ...]], ...]
    boundaries: tuple[tuple[Range, ...], ...] = ()

    def periods_ns(self, problem: Problem) -> list[int]:
        """The steady period of each trace, in nanoseconds."""
        schedules = [
            Schedule(trace.graph, *stream, 0)
            for trace, stream in zip(problem.traces, self.streams, strict=True)
        ]
        facts = zip(problem.traces, schedules, self._launched(problem, schedules), strict=True)
        return [
            steady_period_ns(trace, schedule, problem.hardware, problem.wrap, launched=launched)
            for trace, schedule, launched in facts
        ]

    def _launched(self, problem: Problem, schedules: Sequence[Schedule]) -> list[tuple[int, ...]]:
        """The streamed steps of each trace; none where nothing streams, or launches take no time."""
        if not problem.hardware.host_step_ns or not self.arena_bytes:
            return [()] * len(schedules)
        sizes = [storage.nbytes for storage in problem.storages]
        leaving = leaving_storages(problem.arena, sizes, problem.outside, self.resident)
        return [
            streamed_steps(trace, schedule, schedule, leaving)
            for trace, schedule in zip(problem.traces, schedules, strict=True)
        ]

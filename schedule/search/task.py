"""The interface of the searches: `search` in `contiguous.py` and `paged.py` makes a Draft for a Task."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.facts.model import Drop, Range, Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.pieces import Pieces


@dataclass(frozen=True)
class Task:
    """A problem and `cap` bytes of arena for it, which are at least what is needed.

    `relaxed` has the relaxation of each trace for that memory, None where the solver failed; `effort` is the
    share of the usual search.
    """

    problem: Problem
    pieces: Pieces
    cap: int
    relaxed: tuple[Relaxation | None, ...]
    effort: float = 1.0


@dataclass(frozen=True)
class Draft:
    """All of a plan but its times; `streams` has the transfers and drops of each trace.

    `boundaries` has what lies between two calls of each, empty where `boundary` holds for all.
    """

    arena_bytes: int
    addresses: tuple[int, ...]
    resident: tuple[Range, ...]
    boundary: tuple[Range, ...]
    streams: tuple[tuple[tuple[Transfer, ...], tuple[Drop, ...]], ...]
    boundaries: tuple[tuple[Range, ...], ...] = ()

    def periods_ns(self, problem: Problem) -> list[int]:
        """The steady period of each trace."""
        return [
            steady_period_ns(trace, Schedule(trace.graph, *stream, 0), problem.hardware, problem.wrap)
            for trace, stream in zip(problem.traces, self.streams, strict=True)
        ]

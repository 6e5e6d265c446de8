"""The input and output of a search: `search` in `contiguous.py` and `paged.py` makes a Draft of a Task."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
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
        return [
            steady_period_ns(trace, Schedule(trace.graph, *stream, 0), problem.hardware, problem.wrap)
            for trace, stream in zip(problem.traces, self.streams, strict=True)
        ]

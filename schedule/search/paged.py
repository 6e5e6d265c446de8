"""The search for a plan of a paged arena.

For one method the search chooses what streams (`one_trace.py`). Several methods share the arena, so it keeps
the same share of every group of spans resident for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy

from penstock.schedule.bound.residency import Residency, gaps_of, needed_bytes
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Loads, Streaming
from penstock.schedule.facts.model import Arena, Drop, Range, Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.search.contiguous import search_blocks
from penstock.schedule.search.one_trace import OneTrace
from penstock.schedule.search.task import Draft, Task
from penstock.schedule.space.pieces import Block, Pieces
from penstock.schedule.space.spans import merged

_NEAR = 1.01
"""The contiguous search is not tried as well at a period of at most this multiple of the lower bound."""

_SHARES = 64
"""The number of resident shares, beside 0, that are tried for several methods in one arena."""


def search(task: Task) -> Draft:
    """The best draft found for a paged arena."""
    problem, pieces = task.problem, task.pieces
    alone = len(problem.traces) == 1
    if alone:
        streaming, stays = OneTrace(task).best(task.relaxed[0])
        draft = _draft(pieces, (streaming,), stays)
    else:
        draft = _draft(pieces, *_share_for_all(problem, pieces, task.cap))
    period_ns = sum(draft.periods_ns(problem))
    bounds = [relaxation.bound_ns for relaxation in task.relaxed if relaxation]
    near = len(bounds) == len(problem.traces) and period_ns <= sum(bounds) * _NEAR
    if near:
        return draft
    other = _search_runs(task)
    return other if other and sum(other.periods_ns(problem)) < period_ns else draft


def _draft(pieces: Pieces, streams: Sequence[Streaming], stays: Sequence[bool]) -> Draft:
    """The draft of a paged arena: `streams` has what each method streams, `stays` which spans never leave."""
    spans = (span for group in pieces.groups for span in group.spans)
    resident = merged(itertools.compress(spans, stays), pieces.breaks)
    peak = max(stream.holding.peak_bytes for stream in streams)
    boundaries = tuple((*resident, *stream.holding.boundary) for stream in streams)
    moved = tuple((stream.transfers, stream.holding.drops) for stream in streams)
    if len(streams) == 1:
        return Draft(peak, (), resident, boundaries[0], moved)
    return Draft(peak, (), resident, resident, moved, boundaries)


def _share_for_all(
    problem: Problem, pieces: Pieces, cap: int
) -> tuple[tuple[Streaming, ...], Sequence[bool]]:
    """The best way to stream in which one share of every group is resident for all methods.

    Each method streams the rest, and prefetches at the end of a call as if its own next call followed.
    Returns what each method streams, and, for each span, whether it never leaves.
    """
    groups = pieces.groups
    best: tuple[int, tuple[Streaming, ...], Sequence[bool]] | None = None
    plans = []
    for number, trace in enumerate(problem.traces):
        gaps = gaps_of(groups, trace, number=number)
        steps = len(trace.steps)
        residency = Residency(groups, gaps, needed_bytes(groups, steps, number=number))
        ends = partial(problem.call_ends, number)
        loads = Loads(groups, gaps, steps, breaks=pieces.breaks, number=number, call_ends=ends)
        read = {gap.group for gap in residency.gaps}
        unread = [
            g for number, g in enumerate(groups) if not g.kept and not g.produced and number not in read
        ]
        plans.append((trace, residency, loads, unread))
    for share in range(_SHARES, -1, -1):
        fixed = tuple(len(g.spans) if g.kept else len(g.spans) * share // _SHARES for g in groups)
        streams, period = [], 0
        for trace, residency, loads, unread in plans:
            counts = [
                len(groups[gap.group].spans)
                if gap.inside == 0 and gap.closes < len(trace.steps)
                else fixed[gap.group]
                for gap in residency.gaps
            ]
            unread_bytes = sum(g.bytes_of_first[len(g.spans) * share // _SHARES] for g in unread)
            if (residency.held(counts) + unread_bytes > cap).any():
                break
            stays = [
                n < count and not g.produced
                for g, count in zip(groups, fixed, strict=True)
                for n in range(len(g.spans))
            ]
            early = len(trace.steps) - 1 if problem.wrap == "overlap" else 0
            stream = loads.stream(loads.after_first(counts), numpy.array(stays), cap=cap, early=early)
            assert stream is not None  # with nothing put off, there is memory for each copy when it is needed
            streams.append(stream)
            schedule = Schedule(trace.graph, stream.transfers, (), 0)
            launched = loads.steps_using(~numpy.array(stays))
            period += steady_period_ns(trace, schedule, problem.hardware, problem.wrap, launched=launched)
        if len(streams) == len(plans) and (best is None or period < best[0]):
            best = (period, tuple(streams), stays)
    assert best is not None
    return best[1], best[2]


_Piece = TypeVar("_Piece", Range, Transfer, Drop)


def _search_runs(task: Task) -> Draft | None:
    """The draft that the search for a contiguous arena finds when each run is a block of whole granules.

    A paged arena does not use the addresses found: they only decide which runs take turns in the same memory.
    None if no placement of the runs is found.
    """
    arena = task.problem.arena
    blocks = []
    for number, run in enumerate(task.pieces.runs):
        whole = Range(run.range.start // arena.granule * arena.granule, run.range.stop)
        size = -(-whole.nbytes // arena.granule) * arena.granule
        blocks.append(Block(number, whole, 0, size, run.reads, run.kept, run.produced))
    draft = search_blocks(task, blocks)
    return _clipped(draft, arena) if draft else None


def _clipped(draft: Draft, arena: Arena) -> Draft:
    """The draft with its ranges cut to segments, which may begin inside a granule, unlike blocks."""
    begins = {s.start // arena.granule * arena.granule: s.start for s in arena.segments}

    def clip(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
        return tuple(replace(piece, start=begins.get(piece.start, piece.start)) for piece in pieces)

    streams = tuple((clip(transfers), clip(drops)) for transfers, drops in draft.streams)
    boundaries = tuple(map(clip, draft.boundaries))
    resident, boundary = clip(draft.resident), clip(draft.boundary)
    return replace(draft, resident=resident, boundary=boundary, streams=streams, boundaries=boundaries)

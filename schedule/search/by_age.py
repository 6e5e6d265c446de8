"""The search for a contiguous arena, asked for a paged one: addresses then only say what takes whose room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.schedule.bound.period import Relaxation
from penstock.schedule.clock.transfers import Decisions
from penstock.schedule.facts.model import Arena, Drop, Hardware, Range, Trace, Transfer, Wrap
from penstock.schedule.search.contiguous import search_blocks
from penstock.schedule.space.addresses import Block
from penstock.schedule.space.spans import Run

_Piece = TypeVar("_Piece", Range, Transfer, Drop)


def search_runs(
    runs: Sequence[Run],
    traces: Sequence[Trace],
    arena: Arena,
    *,
    cap: int,
    hardware: Hardware,
    wrap: Wrap,
    relaxed: Sequence[Relaxation | None],
    effort: float = 1.0,
) -> Decisions | None:
    """The decisions for runs as blocks of whole granules; None where no placement of them is found."""
    granule = arena.granule
    blocks = []
    for number, run in enumerate(runs):
        whole = Range(run.range.start // granule * granule, run.range.stop)
        size = -(-whole.nbytes // granule) * granule
        blocks.append(Block(number, whole, size, run.reads, run.kept))
    found = search_blocks(
        blocks, traces, arena, cap=cap, hardware=hardware, wrap=wrap, relaxed=relaxed, effort=effort
    )
    return _clipped(found, arena) if found else None


def _clipped(found: Decisions, arena: Arena) -> Decisions:
    """The decisions without what lies before a segment, in the first granule that it reaches into."""
    begins = {s.start // arena.granule * arena.granule: s.start for s in arena.segments}

    def clip(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
        return tuple(replace(one, start=begins.get(one.start, one.start)) for one in pieces)

    streams = tuple((clip(transfers), clip(drops)) for transfers, drops in found.streams)
    boundaries = tuple(map(clip, found.boundaries))
    resident, boundary = clip(found.resident), clip(found.boundary)
    return replace(found, resident=resident, boundary=boundary, streams=streams, boundaries=boundaries)

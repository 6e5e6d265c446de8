"""The tier of a host between disk and device: which streamed bytes it holds, and how the others pass through.

The decisions for the device stay as they are. The bytes that they copy come from the host's memory or,
through a ring of staging memory, from the disk. The host first holds the bytes that are copied most often in
a pass. Of bytes that are copied equally often it holds an equal share all along the trace, so that the disk
reads while the link copies held bytes. Several sizes of the ring are tried and timed on the exact event
graph.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.schedule.clock.event_graph import launched_steps, steady_period_ns
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Decisions, HostTier, Range, Schedule, Transfer
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.space.spans import merged, subtract

_P = TypeVar("_P", bound=Decisions)

_RINGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Sizes of the ring that are tried, as divisors of the host's memory."""

_TURNS = 4
"""The number of pieces that fit into the ring, so that one is read while others wait or are copied."""


def with_host(plan: _P, nbytes: int) -> _P:
    """The plan in which the host has `nbytes` of memory for weights, in the fastest way found.

    Transfers are cut into pieces that fit into the ring.

    Raises:
        PlanError: the rate of the disk is not known.
        BudgetError: not even a ring of one granule fits into `nbytes`.
    """
    granule, hardware = plan.arena.granule, plan.hardware
    if hardware.disk_bytes_per_s is None:
        raise PlanError(
            f"host memory is for a GPU, and the rate of the disk behind {hardware.name!r} is not known: give "
            "a GPU, or its disk_bytes_per_s, or no host memory"
        )
    copied = copied_ranges(plan)
    if sum(r.nbytes for r in copied) <= nbytes:
        return replace(plan, host=HostTier(nbytes, copied))
    spilled = sum(spilled_range.nbytes for spilled_range in spilled_ranges(plan))
    least = granule + spilled
    rings = {(nbytes - spilled) // part // granule * granule for part in _RINGS} - {0}
    if nbytes < least:
        passing = "weights pass through it in pieces" + (", beside what is copied out" if spilled else "")
        raise BudgetError(
            f"the host memory of {format_budget(nbytes)} is below the floor of {format_size(least)}: "
            f"{passing}; give at least {least} bytes",
            floor_bytes=least,
        )
    plans = (_timed(_with_ring(plan, nbytes, ring)) for ring in sorted(rings))
    return min(plans, key=lambda candidate: candidate.predicted_seconds)


def copied_ranges(plan: Decisions) -> tuple[Range, ...]:
    """The ranges that are ever copied: in a steady pass, or when the boundary is loaded."""
    transfers = [Range(t.start, t.stop) for schedule in plan.schedules for t in schedule.transfers]
    boundaries = [piece for schedule in plan.schedules for piece in plan.boundary_of(schedule)]
    return merged(transfers + subtract(boundaries, merged(plan.resident)), _breaks(plan))


def _breaks(plan: Decisions) -> frozenset[int]:
    """Where segments begin: no range reaches across."""
    return frozenset(segment.start for segment in plan.arena.segments)


def host_bytes(plan: Decisions) -> int:
    """Bytes of host memory for streamed weights, the ring included."""
    copied = copied_ranges(plan) if plan.host is None else plan.host.resident
    return sum(piece.nbytes for piece in copied) + max((s.staging_bytes for s in plan.schedules), default=0)


def _timed(plan: _P) -> _P:
    """The plan whose schedules have the periods of the exact event graph."""
    timed = []
    for number, (schedule, trace) in enumerate(zip(plan.schedules, plan.traces, strict=True)):
        launched = launched_steps(plan, number)
        period = steady_period_ns(trace, schedule, plan.hardware, plan.wrap, launched=launched)
        timed.append(replace(schedule, predicted_ns=period))
    return replace(plan, schedules=tuple(timed))


def staged_bytes(transfer: Transfer, resident: Sequence[Range]) -> int:
    """Bytes of a transfer that the host does not hold; `resident` are its ranges, sorted and disjoint."""
    resident_bytes = 0
    first = bisect_right(resident, transfer.start, key=lambda r: r.stop)
    for piece in resident[first : bisect_left(resident, transfer.stop, key=lambda r: r.start)]:
        resident_bytes += min(piece.stop, transfer.stop) - max(piece.start, transfer.start)
    return transfer.stop - transfer.start - resident_bytes


def spilled_ranges(plan: Decisions) -> tuple[Range, ...]:
    """The ranges that are copied out. The host holds all of them, since no file has their bytes."""
    both = (t for schedule in plan.schedules for t in schedule.transfers)
    return merged((Range(t.start, t.stop) for t in both if t.direction == "out"), _breaks(plan))


def _with_ring(plan: _P, nbytes: int, ring: int) -> _P:
    """The plan with a ring of `ring` bytes: transfers in pieces, and what the host holds beside the ring."""
    granule, spilled = plan.arena.granule, spilled_ranges(plan)
    piece = max(granule, ring // _TURNS // granule * granule)
    cut = [
        replace(s, transfers=tuple(part for t in s.transfers for part in _parts(t, piece, spilled)))
        for s in plan.schedules
    ]
    weights = [replace(s, transfers=tuple(t for t in s.transfers if staged_bytes(t, spilled))) for s in cut]
    staying = _held(weights, nbytes - ring - sum(piece.nbytes for piece in spilled))
    resident = merged((*spilled, *staying), _breaks(plan))
    schedules = tuple(
        replace(s, staged=tuple(staged_bytes(t, resident) for t in s.transfers), staging_bytes=ring)
        for s in cut
    )
    return replace(plan, schedules=schedules, host=HostTier(nbytes, resident))


def _held(schedules: Sequence[Schedule], room: int) -> tuple[Range, ...]:
    """The ranges that the host holds, of at most `room` bytes: those that are copied most often first."""
    counts: Counter[Range] = Counter()
    edges = sorted({edge for s in schedules for t in s.transfers for edge in (t.start, t.stop)})
    for schedule in schedules:
        for t in schedule.transfers:
            inside = edges[bisect_left(edges, t.start) : bisect_right(edges, t.stop)]
            counts.update(Range(a, b) for a, b in itertools.pairwise(inside))
    chosen: list[Range] = []
    for often in sorted(set(counts.values()), reverse=True):
        cells = [cell for cell, count in counts.items() if count == often]
        share = min(1.0, room / sum(cell.nbytes for cell in cells))
        owed = 0.0
        for cell in cells:
            owed += cell.nbytes * share
            if cell.nbytes <= room and owed >= cell.nbytes / 2:
                chosen.append(cell)
                room -= cell.nbytes
                owed -= cell.nbytes
    return merged(chosen)


def _parts(transfer: Transfer, piece: int, spilled: Sequence[Range]) -> Iterator[Transfer]:
    if not staged_bytes(transfer, spilled):
        yield transfer
        return
    for start in range(transfer.start, transfer.stop, piece):
        yield replace(transfer, start=start, stop=min(start + piece, transfer.stop))

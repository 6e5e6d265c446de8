"""What the host holds in a plan with a disk behind it, checked without the planner's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Range, Schedule, Transfer


def check_host(plan: Decisions) -> None:
    """Raise PlanError unless every transfer's bytes are held by the host or pass through its ring.

    What is held and the ring are within the host's memory, and no transfer needs more of the ring
    than there is.
    """
    rings = {schedule.staging_bytes for schedule in plan.schedules} - {0}
    if plan.host is None:
        if rings or any(schedule.staged for schedule in plan.schedules):
            raise PlanError("transfers are staged through a host of which the plan says nothing; plan again")
        return
    _check_held(plan.host.resident, plan.arena.segments)
    held = sum(r.stop - r.start for r in plan.host.resident)
    if held + max(rings, default=0) > plan.host.nbytes or len(rings) > 1:
        raise PlanError(
            f"the host holds {held} bytes and rings of {sorted(rings)}, expected one ring and "
            f"{plan.host.nbytes} bytes in all; plan again"
        )
    for schedule in plan.schedules:
        for item in plan.boundary_of(schedule):
            if not rings and _lacks(item, plan.host.resident, plan.resident):
                raise PlanError(
                    f"bytes {item.start}:{item.stop} of the boundary of graph {schedule.graph} are neither "
                    "on the device nor with the host, which has no ring; plan again"
                )
        for problem in _staging_problems(schedule, plan.host.resident):
            raise PlanError(f"schedule of graph {schedule.graph}: {problem}; plan again")


def _check_held(held: Sequence[Range], segments: Sequence[Range]) -> None:
    end = 0
    for one in held:
        inside = any(s.start <= one.start and one.stop <= s.stop for s in segments)
        if not (end <= one.start < one.stop) or not inside:
            raise PlanError(
                f"the host holds bytes {one.start}:{one.stop}, expected ranges of the layout's segments, "
                "ascending and disjoint; plan again"
            )
        end = one.stop


def _staging_problems(schedule: Schedule, held: Sequence[Range]) -> Iterator[str]:
    staged = schedule.staged or (0,) * len(schedule.transfers)
    if len(staged) != len(schedule.transfers):
        yield f"expected {len(schedule.transfers)} counts of staged bytes, got {len(staged)}"
        return
    for transfer, nbytes in zip(schedule.transfers, staged, strict=True):
        missing = _missing(transfer, held)
        if nbytes != missing:
            yield (
                f"the host lacks {missing} of the bytes {transfer.start}:{transfer.stop}, "
                f"and {nbytes} are staged"
            )
        if nbytes > schedule.staging_bytes:
            yield f"{nbytes} bytes are staged at once in a ring of {schedule.staging_bytes}"


def _lacks(item: Range, held: Sequence[Range], resident: Sequence[Range]) -> bool:
    """Whether a byte of a range is in none of the others."""
    position = item.start
    for one in sorted((*held, *resident)):
        if one.start > position:
            break
        position = max(position, one.stop)
    return position < item.stop


def _missing(transfer: Transfer, held: Sequence[Range]) -> int:
    """Bytes of a transfer that the host does not hold, walking along what it does."""
    position, missing = transfer.start, 0
    for one in held:
        if one.stop <= position:
            continue
        if one.start >= transfer.stop:
            break
        missing += max(0, one.start - position)
        position = min(one.stop, transfer.stop)
    return missing + max(0, transfer.stop - position)

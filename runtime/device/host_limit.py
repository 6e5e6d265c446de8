"""What a host may hold of the weights for a device that copies from it."""

from __future__ import annotations

from penstock.schedule.facts.errors import BudgetError, StreamError
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.host import host_bytes
from penstock.schedule.plan import Plan

LEAST_BYTES = 16 << 10
"""Two blocks of a disk, in two halves: resident weights pass through them."""


def parse_host_memory(host_memory: int | str | None, weight_bytes: int) -> int | None:
    """The bytes that `host_memory` stands for; BudgetError for fewer than weights can pass through."""
    if host_memory is None:
        return None
    nbytes = parse_size(host_memory, total=weight_bytes or 100, name="host_memory")
    if nbytes < LEAST_BYTES:
        raise BudgetError(
            f"host_memory is {nbytes} bytes: weights pass through it when they are loaded, so give at "
            f"least {LEAST_BYTES}",
            floor_bytes=LEAST_BYTES,
        )
    return nbytes


def unlimited_bytes(plan: Plan) -> int:
    """What the host holds of the weights, where nothing limits it."""
    return 0 if plan.host else host_bytes(plan)


def check_host_limit(plan: Plan, limit: int | None) -> None:
    """Raise StreamError for a plan without a host's limit that takes more than `limit` bytes of it."""
    taken = unlimited_bytes(plan)
    if limit is not None and taken > limit:
        raise StreamError(
            f"the plan keeps {format_size(taken)} of weights in the host's memory, of which "
            f"{format_size(limit)} may be taken: plan with host_memory={limit}, or more"
        )

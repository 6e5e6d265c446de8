"""What weights may take: of a device beside everything else in it, and of the host behind that device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.runtime.system.limits import usable_bytes
from penstock.schedule.facts.errors import BudgetError, StreamError
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.host import host_bytes
from penstock.schedule.plan import Plan

Reserve: TypeAlias = int | str | Callable[[int], int]
"""What a caller keeps for itself: bytes, `2GB`, or bytes as a function of the context length."""

CUDA_WORKSPACE = 128 << 20
"""Bytes left on a CUDA device for what libraries take: matrix products, the allocator's rounding."""

LEAST_HOST_BYTES = 16 << 10
"""Two blocks of a disk, in two halves: resident weights pass through them."""


def reserved_bytes(reserve: Reserve, context_length: int | None) -> int:
    """Returns the bytes that `reserve` stands for. Raises BudgetError where that is no size."""
    if callable(reserve):
        if context_length is None or context_length < 0:
            raise BudgetError("reserve= is a function of the context length: give context_length= too")
        reserve = reserve(context_length)
    return parse_size(reserve, name="reserve") if reserve else 0


@dataclass(frozen=True)
class MemorySplit:
    """A cap in bytes on all of a device's memory, and what is taken from it before weights."""

    total: int
    activations: int
    workspace: int = 0
    reserved: int = 0
    others: int = 0

    @property
    def weights(self) -> int:
        """What is left for weights; below zero where the rest is more than the cap."""
        return self.total - self.activations - self.workspace - self.reserved - self.others

    def budget(self, floor: int) -> int:
        """Returns the budget for weights; BudgetError, with all parts, where it is below the floor."""
        if self.weights < floor:
            raise BudgetError(
                f"{self}: weights need at least {format_size(floor)}, so give at least "
                f"{format_size(self.total - self.weights + floor)}",
                floor_bytes=floor,
            )
        return self.weights

    def outgrown(self, allocated: int, others: int) -> str:
        """Say which part took more than its share, where `allocated` bytes beside weights were not enough."""
        own = self.activations + self.workspace + self.reserved
        parts = [("what other processes hold", others, self.others)]
        parts.append(("activations, workspace and what the caller keeps", allocated, own))
        name, took, share = max(parts, key=lambda part: part[1] - part[2])
        return f"{name} took {format_size(took)} and more, of a share of {format_size(share)}"

    def __str__(self) -> str:
        parts = {
            "activations": self.activations,
            "workspace": self.workspace,
            "reserved": self.reserved,
            "held by others": self.others,
        }
        taken = ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
        left = format_size(max(0, self.weights))
        return f"of {format_size(self.total)} device memory: {taken or 'nothing'}, {left} for weights"


def parse_host_memory(host_memory: int | str | None, weight_bytes: int) -> int | None:
    """Returns the bytes that `host_memory` stands for.

    Raises BudgetError for fewer than weights can pass through.
    """
    if host_memory is None:
        return None
    nbytes = parse_size(host_memory, total=weight_bytes or 100, name="host_memory")
    if nbytes < LEAST_HOST_BYTES:
        raise BudgetError(
            f"host_memory is {nbytes} bytes: weights pass through it when they are loaded, so give at "
            f"least {LEAST_HOST_BYTES}",
            floor_bytes=LEAST_HOST_BYTES,
        )
    return nbytes


def fits_host(plan: Plan, limit: int | None) -> bool:
    """Tells whether the host holds `limit` bytes of weights at most (None: any), or the plan has a limit."""
    return plan.host is not None or limit is None or host_bytes(plan) <= limit


def check_host(plan: Plan) -> None:
    """Raise StreamError for a plan without a host's limit that takes more of the host than may be taken."""
    limit = usable_bytes()
    if limit is not None and not fits_host(plan, limit):
        raise StreamError(
            f"the plan keeps {format_size(host_bytes(plan))} of weights in the host's memory, of which "
            f"{format_size(limit)} may be taken: plan with host_memory={limit}, or more"
        )

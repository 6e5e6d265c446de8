"""The memory that weights may take: on a device beside everything else, and in the host behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.runtime.system.limits import usable_bytes
from penstock.schedule.facts.errors import BudgetError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.host import host_bytes
from penstock.schedule.plan import Plan

Reserve: TypeAlias = int | str | Callable[[int], int]
"""Memory that a caller keeps for itself: bytes, `2GB`, or bytes as a function of the context length."""

WORKSPACE = 128 << 20
"""Bytes of an accelerator that are left for libraries (matrix products) and for the allocator's rounding."""

LEAST_HOST_BYTES = 16 << 10
"""Two blocks of a disk for each of two halves, through which resident weights pass when they are loaded."""


def reserved_bytes(reserve: Reserve, context_length: int | None) -> int:
    """Returns the bytes that `reserve` stands for. Raises BudgetError if it is no size."""
    if callable(reserve):
        if context_length is None or context_length < 0:
            raise BudgetError("reserve= is a function of the context length: give context_length= too")
        reserve = reserve(context_length)
    return parse_size(reserve, name="reserve") if reserve else 0


@dataclass(frozen=True)
class MemorySplit:
    """A cap in bytes on all of a device's memory, and the parts that are taken from it before weights."""

    total: int
    activations: int
    workspace: int = 0
    reserved: int = 0
    others: int = 0
    trained: int = 0

    @property
    def weights(self) -> int:
        """The bytes that are left for weights, negative if the other parts exceed the cap."""
        return self.total - self.own - self.others

    @property
    def own(self) -> int:
        """The bytes of all parts but weights that this process takes."""
        return self.activations + self.workspace + self.reserved + self.trained

    def budget(self, floor: int) -> int:
        """Returns the budget for weights. Raises BudgetError, with all parts, if it is below the floor."""
        if self.weights < floor:
            raise BudgetError(
                f"{self}: weights need at least {format_size(floor, up=True)}, so give at least "
                f"{format_size(self.total - self.weights + floor, up=True)}",
                floor_bytes=floor,
            )
        return self.weights

    def outgrown(self, allocated: int, others: int) -> str:
        """Say which part took more than its share when `allocated` bytes beside weights were not enough."""
        parts = [("what other processes hold", others, self.others)]
        parts.append(("activations, workspace and what the caller keeps", allocated, self.own))
        name, took, share = max(parts, key=lambda part: part[1] - part[2])
        return f"{name} took {format_size(took)} and more, of a share of {format_size(share)}"

    def __str__(self) -> str:
        parts = {
            "activations": self.activations,
            "trained parameters": self.trained,
            "workspace": self.workspace,
            "reserved": self.reserved,
            "held by others": self.others,
        }
        taken = ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
        left = format_size(max(0, self.weights))
        return f"of {format_budget(self.total)} device memory: {taken or 'nothing'}, {left} for weights"


def parse_host_memory(host_memory: int | str | None, weight_bytes: int) -> int | None:
    """Returns the bytes that `host_memory` stands for.

    Raises BudgetError for fewer than weights can pass through.
    """
    if host_memory is None:
        return None
    nbytes = parse_size(host_memory, total=weight_bytes or 100, name="host_memory")
    if nbytes < LEAST_HOST_BYTES:
        raise BudgetError(
            f"host memory of {format_budget(nbytes)} is too little: weights pass through it when they are "
            f"loaded, so give at least {LEAST_HOST_BYTES} bytes",
            floor_bytes=LEAST_HOST_BYTES,
        )
    return nbytes


def fits_host(plan: Plan, limit: int | None) -> bool:
    """Tells whether a plan takes `limit` bytes of the host at most (None: any), or has its own limit."""
    return plan.host is not None or limit is None or host_bytes(plan) <= limit


def check_host(plan: Plan) -> None:
    """Raise StreamError for a plan that takes more memory of the host than may be taken."""
    limit = usable_bytes()
    if limit is not None and not fits_host(plan, limit):
        raise StreamError(
            f"the plan keeps {format_size(host_bytes(plan))} of weights in the host's memory, of which "
            f"{format_size(limit)} may be taken: plan with host_memory={limit}, or more"
        )

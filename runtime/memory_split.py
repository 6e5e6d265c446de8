"""Divides a cap on all memory of a device into what weights get and what must be left for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.sizes import format_size, parse_size

Reserve: TypeAlias = int | str | Callable[[int], int]
"""What a caller keeps for itself: bytes, `2GB`, or bytes as a function of the context length."""

CUDA_WORKSPACE = 128 << 20
"""Bytes left on a CUDA device for what libraries take: matrix products, the allocator's rounding."""


def reserved_bytes(reserve: Reserve, context_length: int | None) -> int:
    """The bytes that `reserve` stands for; BudgetError for what is no size."""
    if callable(reserve):
        if context_length is None or context_length < 0:
            raise BudgetError("reserve= is a function of the context length: give context_length= too")
        reserve = reserve(context_length)
    return parse_size(reserve, name="reserve") if reserve else 0


@dataclass(frozen=True)
class MemorySplit:
    """A cap in bytes, and what is taken from it before weights."""

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
        """The budget for weights; BudgetError, with all parts, where it is below the floor."""
        if self.weights < floor:
            raise BudgetError(
                f"{self}: weights need at least {format_size(floor)}, so give at least "
                f"{format_size(self.total - self.weights + floor)}",
                floor_bytes=floor,
            )
        return self.weights

    def outgrown(self, allocated: int, others: int) -> str:
        """Which part took more than its share, when `allocated` bytes beside weights were all there was."""
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

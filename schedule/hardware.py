"""The machine that a plan assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

STRICT: dict[str, object] = {"extra": "forbid", "strict": True}
"""How pydantic treats the classes of a payload at the file boundary; inert elsewhere."""


@dataclass(frozen=True)
class Hardware:
    """The machine a plan assumes. Rates are per second, latency is per transfer.

    `link_bytes_per_s` is the rate at which weights reach the arena, and `link_in_flight_bytes` what
    must be on its way at once for the link to reach it: plans leave room for that much beside what is
    resident. `note` says where the figures come from.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_ns: int
    link_in_flight_bytes: int = 0
    note: str = ""

    def copy_ns(self, nbytes: int) -> int:
        """Nanoseconds that one transfer of `nbytes` takes, rounded up."""
        return self.link_latency_ns + -int(-nbytes * 1e9 // self.link_bytes_per_s)

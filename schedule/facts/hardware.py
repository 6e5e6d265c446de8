"""The machine that a plan assumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from penstock.schedule.facts.errors import PlanError

STRICT: dict[str, object] = {"extra": "forbid", "strict": True}
"""How pydantic treats the classes of a payload at the file boundary; inert elsewhere."""


@dataclass(frozen=True)
class Hardware:
    """The machine a plan assumes. Rates are per second, latency is per transfer.

    `link_bytes_per_s` is the rate at which weights reach the arena, and `link_in_flight_bytes` what
    must be on its way at once for the link to reach it: plans leave room for that much beside what is
    resident. `memory_nbytes` is all memory of the device. The disk is the one behind the host, where
    weights have another tier to come from; None where that is not known. `note` says where the
    figures come from.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_ns: int
    link_in_flight_bytes: int = 0
    memory_nbytes: int | None = None
    disk_bytes_per_s: float | None = None
    disk_latency_ns: int = 0
    note: str = ""

    def problems(self) -> Iterator[str]:
        """One sentence for each figure that no machine has: field, what is expected, what is there."""
        for name in ("link_latency_ns", "link_in_flight_bytes", "memory_nbytes", "disk_latency_ns"):
            if (getattr(self, name) or 0) < 0:
                yield f"{name}: expected 0 or more, got {getattr(self, name)}"
        for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s"):
            rate = getattr(self, name)
            if rate is None and name == "disk_bytes_per_s":
                continue
            if not (rate > 0 and math.isfinite(rate)):
                yield f"{name}: expected a rate above 0 and finite, got {rate}"

    def check(self) -> None:
        """Raise PlanError with the first of `problems`."""
        for problem in self.problems():
            raise PlanError(
                f"nothing can be planned for the hardware {self.name!r}: {problem}; "
                "give its figures, or measure it (hardware='auto')"
            )

    def copy_ns(self, nbytes: int) -> int:
        """Nanoseconds that one transfer of `nbytes` takes, rounded up."""
        return self.link_latency_ns + -int(-nbytes * 1e9 // self.link_bytes_per_s)

    def disk_ns(self, nbytes: int) -> int:
        """Nanoseconds that the disk behind the host takes to read `nbytes`, rounded up; it must be known."""
        assert self.disk_bytes_per_s is not None
        return self.disk_latency_ns + -int(-nbytes * 1e9 // self.disk_bytes_per_s)

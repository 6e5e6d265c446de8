"""What is to be planned: what a program needs in memory at each step, and the machine that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.facts.model import Arena, Hardware, Storage, Trace, Wrap


@dataclass(frozen=True)
class Demand:
    """What a program needs in memory at each step, on any machine; `keep` are storages that never leave."""

    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    arena: Arena
    keep: frozenset[int] = frozenset()

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """The storages that are never in the arena, whoever reads them."""
        return tuple(s for s, storage in enumerate(self.storages) if storage.kind != "streamable")

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The storages that the arena is for, in the order of their first read."""
        return first_uses(self.storages, self.traces)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of the storages that are never in the arena."""
        return sum(self.storages[s].nbytes for s in self.outside)

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes of the storages that the arena is for."""
        return sum(self.storages[s].nbytes for s in self.streamed)


@dataclass(frozen=True, kw_only=True)
class Problem(Demand):
    """Everything that a plan is made from, but for the budget.

    `wrap` says whether copies may cross the end of a call. `host` is how many bytes of the weights the host
    of `hardware` may hold, the rest coming from its disk; None where it holds them all.
    """

    hardware: Hardware
    wrap: Wrap = "overlap"
    host: int | None = None


def first_uses(storages: Sequence[Storage], traces: Sequence[Trace]) -> tuple[int, ...]:
    """The streamable storages that hold bytes and are read, in the order of their first read."""
    order = dict.fromkeys(s for trace in traces for step in trace.steps for s in step.reads)
    return tuple(s for s in order if storages[s].kind == "streamable" and storages[s].nbytes > 0)

"""The problem to plan: what a program needs in memory at each step, and the machine that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.facts.model import Arena, Hardware, Storage, Trace, Wrap


@dataclass(frozen=True)
class Demand:
    """What a program needs in memory at each step, on any machine; storages in `keep` never leave it."""

    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    arena: Arena
    keep: frozenset[int] = frozenset()

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """The storages that are never in the arena, whether a step reads them or not."""
        return tuple(s for s, storage in enumerate(self.storages) if storage.kind != "streamable")

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The storages that are in the arena at some step, in the order of their first read."""
        return first_uses(self.storages, self.traces)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of the storages that are never in the arena."""
        return sum(self.storages[s].nbytes for s in self.outside)

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes of the storages that are in the arena at some step."""
        return sum(self.storages[s].nbytes for s in self.streamed)


@dataclass(frozen=True, kw_only=True)
class Problem(Demand):
    """Everything that a plan is made from, except the budget.

    `wrap` says whether copies may be on their way across the end of a call (`overlap`) or not (`barrier`).
    `host` is how many bytes of the weights the host of `hardware` may hold, while the others come from its
    disk; None if it holds all of them.
    """

    hardware: Hardware
    wrap: Wrap = "overlap"
    host: int | None = None


def first_uses(storages: Sequence[Storage], traces: Sequence[Trace]) -> tuple[int, ...]:
    """The streamable storages that hold bytes and are read, in the order of their first read."""
    order = dict.fromkeys(s for trace in traces for step in trace.steps for s in step.reads)
    return tuple(s for s in order if storages[s].kind == "streamable" and storages[s].nbytes > 0)

"""The problem to plan: what a program needs in memory at each step, and the machine that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.facts.model import IN_ARENA, Arena, Hardware, Pool, Storage, Trace, Wrap

NEARLY = 1.05
"""Divisions, and plans, that take at most so many times as long as the fastest one are about as fast."""

TOKENS_A_PROMPT = 32
"""Calls of the methods that ask for fewest units, for each call of another."""


@dataclass(frozen=True)
class Demand:
    """What a program needs in memory at each step, on any machine; storages in `keep` never leave it.

    `splits` has, for each trace that joins several calls, the steps at which calls but the first begin.
    `pool` serves what is read by units, and is no part of the traces' reads. The storages `beside` are held
    outside of the arena, though they could stream.
    """

    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    arena: Arena
    keep: frozenset[int] = frozenset()
    splits: tuple[tuple[int, ...], ...] = ()
    pool: Pool | None = None
    beside: frozenset[int] = frozenset()

    def call_ends(self, number: int, step: int) -> int:
        """The last step of the call to which a step of trace number `number` belongs."""
        splits = self.splits[number] if self.splits else ()
        return next((split for split in splits if split > step), len(self.traces[number].steps)) - 1

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """The storages that are never in the arena, whether a step reads them or not."""
        chosen = self._crossing | self.beside
        return tuple(s for s, x in enumerate(self.storages) if x.kind not in IN_ARENA or s in chosen)

    @cached_property
    def _crossing(self) -> frozenset[int]:
        """The produced storages that one trace writes and another reads: either may run alone."""
        uses: dict[int, set[int]] = {}
        for number, trace in enumerate(self.traces):
            for s in (s for step in trace.steps for s in (*step.reads, *step.writes)):
                uses.setdefault(s, set()).add(number)
        some = ((s, traces) for s, traces in uses.items() if self.storages[s].kind == "produced")
        return frozenset(s for s, traces in some if len(traces) > 1)

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The storages that are in the arena at some step, in the order of their first read."""
        return tuple(s for s in first_uses(self.storages, self.traces) if s not in self.outside)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of the storages that are never in the arena, and of the pool."""
        return sum(self.storages[s].nbytes for s in self.outside) + (self.pool.nbytes if self.pool else 0)

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
    """The storages with bytes that may be in an arena and are used, in the order of their first use."""
    order = dict.fromkeys(s for t in traces for step in t.steps for s in (*step.reads, *step.writes))
    return tuple(s for s in order if storages[s].kind in IN_ARENA and storages[s].nbytes > 0)


def pass_counts(traces: Sequence[Trace]) -> list[int]:
    """Return how many passes of each method count where plans are compared."""
    asked = [sum(read.asked for step in trace.steps for read in step.sparse) for trace in traces]
    least = min((asked_units for asked_units in asked if asked_units), default=0)
    is_prompt = any(asked_units > least for asked_units in asked)
    return [TOKENS_A_PROMPT if asked_units == least and is_prompt else 1 for asked_units in asked]

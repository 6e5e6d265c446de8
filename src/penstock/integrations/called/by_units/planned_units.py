"""What a plan has for operators that read watched weights: units in its pool, and steps in its arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from penstock.integrations.called.by_units.reads import SLICES, Seen, matrix, operator_of
from penstock.integrations.called.by_units.watched import Root
from penstock.integrations.called.facts import ModuleFacts, Order
from penstock.passes.sparse.calls import SparseCall
from penstock.runtime.sparse.units import PooledUnits
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.schedule.facts.model import SparseRead


@dataclass
class Bringing:
    """One operator whose operands are brought: what is held for it, its steps, what is left of the pool.

    `may_be_whole` tells that the step of the module may bring from now on what the operator reads whole, and
    `whole` is the storage that a step of the operator's own brings: one step is open at a time.
    """

    current: Any
    held: ExitStack
    seen: list[Seen]
    left: int
    may_be_whole: bool
    whole: int | None = None

    def note(self, step: Seen, numbers: Sequence[int] = ()) -> None:
        """Take note of a step of the operator."""
        step.numbers |= set(numbers)
        if step not in self.seen:
            self.seen.append(step)


@dataclass
class Planned:
    """What a plan has for operators: by order, the steps that read from its pool, and from its arena.

    `fixed` are the addresses of storages in memory throughout, `arena` and `pool` those of others.
    """

    weights: LoadedWeights
    by_units: list[dict[tuple[str, int, str], list[tuple[int, SparseRead]]]] = field(default_factory=list)
    whole: list[dict[tuple[str, int], list[int]]] = field(default_factory=list)
    probed: list[frozenset[int]] = field(default_factory=list)
    calls: dict[tuple[int, int], SparseCall] = field(default_factory=dict)
    fixed: dict[int, int] = field(default_factory=dict)
    arena: dict[int, int] = field(default_factory=dict)
    pool: dict[int, int] = field(default_factory=dict)

    @property
    def units(self) -> PooledUnits:
        assert self.weights.units is not None, "a step reads units and the plan has no pool"
        return self.weights.units

    def call(self, graph: int, number: int, read: SparseRead) -> SparseCall:
        """Return what runs the operator of a step on units of the pool."""
        if (graph, number) not in self.calls:
            self.calls[graph, number] = SparseCall(operator_of(read), read, self.units, graph, number)
        return self.calls[graph, number]

    def step_of(self, current: Any, path: str, read: SparseRead) -> tuple[int, SparseRead] | None:
        """Return the step of the plan that reads from the pool as an operator does now, or None."""
        if current.order is None:
            return None
        key, graph = (path, read.storage, read.operator), self.by_units[current.order]
        steps = graph.get(key)
        if steps is None and read.operator == SLICES:
            steps = next((step for (_, s, _), step in graph.items() if s == read.storage), None)
        if steps is None:
            return None
        turns = current.reads.turns
        turn = turns.get(key, 0)
        turns[key] = turn + 1
        number, known = steps[turn % len(steps)]
        return (number, known) if read.operator == SLICES or matrix(known) == matrix(read) else None

    def hold(self, number: int, read: SparseRead, numbers: Sequence[int], to: Bringing) -> bool:
        """Have units in the pool for a step; returns whether they fit into what is left of it."""
        pool, graph = self.units.pool, to.current.order
        edges = [pool.granules(read, unit) for unit in numbers]
        nbytes = sum(stop - first for first, stop in edges) * pool.granule
        if not numbers or nbytes > to.left:
            return False
        to.left -= nbytes
        self.units.ask(graph, number, numbers)
        to.held.enter_context(self.units.hold(graph, number, numbers, alone=True))
        return True

    def takes_step(self, current: Any, path: str, storage: int) -> bool:
        """Have a storage in the arena, in a step of the operator's own; returns whether the plan has one.

        Operators that read the same storage one after another, as in a loop, are one step.
        """
        reads = current.reads
        if current.order is None or current.open is not None:
            return False
        if reads.held is not None and reads.held[1] == (path, storage):
            return True
        numbers = self.whole[current.order].get((path, storage))
        if numbers is None:
            return False
        self.release(current)
        turn = reads.turns.get((path, storage), 0)
        reads.turns[path, storage] = turn + 1
        number, streamer = numbers[turn % len(numbers)], self.weights.streamer
        if number in self.probed[current.order] and streamer is not None:
            streamer.acquire(current.order, number)
            reads.held = number, (path, storage)
        return True

    def release(self, current: Any) -> None:
        """Give back what an operator of its own step has read whole, before another step begins."""
        number, current.reads.held = current.reads.held, None
        streamer = self.weights.streamer
        if number is not None and streamer is not None:
            streamer.release(current.order, number[0])


def open_planned(
    weights: LoadedWeights, orders: Sequence[Order], facts: ModuleFacts, roots: Mapping[int, Root]
) -> Planned:
    """Return what a plan has for operators; `orders` are those of its traces."""
    plan = weights.plan
    planned = Planned(weights)
    for order, trace in zip(orders, plan.traces, strict=True):
        by_units: dict[tuple[str, int, str], list[tuple[int, SparseRead]]] = {}
        whole: dict[tuple[str, int], list[int]] = {}
        for number, (path, read) in enumerate(zip(order.owners, order.operators, strict=False)):
            if read is None:
                continue
            served = [
                read_of_step
                for read_of_step in trace.steps[number].sparse
                if plan.pool is not None and plan.pool.has(read_of_step)
            ]
            for read_of_step in served:
                by_units.setdefault((path, read_of_step.storage, read_of_step.operator), []).append(
                    (number, read_of_step)
                )
            if not served:
                s = read if isinstance(read, int) else read.storage
                whole.setdefault((path, s), []).append(number)
        planned.by_units.append(by_units)
        planned.whole.append(whole)
        planned.probed.append(frozenset(weights.probed(trace.graph)))
    names = {part.storage: name for name, part in facts.parts.items()}
    for s in roots:
        address = weights.tensors[names[s]].data_ptr() - facts.parts[names[s]].offset
        (planned.fixed if s in plan.outside else planned.arena)[s] = address
        if plan.pool is not None and plan.pool.layout[s] >= 0:
            planned.pool[s] = planned.units._address(s)
    return planned

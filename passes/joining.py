"""Joins methods of one model that were annotated separately into one program.

`annotate` identifies weights by their memory. Facts that were read from storage have no memory, so here
weights of equal names are the same weight, which is true if all methods come from one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from penstock.passes.annotate import Annotated
from penstock.passes.sparse.tiles import with_common_units
from penstock.passes.trace import PRESET_CPU, sum_of
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Kind, Step, Storage, Trace, Weight, Work
from penstock.schedule.facts.parts import read_together, tensor_of
from penstock.schedule.payload.codec import Payload

_STRENGTH: Mapping[Kind, int] = {"streamable": 0, "returned": 1, "mutable": 2}
"""The order of kinds: a storage has the strongest kind that it has in any method."""


def join_methods(annotated: Mapping[str, Annotated]) -> Annotated:
    """Returns one program made of several programs of one method each.

    The keys of `annotated` are the names of the methods, which are numbered in this order. Raises PassError
    where weights of one name differ, or are one storage in one method and two in another.
    """
    joined = _Catalog()
    numbers = {name: joined.add(one) for name, one in annotated.items()}
    first = next(iter(annotated.values())).payload
    methods, traces = [], []
    for graph, (name, one) in enumerate(annotated.items()):
        (method,), (trace,) = one.payload.methods, one.payload.traces
        methods.append(replace(method, name=name, graph=graph))
        renamed = replace(trace, method=name, graph=graph)
        traces.append(_without_kept(_renumbered(renamed, numbers[name]), joined))
    payload = Payload(
        lowering="none",
        torch=first.torch,
        storages=tuple(joined.storages),
        weights=tuple(joined.weights.values()),
        methods=tuple(methods),
        traces=with_common_units(traces),
    )
    return Annotated(
        payload,
        tuple(joined.values),
        frozenset().union(*(one.computed for one in annotated.values())),
        programs=_by_name(annotated, "programs"),
        propagated=_by_name(annotated, "propagated"),
        codes=_by_name(annotated, "codes"),
    )


def _by_name(annotated: Mapping[str, Annotated], field: str) -> dict[str, Any]:
    """The values of a field that is a mapping by method, under the new names of the methods."""
    return {name: held for name, one in annotated.items() for held in getattr(one, field).values()}


class _Catalog:
    """The weights and storages of all methods added so far."""

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}
        self.storages: list[Storage] = []
        self.values: list[torch.Tensor] = []
        self._numbers: dict[str, int] = {}

    def add(self, annotated: Annotated) -> dict[int, int]:
        """Adds the weights of a method; returns the number in this catalog of each of its storages."""
        payload = annotated.payload
        names = _names(payload.weights)
        numbers = {
            s: self._number(names[s], storage, annotated.values[s])
            for s, storage in enumerate(payload.storages)
        }
        for weight in payload.weights:
            parts = tuple(replace(part, storage=numbers[part.storage]) for part in weight.parts)
            placed = replace(weight, parts=parts)
            if self.weights.setdefault(weight.fqn, placed) != placed:
                raise PassError(
                    f"two methods have weights called {weight.fqn!r} that differ: export them from one model"
                )
        return numbers

    def _number(self, names: Iterable[str], storage: Storage, value: torch.Tensor) -> int:
        """Returns the number of the storage in which the tensors `names` lie, which is new or known."""
        known = {self._numbers[name] for name in names if name in self._numbers}
        if len(known) > 1:
            raise PassError(
                f"{', '.join(names)} share their memory in one method and not in another: export the methods "
                "from one model"
            )
        number = known.pop() if known else len(self.storages)
        self._numbers |= dict.fromkeys(names, number)
        if number == len(self.storages):
            self.storages.append(storage)
            self.values.append(value)
            return number
        before = self.storages[number]
        kind = max(before.kind, storage.kind, key=_STRENGTH.__getitem__)
        if storage.nbytes > before.nbytes:
            self.values[number] = value
        self.storages[number] = Storage(max(before.nbytes, storage.nbytes), kind)
        return number


def _names(weights: Iterable[Weight]) -> dict[int, list[str]]:
    """The names of the tensors that lie in each storage."""
    names: dict[int, list[str]] = {}
    for weight in weights:
        for part in weight.parts:
            names.setdefault(part.storage, []).append(tensor_of(weight, part))
    return names


def _renumbered(trace: Trace, numbers: Mapping[int, int]) -> Trace:
    def renumbered(step: Step) -> Step:
        views = (replace(one.view, storage=numbers[one.storage]) for one in step.sparse)
        sparse = tuple(replace(one, view=view) for one, view in zip(step.sparse, views, strict=True))
        return replace(step, reads=tuple(sorted(numbers[read] for read in step.reads)), sparse=sparse)

    return replace(trace, steps=tuple(map(renumbered, trace.steps)))


def _without_kept(trace: Trace, catalog: _Catalog) -> Trace:
    """The trace without reads of storages that another method writes or returns, which never stream.

    A step that reads nothing else becomes compute before the step behind it.
    """
    steps: list[Step] = []
    lead = Work()
    for step in trace.steps:
        reads = tuple(read for read in step.reads if catalog.storages[read].kind == "streamable")
        lead = sum_of(lead, step.lead_work)
        if reads:
            sparse = tuple(one for one in step.sparse if one.storage in reads)
            steps.append(replace(step, reads=reads, lead_work=lead, sparse=sparse))
            lead = Work()
        else:
            lead = sum_of(lead, step.read_work)
    joined = replace(trace, steps=tuple(steps), tail_work=sum_of(lead, trace.tail_work))
    return with_times(read_together(joined, tuple(catalog.weights.values())), PRESET_CPU)

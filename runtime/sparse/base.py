"""What a program asks of the pool of a plan, whichever engine brings the units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

import torch

from penstock.runtime.arena.base import tensor_at
from penstock.runtime.sparse.certified import repeats_bits
from penstock.runtime.stream.interface import Counters
from penstock.schedule.facts.errors import PlanError, StreamError
from penstock.schedule.facts.model import SparseRead
from penstock.schedule.plan import Plan
from penstock.schedule.sparse.routes import routed_reads


class RecordsRoutes(Protocol):
    """Who is told what calls ask for."""

    def begin(self) -> None:
        """Begin a call."""

    def ask(self, graph: int, step: int, units: Sequence[int]) -> None:
        """Note what a step of the call asks for."""


class PooledUnits(ABC):
    """The units of a plan's pool, each at its address in memory of its storage when a call needs it.

    One call at a time runs; `recorder` is told what it asks for. `names` are those of the storages.
    """

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        if plan.pool is None:
            raise PlanError("the plan has no pool: nothing of it is read by units")
        self.pool = plan.pool
        self.routed = routed_reads(plan.traces, self.pool.layout, names)
        self.recorder: RecordsRoutes | None = None

    def tensor(self, read: SparseRead) -> torch.Tensor:
        """Returns the tensor of a read, of which only the units have content that `hold` holds."""
        with torch.inference_mode(False):
            return tensor_at(self._address(read.storage), read.view)

    def begin(self) -> None:
        """Begin a pass; what a pass before has left unclear is dropped."""
        if self.recorder is not None:
            self.recorder.begin()

    def ask(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        """Note all units that a step's read asks for, ascending, and cut them into parts that fit."""
        if self.recorder is not None:
            self.recorder.ask(graph, step, units)
        return self._parts(graph, step, units)

    def certify(self, read: SparseRead, parts: Sequence[Sequence[int]], arguments: Sequence[Any]) -> None:
        """Return if a product in these parts has the bits of the whole. Raises StreamError if it has not."""
        inputs, bias = arguments[0], len(arguments) > 2 and arguments[2] is not None
        rows = inputs.numel() // inputs.shape[-1] if inputs.numel() else 0
        edges = [*(part[0] for part in parts), read.count]
        if rows and not repeats_bits(read, edges, rows, bias=bias):
            raise StreamError(
                f"a product of {rows} rows with a weight of {prod(read.view.shape)} elements cannot be "
                "computed by tiles with the bits of the whole: give a budget that holds this weight, or "
                "fewer rows"
            )

    @abstractmethod
    def hold(
        self, graph: int, step: int, units: Sequence[int], *, alone: bool
    ) -> AbstractContextManager[None]:
        """Have the units of one part in memory; `alone` tells that there is no other part.

        Raises SourceError where a unit cannot be read; the next call reads it again.
        """

    @abstractmethod
    def _parts(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        """Note what a step's read asks for, and cut it into parts that fit."""

    @abstractmethod
    def _address(self, storage: int) -> int:
        """The address of a storage's first byte."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """What was done so far."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of the granules of the units that are in memory or on their way."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that `held_bytes` has been."""

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """The address space of the units, from its start to its stop."""

    @property
    @abstractmethod
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the readers, which cannot wait for themselves."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the readers, and give all memory back. It may be called again."""

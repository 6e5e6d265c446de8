"""Reads of single slices: which slices of a tensor an operator may need, and the memory they come and go in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from penstock.schedule.facts.catalog import ITEM_SIZES, STRICT, Part, part_nbytes


@dataclass(frozen=True)
class SparseRead:
    """A read that needs of a tensor only the slices on dimension 0, its units, that an operand names.

    `view` is the tensor as the operator is given it, a weight or a view of one, whose units do not overlap.
    `operator` is the operator's name, which says how the operand names units (`passes/sparse/contracts.py`).
    Reads of one method with the same `route` have the same operand. A call of the exported sizes names at
    most `asked` different units.
    """

    __pydantic_config__: ClassVar = STRICT
    view: Part
    operator: str
    route: int
    asked: int

    @property
    def storage(self) -> int:
        return self.view.storage

    @property
    def count(self) -> int:
        """The number of units."""
        return self.view.shape[0]

    @cached_property
    def unit_stride(self) -> int:
        """Bytes from the start of a unit to that of the next."""
        return self.view.stride[0] * ITEM_SIZES[self.view.dtype]

    @cached_property
    def unit_nbytes(self) -> int:
        """Bytes from the first to the last item of a unit."""
        return part_nbytes(replace(self.view, shape=self.view.shape[1:], stride=self.view.stride[1:]))

    def unit(self, number: int) -> tuple[int, int]:
        """The bytes of a unit: start and stop, counted from the start of the storage."""
        start = self.view.offset + number * self.unit_stride
        return start, start + self.unit_nbytes


@dataclass(frozen=True)
class Pool:
    """Memory of at most `nbytes`, beside the arena, in which units come and go as calls ask for them.

    `layout[s]` is where storage s begins in the address space of the pool, in bytes, or -1 if its units are
    not in it. Memory is taken and given back in granules of `granule` bytes, counted from offset 0; two units
    that share one are counted together.

    `expected_ns` are the nanoseconds that a pass of each schedule is expected to wait for units, if all units
    are asked for equally often, and `worst_ns` those of a pass that finds none of its units there.
    """

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    granule: int
    layout: tuple[int, ...]
    expected_ns: tuple[int, ...] = ()
    worst_ns: tuple[int, ...] = ()

    def has(self, read: SparseRead) -> bool:
        """Tells whether the units of a read are in the pool."""
        return self.layout[read.storage] >= 0

    def granules(self, read: SparseRead, number: int) -> tuple[int, int]:
        """The granules that hold a unit: the first one, and the one behind the last."""
        start, stop = read.unit(number)
        place = self.layout[read.view.storage]
        return (place + start) // self.granule, -(-(place + stop) // self.granule)

    def filled(self, read: SparseRead, number: int, nbytes: int) -> tuple[int, int]:
        """The bytes that bringing a unit reads: its granules, as far as its storage of `nbytes` has bytes."""
        first, stop = self.granules(read, number)
        place = self.layout[read.storage]
        return max(first * self.granule, place), min(stop * self.granule, place + nbytes)

"""Reads of single slices: which slices of a tensor an operator may need, and the memory they come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from penstock.schedule.facts.catalog import ITEM_SIZES, STRICT, Part, part_nbytes


@dataclass(frozen=True)
class Computed:
    """A tensor that a program computes from units, each slice on dimension 0 from one of them."""

    __pydantic_config__: ClassVar = STRICT
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class SparseRead:
    """A read that needs of a tensor only the slices on dimension 0, its units, that an operand names.

    `view` is the tensor as the operator is given it, a weight or a view of one, whose units do not overlap.
    `operator` is the operator's name, which says how the operand names units (`passes/sparse/contracts.py`).
    Reads of one method with the same `route` have the same operand. A call of the exported sizes names at
    most `asked` different units.

    With `tiles`, every call needs all units, which are the tiles of a product that may be computed one after
    another. If `slices` is more than 1, a unit is a run of so many slices: the operator is given the tensor
    whose dimension 0 is the first two of `view` in one.

    If `computed` is there, the operator is given that in the place of `view`, a slice at a time.
    """

    __pydantic_config__: ClassVar = STRICT
    view: Part
    operator: str
    route: int
    asked: int
    slices: int = 1
    tiles: bool = False
    computed: Computed | None = None

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

    @property
    def units(self) -> tuple[int, int, int, int]:
        """Equal for two reads of a storage that mean the same bytes by the same number of a unit."""
        return self.count, self.view.offset, self.unit_stride, self.unit_nbytes

    @property
    def dense(self) -> bool:
        """Tells whether calls of the exported sizes may ask for all units, though not as tiles."""
        return not self.tiles and self.asked >= self.count

    def unit(self, number: int) -> tuple[int, int]:
        """The bytes of a unit: start and stop, counted from the start of the storage."""
        start = self.view.offset + number * self.unit_stride
        return start, start + self.unit_nbytes


@dataclass(frozen=True)
class Pool:
    """Memory of at most `nbytes`, beside the arena, in which units come and go as calls ask for them.

    `layout[s]` is where storage s begins in the address space of the pool, in bytes, or -1 if its units are
    not in it. All reads of a storage that it serves have the same units; reads by tiles are served only with
    `tiles`, and dense ones only with `dense`. Memory is taken and given back in granules of
    `granule` bytes, counted from offset 0; what two units share is counted once.

    `expected_ns[i]` are the nanoseconds that a pass of the plan's trace number i is expected to wait for
    units, if all are asked for equally often, and `worst_ns[i]` those of a pass that finds none of them.
    Both are empty if nobody has estimated them.
    """

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    granule: int
    layout: tuple[int, ...]
    expected_ns: tuple[int, ...] = ()
    worst_ns: tuple[int, ...] = ()
    tiles: bool = False
    dense: bool = True

    def has(self, read: SparseRead) -> bool:
        """Tells whether the pool serves a read."""
        served = self.layout[read.storage] >= 0
        return served and (self.tiles or not read.tiles) and (self.dense or not read.dense)

    @property
    def storages(self) -> tuple[int, ...]:
        """The storages whose units are in the pool."""
        return tuple(s for s, place in enumerate(self.layout) if place >= 0)

    def whole(self, reads: Sequence[int], sparse: Sequence[SparseRead]) -> tuple[int, ...]:
        """All that a step reads, which has `reads` of the arena: what the pool serves of `sparse`, too."""
        return tuple(sorted({*reads, *(read.storage for read in sparse if self.has(read))}))

    def granules(self, read: SparseRead, number: int) -> tuple[int, int]:
        """The granules that hold a unit: the first one, and the one behind the last."""
        start, stop = read.unit(number)
        place = self.layout[read.view.storage]
        return (place + start) // self.granule, -(-(place + stop) // self.granule)

    def bytes_in(self, granules: tuple[int, int], storage: int, nbytes: int) -> tuple[int, int]:
        """The bytes of a storage of `nbytes` in granules, from the first to one behind the last."""
        (first, stop), place = granules, self.layout[storage]
        return max(first * self.granule, place), min(stop * self.granule, place + nbytes)

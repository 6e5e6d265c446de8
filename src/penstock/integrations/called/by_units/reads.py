"""What a pass reads: the calls of modules, and operators that read units or a whole weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from penstock.integrations.called.by_units.watched import Form
from penstock.integrations.called.facts import Order, StepTime
from penstock.passes.sparse.calls import find_operator
from penstock.passes.sparse.contracts import CONTRACTS, LINEAR, MOST_RESULT, tiled
from penstock.schedule.facts.model import ITEM_SIZES, Part, SparseRead, part_nbytes
from penstock.schedule.sparse.pool import LEAST_UNIT

SLICES = "aten.index_select.default"
"""The operator that stands for reads of slices by any operator: it is told which units."""


_NO_TIME = StepTime(0, 0)


@dataclass(eq=False, slots=True)
class Seen:
    """A step of a pass: the call of a module, or an operator that reads units, or a whole storage.

    `read` says which; reads of slices have asked for the units `numbers`.
    """

    path: str
    owner: str
    time: StepTime = _NO_TIME
    read: SparseRead | int | None = None
    numbers: frozenset[int] = frozenset()

    def as_read(self) -> SparseRead | int | None:
        """Return the read with the number of units that were asked for."""
        if isinstance(self.read, SparseRead) and self.numbers:
            return replace(self.read, asked=len(self.numbers))
        return self.read


@dataclass(eq=False)
class PassReads:
    """What one pass has read: routes by what names units, reads of slices, turns of reads.

    `kept` has what routes name by id, and `held` the step of an operator that has a storage in the arena.
    `whole` says that the step of a module has read whole what was watched.
    """

    routes: dict[object, int] = field(default_factory=dict)
    slices: dict[tuple[str, int], Seen] = field(default_factory=dict)
    turns: dict[object, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    held: tuple[int, tuple[str, int]] | None = None
    whole: bool = False

    def is_like(self, order: Order, steps: Sequence[Seen], least: int) -> bool:
        """Tell whether steps ask for about as many units as those of an order: half to twice as many.

        Other numbers count where they change the bytes that the order asks for by more than `least`. A prompt
        and a token ask for other numbers of rows of an embedding, and one plan serves both.
        """
        differing = 0
        for read, seen in zip(order.operators, steps, strict=False):
            asked = seen.as_read()
            if isinstance(read, SparseRead) and isinstance(asked, SparseRead):
                low, high = sorted((read.asked, asked.asked))
                differing += (high - low) * read.unit_nbytes if high > 2 * low else 0
        return differing <= least


def operator_of(read: SparseRead) -> torch._ops.OpOverload:
    operator = find_operator(read.operator)
    assert operator is not None, "an operator was called that nothing has defined"
    return operator


def matrix(read: SparseRead) -> object:
    """Return what two reads have in common whose operators are given the same tensor."""
    view = read.view
    if read.slices > 1:
        return (view.shape[0] * view.shape[1], *view.shape[2:]), view.stride[1:], view.offset, view.dtype
    return view.shape, view.stride, view.offset, view.dtype


def read_of(form: Form, view: Part, nbytes: int, least: int) -> SparseRead | None:
    """Return the read of an operator that names units, or None. Heads of `least` bytes have tiles."""
    contract, arguments = CONTRACTS[form.operator], form.arguments
    index = contract.operands(arguments)[1]
    if contract.index is None:
        tiles = tiled(view) if part_nbytes(view) == nbytes >= least else None
        rows = arguments[0].numel() // max(1, arguments[0].shape[-1])
        if tiles is None or rows * prod(view.shape[:1]) * ITEM_SIZES[view.dtype] > MOST_RESULT:
            return None
        return SparseRead(tiles, LINEAR, 0, tiles.shape[0], slices=tiles.shape[1], tiles=True)
    if not view.shape or 0 in view.shape or index.dtype not in (torch.int64, torch.int32):
        return None
    asked = min(view.shape[0], arguments[contract.rows].shape[0] if contract.ends else index.numel())
    read = SparseRead(view, form.operator, 0, asked)
    return read if has_units(read, nbytes) else None


def has_units(read: SparseRead, nbytes: int) -> bool:
    fits = read.view.offset >= 0 and read.count > 1 and read.unit(read.count - 1)[1] <= nbytes
    return fits and LEAST_UNIT <= read.unit_nbytes <= read.unit_stride


def units_in(places: Sequence[tuple[int, int]], read: SparseRead) -> list[int] | None:
    """Return the units in which spans of a storage have bytes, ascending; None for bytes beside units."""
    numbers: set[int] = set()
    for start, stop in places:
        first, last = start - read.view.offset, stop - read.view.offset
        if first == last:
            continue
        if first < 0 or last > read.count * read.unit_stride:
            return None
        numbers |= set(range(first // read.unit_stride, -(-last // read.unit_stride)))
    return sorted(numbers)

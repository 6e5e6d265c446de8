"""Products by tiles: a linear whose weight is large may be computed in runs of its output rows.

A tile is a unit that every call asks for. Kernels choose how they work by sizes, so a run of rows need not
have the bits of the whole: `runtime/sparse/trust.py` computes both before the first call of each size. A
table that is also read by rows, as a head that is tied to an embedding, has the same units for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from penstock.passes.graph.propagation import storages_of
from penstock.schedule.facts.model import ITEM_SIZES, Part, SparseRead, Trace

LINEAR = "aten.linear.default"

LEAST = 64 << 20
"""Bytes. Smaller weights are read whole."""

MOST_RESULT = 16 << 20
"""Bytes. Larger results are not computed by tiles: certifying them would take memory that nobody planned."""

_LARGEST, _TIED, _FEWEST = 1 << 20, 128 << 10, 16
"""Bytes of a tile at most, of one in which rows are read too, and its fewest rows."""


def linears(graph: fx.Graph) -> Iterator[fx.Node]:
    """The products of a propagated graph that are computed by a weight's rows."""
    for node in graph.nodes:
        called = node.op == "call_function" and str(node.target) == LINEAR
        if called and len(node.args) > 1 and not node.kwargs:
            weight = node.args[1]
            value = weight.meta.get("val") if isinstance(weight, fx.Node) else None
            if isinstance(value, torch.Tensor) and value.dim() == 2 and len(storages_of(value)) == 1:
                yield node


def tiled(view: Part) -> Part | None:
    """The tiles of a matrix as slices of a view of three dimensions; None where it has none."""
    if len(view.shape) != 2 or view.stride != (view.shape[1], 1):
        return None
    return _grouped(view, _LARGEST)


def _grouped(view: Part, most: int) -> Part | None:
    """A matrix as runs of rows of at most `most` bytes; None where its rows do not divide into such."""
    (rows, columns), item_bytes = view.shape, ITEM_SIZES[view.dtype]
    size = rows & -rows  # the largest power of two that divides them
    while size > _FEWEST and size * columns * item_bytes > most:
        size //= 2
    if size < _FEWEST or rows // size < 2:
        return None
    return replace(view, shape=(rows // size, size, columns), stride=(size * columns, columns, 1))


def flat(view: Part) -> Part:
    """The matrix of which a view has runs of rows."""
    count, size, columns = view.shape
    return replace(view, shape=(count * size, columns), stride=(columns, 1))


def with_common_units(traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """The traces, in which a storage that is read both by tiles and by rows has the same units for both."""
    reads = [read for trace in traces for step in trace.steps for read in step.sparse]
    by_tiles = {read.storage: read.view for read in reads if read.operator == LINEAR}
    by_rows = {read.storage for read in reads if read.operator != LINEAR}
    shared: dict[int, Part] = {}
    for s in by_tiles.keys() & by_rows:
        if (view := _grouped(flat(by_tiles[s]), _TIED)) is not None:
            shared[s] = view

    def regrouped(read: SparseRead) -> SparseRead:
        view = shared.get(read.storage)
        if view is None or (flat(read.view) if read.slices > 1 else read.view) != flat(view):
            return read
        count = view.shape[0]
        asked = count if read.tiles else min(read.asked, count)
        return replace(read, view=view, asked=asked, slices=view.shape[1])

    return tuple(
        replace(
            trace,
            steps=tuple(
                replace(step, sparse=tuple(map(regrouped, step.sparse))) if step.sparse else step
                for step in trace.steps
            ),
        )
        for trace in traces
    )

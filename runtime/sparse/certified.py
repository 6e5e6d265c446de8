"""Certifies that a linear computed by tiles has the bits of the whole, at its sizes, before it is relied on.

Kernels choose how they work by the sizes of a product, so a run of rows of the weight need not give the bits
that the whole gives. Both are computed, on a weight of the full size that takes the memory of one tile: all
of its tiles are the same pages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod

import torch
from torch.nn.functional import linear

from penstock.passes.sparse.tiles import MOST_RESULT
from penstock.runtime.arena.base import dtype_of, tensor_at
from penstock.runtime.system.memory import PAGE, Reservation
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.model import Part, SparseRead


def repeats_bits(read: SparseRead, edges: Sequence[int], rows: int, *, bias: bool) -> bool:
    """Tells whether a product of `rows` rows has the same bits when it is computed in parts.

    `edges` are the first tiles of the parts, and the number of all. Each case is computed once a process.
    """
    return _repeats(read.view, tuple(edges), rows, bias, torch.get_num_threads())


@functools.cache
def _repeats(view: Part, edges: tuple[int, ...], rows: int, bias: bool, threads: int) -> bool:
    count, size, columns = view.shape
    dtype = dtype_of(view)
    nbytes = size * columns * dtype.itemsize
    if nbytes % PAGE or rows * count * size * dtype.itemsize > MOST_RESULT or not dtype.is_floating_point:
        return False
    generator = torch.Generator().manual_seed(0)
    tile = (torch.randn(size, columns, generator=generator) * columns**-0.5).to(dtype)
    inputs = torch.randn(rows, columns, generator=generator).to(dtype)
    added = torch.randn(count * size, generator=generator).to(dtype) if bias else None
    matrix = Part("", view.dtype, (count * size, columns), (columns, 1), 0, 0)
    with (
        suppress(PenstockError, OSError, RuntimeError),
        torch.inference_mode(False),
        torch.no_grad(),
        Reservation(prod(view.shape) * dtype.itemsize) as memory,
    ):
        _map_again(memory, tile, count)
        weight = tensor_at(memory.address, matrix)
        whole = linear(inputs, weight, added)
        runs = [slice(first * size, stop * size) for first, stop in pairwise(edges)]
        return all(
            torch.equal(whole[:, run], linear(inputs, weight[run], None if added is None else added[run]))
            for run in runs
        )
    return False


def _map_again(memory: Reservation, tile: torch.Tensor, count: int) -> None:
    """Map the memory of a tile `count` times, one behind the other."""
    descriptor = os.memfd_create("penstock-tile")
    try:
        data = tile.view(torch.uint8).numpy().tobytes()
        while data:
            data = data[os.write(descriptor, data) :]
        for number in range(count):
            memory.map_file(number * tile.nbytes, tile.nbytes, descriptor, 0)
    finally:
        os.close(descriptor)

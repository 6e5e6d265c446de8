"""Is an operator what its contract says: tried once on this machine, and remembered."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.nn.functional import linear

from penstock.passes.sparse.calls import Rounds, find_operator, run_in_rounds
from penstock.passes.sparse.contracts import CONTRACTS, LINEAR, MOST_RESULT, Contract
from penstock.passes.weights.lifted import same_bytes
from penstock.runtime.arena.reading import dtype_of, tensor_at
from penstock.runtime.system.memory import MADV_NOHUGEPAGE, PAGE, Reservation, cached_pages, hint, round_up
from penstock.schedule.facts.errors import PenstockError, PlanError, StreamError
from penstock.schedule.facts.model import ITEM_SIZES, Decisions, Part, SparseRead, Step, Trace


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


_log = logging.getLogger(__name__)

_LINE = 64
"""Bytes. Memory that torch takes begins at a multiple of this; kernels may add up otherwise elsewhere."""

_LARGEST = 16 << 20
"""Bytes. Larger units are tried at a size that is at most this, since a trial takes several times as much."""


def trusted(traces: Iterable[Trace]) -> tuple[Trace, ...]:
    """The traces, in which only those reads are by units whose operators were seen to read nothing else."""
    return tuple(
        replace(
            trace,
            steps=tuple(
                replace(step, sparse=tuple(read for read in step.sparse if _trusted(read, step)))
                if step.sparse
                else step
                for step in trace.steps
            ),
        )
        for trace in traces
    )


def _trusted(read: SparseRead, step: Step) -> bool:
    if read.operator == LINEAR:
        rows = step.read_work.flops // (2 * prod(read.view.shape)) or 1
        third = max(1, read.count // 3)
        return repeats_bits(read, (0, 1, third, read.count), rows, bias=False)
    return reads_units_only(read)


def check_trusted(plan: Decisions) -> None:
    """Raise PlanError if the pool of a plan serves a read that was not seen to read nothing else here.

    The plan may be of another machine, another torch, or another number of threads.
    """
    for trace in plan.traces if plan.pool else ():
        for step in trace.steps:
            for read in step.sparse:
                if plan.pool is not None and plan.pool.has(read) and not _trusted(read, step):
                    raise PlanError(
                        f"the plan reads units of a weight in {step.name}, and {read.operator} was not seen "
                        "to read only those in this process: make a plan on this machine"
                    )


def check_experts(trace: Trace) -> None:
    """Raise StreamError if experts are computed one at a time for a product that needs all of them.

    The program was compiled where that gave the bits of all of them together, which is tried again here.
    """
    for step in trace.steps:
        for read in step.sparse:
            if read.computed is not None and not _trusted(read, step):
                raise StreamError(
                    f"the program computes experts one at a time in {step.name}, and {read.operator} was not "
                    "seen to give the bits of all of them together in this process: compile it on this "
                    "machine, for as many threads"
                )


def reads_units_only(read: SparseRead) -> bool:
    """Tells whether the operator of a read touches only units that its operand names, and repeats its bits.

    Each operator is tried once a process for each dtype, geometry of units, and number of threads. Of large
    units the longest dimensions are halved, which leaves them in the same order in memory.
    """
    if read.operator not in CONTRACTS:
        return False
    call = find_operator(read.operator)
    if call is None:
        _log.warning("%s is defined nowhere in this process: its weights are read whole", read.operator)
        return False
    part = replace(read.view, storage=0, offset=read.view.offset % PAGE)
    if read.computed:  # one slice after another, from slices that are named: it is given no others
        part = Part("", read.computed.dtype, read.computed.shape, read.computed.stride, 0, 0)
    unit = SparseRead(part, "", 0, 0, read.slices).unit_nbytes
    if prod(part.shape[1:]) * ITEM_SIZES[part.dtype] > unit:
        return False  # elements share memory, so that a trial could take any amount of it
    if CONTRACTS[read.operator].ends and not _in_lines(part, alone=read.computed is not None):
        _log.info("%s is not tried: its results or slices begin between lines of memory", read.operator)
        return False
    view = _shortened(part, read.slices)
    return _tried(read.operator, call, view, read.slices, torch.get_num_threads())


def _in_lines(stack: Part, *, alone: bool) -> bool:
    """Tells whether the memory of a part of a product begins where that of all of it allows it to.

    That is memory for some of the result's rows, and for a single slice of the stack if it stands `alone`.
    """
    nbytes = ITEM_SIZES[stack.dtype]
    return not (stack.shape[-1] * nbytes % _LINE or (alone and stack.stride[0] * nbytes % _LINE))


@functools.cache
def _tried(operator: str, call: torch._ops.OpOverload, view: Part, slices: int, threads: int) -> bool:
    contract = CONTRACTS[operator]
    read = SparseRead(view, operator, 0, 0, slices)
    try:
        passed = _passes(contract, call, read)
    except (PenstockError, RuntimeError, OSError, IndexError, TypeError) as error:
        _log.info("%s is not tried: %s", operator, error)
        return False
    if not passed:
        _log.warning("%s reads more than its operand names: its weights are read whole", operator)
    return passed


def _shortened(view: Part, slices: int) -> Part:
    """The geometry, or if its units are large that of units without gaps whose dimensions are halved."""
    if slices > 1:  # of a table, whose slices are rows
        return view
    shape = list(view.shape)
    from_last = sorted(range(len(shape)), key=lambda d: (view.stride[d], -d))
    while SparseRead(view, "", 0, 0, slices).unit_nbytes > _LARGEST and max(shape[1:]) > 1:
        longest = max(range(1, len(shape)), key=shape.__getitem__)
        shape[longest] //= 2
        stride, step = [0] * len(shape), 1
        for dimension in from_last:
            stride[dimension], step = step, step * shape[dimension]
        view = replace(view, shape=tuple(shape), stride=tuple(stride))
    return view


def _passes(contract: Contract, call: torch._ops.OpOverload, read: SparseRead) -> bool:
    """Run the operator for two units, and compare the pages touched before and after."""
    named = sorted({read.count // 3, read.count - 1})
    end = round_up(read.unit(read.count - 1)[1], PAGE)
    with Reservation(end + PAGE) as memory, torch.inference_mode(False), torch.no_grad():
        memory.map_anonymous(0, memory.nbytes)
        hint(memory.address, memory.nbytes, MADV_NOHUGEPAGE)
        if not _sees_reads(memory.address + end):
            _log.info("this system does not tell which pages are read: all weights are read whole")
            return False
        tensor = tensor_at(memory.address, read.view)
        generator = torch.Generator().manual_seed(0)
        for number in named:
            unit = tensor[number]
            unit.copy_(_random(unit.shape, unit.dtype, generator))
        parts = [[number] for number in named]
        if read.slices > 1:
            tensor, named = tensor.flatten(0, 1), [number * read.slices + 1 for number in named]
        arguments = _arguments(contract, tensor, named, generator)
        before = cached_pages(memory.address, end)
        result = call(*arguments)
        if cached_pages(memory.address, end) != before:
            return False
        if not contract.ends:  # what cannot be put together from rounds fails here
            rounds = Rounds(parts, lambda _: nullcontext(), read.slices)
            return same_bytes(run_in_rounds(contract, call, arguments, rounds), result)
        # The same rows with these units alone, together and one by one, give the same bits.
        _, ends = contract.operands(arguments)
        ends = ends[named]
        few = _like(tensor[named], tensor)
        alone = (arguments[0], *contract.replaced(arguments, few, ends)[1:])
        single = [
            call(*contract.narrowed(alone, slice(k, k + 1), slice(2 * k, 2 * k + 2)))
            for k in range(len(named))
        ]
        return all(torch.equal(result, other) for other in (call(*alone), torch.cat(single)))


def _sees_reads(address: int) -> bool:
    """Tells whether a read of a page of fresh memory shows, which takes none: it is the system's zeros."""
    before = cached_pages(address, PAGE)
    ctypes.string_at(address, 1)
    return (before, cached_pages(address, PAGE)) == ([False], [True])


def _like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The values in the order of dimensions that a tensor has in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return values.permute(order).contiguous().permute([order.index(d) for d in range(tensor.dim())])


def _random(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)


def _arguments(
    contract: Contract, tensor: torch.Tensor, named: list[int], generator: torch.Generator
) -> tuple[Any, ...]:
    """Arguments of a call that names these units, each for two rows."""
    if contract.ends:
        counts = torch.zeros(tensor.shape[0], dtype=torch.int32)
        counts[named] = 2
        rows = _random(torch.Size((2 * len(named), tensor.shape[1])), tensor.dtype, generator)
        return rows, tensor, counts.cumsum(0, dtype=torch.int32)
    index = torch.tensor([named[-1], *named])
    if contract.index == 2:
        return tensor, 0, index
    return contract.replaced((None, None), tensor, index)

"""The rules of a pool: which reads it serves, that each of their units fits, and that storages are apart."""

from __future__ import annotations

import math

from penstock.schedule.facts.catalog import ALIGNMENT, ITEM_SIZES, Storage
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Step
from penstock.schedule.facts.units import Pool, SparseRead

_MANY = 1 << 16


def arena_reads(step: Step, pool: Pool | None) -> tuple[int, ...]:
    """The storages that a step of the program reads from the arena: all but those that the pool serves."""
    served = {read.view.storage for read in step.sparse if pool is not None and _served(read, pool)}
    return tuple(s for s in step.reads if s not in served)


def check_pool(storages: tuple[Storage, ...], plan: Decisions) -> None:
    """Raise PlanError unless the pool of a plan can serve every read that it is to serve."""
    pool = plan.pool
    if pool is None:
        return
    if pool.granule < 1 or len(pool.layout) != len(storages):
        raise PlanError(
            f"expected a pool of granules with {len(storages)} offsets, got granules of {pool.granule} bytes "
            f"and {len(pool.layout)} offsets"
        )
    _check_places(storages, pool)
    units: dict[int, tuple[int, ...]] = {}
    for trace in plan.traces:
        for k, step in enumerate(trace.steps):
            where = f"graph {trace.graph}: step {k} ({step.name})"
            served = [read for read in step.sparse if _served(read, pool)]
            if len(served) > 1:
                raise PlanError(f"{where} reads units of {len(served)} storages, expected one at most")
            for read in served:
                stride, nbytes = _check_read(storages, pool, read, where)
                same = (read.view.shape[0], read.view.offset, stride, nbytes)
                if units.setdefault(read.view.storage, same) != same:
                    raise PlanError(
                        f"{where} reads other units of storage {read.view.storage} than an earlier step, and "
                        "the pool has one kind of them"
                    )


def _served(read: SparseRead, pool: Pool) -> bool:
    known = 0 <= read.view.storage < len(pool.layout)
    if not known or pool.layout[read.view.storage] < 0:
        return False
    return pool.tiles if read.tiles else pool.dense or read.asked < (*read.view.shape, 0)[0]


def _check_places(storages: tuple[Storage, ...], pool: Pool) -> None:
    """Storages are at their phases, and no two have bytes in one granule."""
    end = 0
    for place, s in sorted((place, s) for s, place in enumerate(pool.layout) if place >= 0):
        if storages[s].kind != "streamable" or place % ALIGNMENT != storages[s].phase:
            raise PlanError(
                f"storage {s}, which is {storages[s].kind}, lies at byte {place} of the pool, expected a "
                f"streamable one at {storages[s].phase} modulo {ALIGNMENT}"
            )
        if place // pool.granule < end:
            raise PlanError(f"storage {s} lies in a granule of the pool that another storage has bytes in")
        end = -(-(place + storages[s].nbytes) // pool.granule)


def _most_taken(granule: int, first: int, stride: int, nbytes: int, count: int) -> int:
    """Bytes of the granules that the widest of some units takes, or more where there are very many begins.

    Where a unit begins in its granule repeats; all begins are the same modulo the common divisor.
    """
    common = math.gcd(granule, stride)
    period = granule // common
    begins = [(first + k * stride) % granule for k in range(min(count, period))] if period < _MANY else []
    latest = max(begins, default=granule - common + first % common)
    return -(-(latest + nbytes) // granule) * granule


def _check_read(storages: tuple[Storage, ...], pool: Pool, read: SparseRead, where: str) -> tuple[int, int]:
    """Every unit of a read lies in its storage, apart from the others, and the largest fits into the pool.

    Returns the bytes from a unit to the next, and those of a unit.
    """
    view, item_bytes = read.view, ITEM_SIZES.get(read.view.dtype, 0)
    if not item_bytes or len(view.shape) != len(view.stride) or min(view.shape, default=0) < 1:
        raise PlanError(f"{where} reads units of a tensor of {view.dtype} {view.shape}, which has none")
    slices = read.computed.shape[:1] if read.computed else view.shape[:1]
    if slices != view.shape[:1] or (read.computed and (read.tiles or read.slices != 1)):
        raise PlanError(
            f"{where} computes {(*slices, 0)[0]} slices from {view.shape[0]} units: expected as many"
        )
    stride = view.stride[0] * item_bytes
    nbytes = (1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride[1:], strict=True))) * item_bytes
    count, end = view.shape[0], view.offset + (view.shape[0] - 1) * stride + nbytes
    if min(view.offset, *view.stride) < 0 or end > storages[view.storage].nbytes:
        raise PlanError(
            f"{where} reads bytes {view.offset}:{end} of storage {view.storage}, which has "
            f"{storages[view.storage].nbytes}"
        )
    if stride < nbytes:
        raise PlanError(f"{where} reads units of {nbytes} bytes every {stride}: they overlap")
    taken = _most_taken(pool.granule, pool.layout[view.storage] + view.offset, stride, nbytes, count)
    if taken > pool.nbytes:
        raise PlanError(
            f"{where} needs {taken} bytes for one unit of storage {view.storage}, and the pool has "
            f"{pool.nbytes}"
        )
    return stride, nbytes

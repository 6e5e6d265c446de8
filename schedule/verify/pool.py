"""The rules of a pool: which reads it serves, that their largest unit fits, and that no two storages touch."""

from __future__ import annotations

from penstock.schedule.facts.catalog import ALIGNMENT, Storage
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Step
from penstock.schedule.facts.units import Pool, SparseRead


def arena_reads(step: Step, pool: Pool | None) -> tuple[int, ...]:
    """The storages that a step of the program reads from the arena: all but those that the pool serves."""
    served = {one.view.storage for one in step.sparse if pool is not None and _served(one, pool)}
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
    for trace in plan.traces:
        for k, step in enumerate(trace.steps):
            for one in step.sparse:
                if _served(one, pool):
                    _check_read(storages, pool, one, f"graph {trace.graph}: step {k} ({step.name})")


def _served(read: SparseRead, pool: Pool) -> bool:
    return 0 <= read.view.storage < len(pool.layout) and pool.layout[read.view.storage] >= 0


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


def _check_read(storages: tuple[Storage, ...], pool: Pool, read: SparseRead, where: str) -> None:
    """Every unit of a read lies in its storage, and the largest of them fits into the pool."""
    view, place = read.view, pool.layout[read.view.storage]
    for number in (0, view.shape[0] - 1):
        start, stop = read.unit(number)
        if not 0 <= start <= stop <= storages[view.storage].nbytes:
            raise PlanError(
                f"{where} reads bytes {start}:{stop} of storage {view.storage}, which has "
                f"{storages[view.storage].nbytes}"
            )
    # Where a unit begins in its granule repeats, so the widest one is among the first `granule` of them.
    for number in range(min(view.shape[0], pool.granule)):
        start, stop = (place + byte for byte in read.unit(number))
        taken = (-(-stop // pool.granule) - start // pool.granule) * pool.granule
        if taken > pool.nbytes:
            raise PlanError(
                f"{where} needs {taken} bytes for one unit of storage {view.storage}, and the pool has "
                f"{pool.nbytes}"
            )

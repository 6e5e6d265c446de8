"""The arenas that a device, this system and the weight files allow, and the one that is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.runtime.arena.mapping import AdaptiveArena, MappedArena
from penstock.runtime.arena.reading import AnonymousArena, ContiguousArena, PooledArena, WeightArena
from penstock.runtime.device.opening import device_kind
from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import HUGE_PAGE, PAGE, round_up, supports_move, supports_populate
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Arena, Range, Storage
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.space.layout import mapped_arena, packed_arena


def open_arena(
    plan: Plan,
    storages: Sequence[Storage],
    source: Source,
    *,
    debug: bool = False,
    poison: bool = False,
) -> WeightArena:
    """Open the arena that a plan asks for, empty. `source` must outlive it.

    With `debug`, reading a dropped range of a paged arena kills the process with SIGSEGV instead
    of finding the bytes again. With `poison`, memory of a contiguous or pooled arena that holds no
    weight any more is filled with 0xFF, which is NaN in every floating-point format. Where the system
    cannot fill a mapping, a mapped plan gets an anonymous arena, which keeps the same addresses, granules and
    budget.

    Raises PlanError for a plan that does not belong to the files, StreamError when the system
    refuses the memory.
    """
    if plan.arena.kind == "contiguous":
        return ContiguousArena(plan, storages, source, poison=poison)
    if plan.arena.backing == "mapped" and supports_populate():
        adapts = source.mode == "direct" and plan.arena.granule % HUGE_PAGE == 0 and supports_move()
        kind = AdaptiveArena if adapts else MappedArena
        return kind(plan, storages, source, debug=debug)
    if _has_whole_huge_granules(plan.arena) and supports_move():
        return PooledArena(plan, storages, source, debug=debug, poison=poison)
    return AnonymousArena(plan, storages, source, debug=debug)


def _has_whole_huge_granules(arena: Arena) -> bool:
    """Tells whether granules can be moved: private ones, of huge pages, none of which a segment cuts."""
    edges = [edge for segment in arena.segments for edge in (segment.start, segment.stop)]
    return (
        arena.backing == "anonymous"
        and arena.granule % HUGE_PAGE == 0
        and bool(edges)
        and not any(edge % arena.granule for edge in edges)
    )


_MOST_GRANULES = 20_000

_DEVICE_ALIGNMENT = 512
"""As CUDA's allocator of torch aligns all memory, and so the weights of a model that is resident."""

_SMALL = 64 << 10  # below it a packed tensor is not aligned to whole blocks (runtime/files/pack.py)


def cpu_arenas(payload: Payload) -> dict[str, Arena]:
    """The arenas that this system and these files allow, by name, the preferred one first."""
    storages, traces = payload.storages, payload.traces
    granule = _granule(sum(s.nbytes for s in storages))
    arenas: dict[str, Arena] = {}
    writes = any(storage.kind == "produced" for storage in storages)  # which no file's mapping can hold
    if supports_populate() and not writes:
        mapped = mapped_arena(storages, payload.files, granule=granule, traces=traces)
        if mapped is not None:
            arenas["mapped"] = mapped
    if supports_move() and not writes:
        arenas["pooled"] = _pooled_arena(payload, granule)
    arenas["contiguous"] = _contiguous_arena(payload, 64)
    arenas["paged"] = packed_arena(storages, traces, kind="paged", granule=PAGE, alignment=64)
    return arenas


def _device_arenas(payload: Payload) -> dict[str, Arena]:
    """The one arena of a device: an allocation, no mapped file, in which weights lie as its allocator aligns.

    Libraries choose kernels by the alignment of what they are given, so that another gives other bits.
    """
    aligned = tuple(replace(storage, phase=0) for storage in payload.storages)
    return {"contiguous": _contiguous_arena(replace(payload, storages=aligned), _DEVICE_ALIGNMENT)}


def _contiguous_arena(payload: Payload, unit: int) -> Arena:
    """An arena of units of so many bytes, or of pages where all large weights begin at pages of files."""
    large = [e for s in payload.storages if s.nbytes >= _SMALL for e in s.extents]
    unit = PAGE if all(e.file_offset % PAGE == 0 for e in large) else unit
    return packed_arena(payload.storages, payload.traces, kind="contiguous", granule=unit, alignment=unit)


def _pooled_arena(payload: Payload, granule: int) -> Arena:
    """An arena of whole granules, in which weights keep aligned offsets of files, as direct reads need."""
    storages, traces = payload.storages, payload.traces
    arena = mapped_arena(storages, payload.files, granule=granule, page=granule, traces=traces)
    if arena is None:
        arena = packed_arena(storages, traces, kind="paged", granule=granule, alignment=64)
    segments = tuple(Range(s.start, round_up(s.stop, granule)) for s in arena.segments)
    return replace(arena, backing="anonymous", segments=segments)


def _granule(weight_bytes: int) -> int:
    """The mapped granule, doubled until the number of mappings is far below Linux's limit (65,530)."""
    granule = HUGE_PAGE  # the largest folio of the page cache, which is mapped and dropped whole
    while weight_bytes > _MOST_GRANULES * granule:
        granule *= 2
    return granule


def allowed_arenas(payload: Payload, device: str, arena: str | None) -> dict[str, Arena]:
    """The arenas that a device allows, the preferred one first, or `arena` alone."""
    arenas = cpu_arenas(payload) if device_kind(device) == "cpu" else _device_arenas(payload)
    if arena is None:
        return arenas
    if arena not in arenas:
        choices = ", ".join(arenas)
        if arena in ("mapped", "pooled") and any(storage.kind == "produced" for storage in payload.storages):
            raise PlanError(
                f"an arena {arena!r} has the weight files' own pages, of which none can hold what a forward "
                f"keeps among the weights: choose from {choices}, or compile with spill=False"
            )
        raise PlanError(f"these weights cannot be in an arena {arena!r}: choose from {choices}")
    return {arena: arenas[arena]}

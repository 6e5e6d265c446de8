"""The arenas that a device, this system and the weight files allow; the one that is chosen, and opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.runtime.arena.mapping import MappedArena
from penstock.runtime.arena.reading import AnonymousArena, ContiguousArena, WeightArena
from penstock.runtime.capabilities import Need
from penstock.runtime.device.opening import ACCELERATOR, device_kind, hardware_of
from penstock.runtime.files.source import Source
from penstock.runtime.machine.calibrate import measure_accelerator, measure_cpu
from penstock.runtime.machine.rates import Arrival, WeightFiles
from penstock.runtime.system.memory import HUGE_PAGE, PAGE, supports_populate
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Arena, Hardware, Storage
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.planner import check_floor
from penstock.schedule.space.layout import mapped_arena, packed_arena


def open_arena(
    plan: Plan, storages: Sequence[Storage], source: Source, *, debug: bool = False, poison: bool = False
) -> WeightArena:
    """Open the arena that a plan asks for, empty. `source` must outlive it.

    With `debug`, reading a dropped range of a paged arena kills the process with SIGSEGV instead
    of finding the bytes again. With `poison`, memory of a contiguous arena that holds no weight any
    more is filled with 0xFF, which is NaN in every floating-point format. Where the system
    cannot fill a mapping, a mapped plan gets an anonymous arena, which keeps the same addresses, granules and
    budget.

    Raises PlanError for a plan that does not belong to the files, StreamError when the system
    refuses the memory.
    """
    if plan.arena.kind == "contiguous":
        return ContiguousArena(plan, storages, source, poison=poison)
    if plan.arena.backing == "mapped" and supports_populate():
        return MappedArena(plan, storages, source, debug=debug)
    return AnonymousArena(plan, storages, source, debug=debug)


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
        if arena == "mapped" and any(storage.kind == "produced" for storage in payload.storages):
            raise PlanError(
                f"an arena {arena!r} has the weight files' own pages, of which none can hold what a forward "
                f"keeps among the weights: choose from {choices}, or compile with spill=False"
            )
        raise PlanError(f"these weights cannot be in an arena {arena!r}: choose from {choices}")
    return {arena: arenas[arena]}


def choose_arena(
    folder: Path, need: Need, budget: int, *, device: str, asked: str | None, machine: Hardware | str
) -> tuple[Arena, Hardware]:
    """The arena to plan for, and the machine, which is measured if none is given.

    `asked` is the arena that a caller asks for. Raises BudgetError, with the lowest floor, where the budget
    reaches that of no arena: before the machine is measured.
    """
    payload = need.payload
    arenas, kind = allowed_arenas(payload, device, asked), device_kind(device)
    hardware = hardware_of(device) if machine == "auto" else find_hardware(machine)
    if hardware and hardware.disk_bytes_per_s is not None and not asked:
        # The arena of a device behind a host is one buffer, into which no file can be mapped.
        arenas = {"contiguous": arenas["contiguous"]}
    name = _preferred(need, arenas, budget)
    if hardware:
        return arenas[name], hardware
    files = WeightFiles(payload.files, folder) if payload.files else None
    if kind == ACCELERATOR:
        return arenas[name], measure_accelerator(device, payload.weights, files)
    if files is None:
        return arenas[name], measure_cpu(payload.weights, None, "there is no weight file to read")
    if kind == "sim":  # the link from its host is taken to be as fast as its disk
        measured = measure_cpu(payload.weights, Arrival(files.disk(), None))
        return arenas[name], replace(measured, disk_bytes_per_s=measured.link_bytes_per_s)
    fits = partial(_fits_blocks, payload.storages, arenas[name])
    arrival = files.arrival(mapped=name == "mapped", fits=fits)
    if name == "mapped":
        return arenas[name], measure_cpu(payload.weights, arrival)
    why = arrival.why or ("asked for" if asked else _why_not_mapped(need, budget, arenas.get("mapped")))
    return arenas[name], measure_cpu(payload.weights, arrival, why)


def _preferred(need: Need, arenas: Mapping[str, Arena], budget: int) -> str:
    """The first arena whose floor the budget reaches."""
    if len(arenas) == 1:
        return next(iter(arenas))
    floors: dict[str, int] = {}
    for name, arena in arenas.items():
        floors[name] = need.floor(arena).upper_bytes
        if floors[name] <= budget:
            return name
    lowest = min(floors, key=floors.__getitem__)
    check_floor(need.demand(arenas[lowest]), budget, need.payload.storage_names())
    return lowest


def _fits_blocks(storages: Sequence[Storage], arena: Arena, block: int) -> bool:
    """Tells whether most bytes have the same offset within a block in the arena as in their files.

    Direct reads into the arena need this. `block` is the size of a block in bytes.
    """
    fits = {True: 0, False: 0}
    for storage, place in zip(storages, arena.layout, strict=True):
        for extent in storage.extents if place >= 0 else ():
            fits[(place + extent.storage_offset - extent.file_offset) % block == 0] += extent.nbytes
    return fits[True] >= fits[False]


def _why_not_mapped(need: Need, budget: int, mapped: Arena | None) -> str:
    if mapped is not None:
        least = format_size(need.floor(mapped).upper_bytes)
        return f"a mapped arena needs {least} and the budget is {format_budget(budget)}"
    if not supports_populate():
        return "this system cannot populate file mappings"
    return (
        "a weight lies in several pieces of its files, or at another alignment than it is computed on, so "
        "what streams is copied, also from the page cache"
    )

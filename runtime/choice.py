"""Decides what a load runs: which kind of arena, on which machine, and by which plan.

On a CPU the arena is chosen by measurement: the plan's `hardware.note` says why. Plans are remembered
(runtime/remembered.py), so that a budget has one plan, whether it is asked for or loaded, until the page
cache holds more or less of the files.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.runtime.calibrate import measure_cuda, measure_hardware
from penstock.runtime.device.opening import device_kind, hardware_of, product_of
from penstock.runtime.files.rates import measure_populate, measure_read
from penstock.runtime.files.source import Source, open_source
from penstock.runtime.memory_split import fits_host
from penstock.runtime.remembered import remembered_plan
from penstock.runtime.system.limits import usable_bytes
from penstock.runtime.system.memory import round_up, supports_move, supports_populate
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.facts.model import Arena, Hardware, Range, Storage, Trace, Wrap
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.planner import Floor, floor, make_plan
from penstock.schedule.space.layout import mapped_arena, packed_arena
from penstock.schedule.verify.proof import verify_plan

MAPPED_GRANULE = 2 << 20  # the largest folio of the page cache, which is mapped and dropped whole
PAGE = mmap.PAGESIZE
_SAMPLE = 128 << 20
_SECONDS = 0.15

_MOST_GRANULES = 20_000
_OFF_BLOCKS = 64  # bytes: an offset at which no block begins
_SMALL = 64 << 10  # below it a packed tensor is not aligned to whole blocks (runtime/files/pack.py)


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is wanted for. Sizes are in bytes; `Program.plan` documents every field."""

    budget: int
    device: str = "cpu"
    arena: str | None = None
    keep: tuple[str, ...] = ()
    hardware: Hardware | str = "auto"
    traces: tuple[Trace, ...] = ()
    wrap: Wrap = "overlap"
    host_memory: int | None = None
    effort: float = 1.0


def find_plan(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """The proven plan for a request: one that was made before, or made now and remembered.

    What a caller gives himself (hardware, times) is planned with each time.
    """
    if request.hardware != "auto" or request.traces:
        return decide(folder, payload, request)
    key = replace(request, keep=tuple(sorted(request.keep)))
    asked = (key, product_of(request.device), tuple(cpu_arenas(payload)))
    return remembered_plan(folder, payload, request.budget, asked, lambda: decide(folder, payload, request))


def find_plan_to_load(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """As `find_plan`; where the host cannot hold all that streams to a device, with the host's limit.

    That limit is another at every load, so such a plan is not remembered.
    """
    plan = find_plan(folder, payload, request)
    limit = usable_bytes()
    if device_kind(request.device) == "cpu" or fits_host(plan, limit):
        return plan
    return decide(folder, payload, replace(request, host_memory=limit))


def decide(folder: Path, payload: Payload, request: PlanRequest) -> Plan:
    """Make the plan for a request, and prove it. Raises BudgetError below the floor."""
    kept = kept_storages(payload, request.keep)
    found = find_floors(payload, request.device, request.arena, kept)
    arena, hardware = _choose(folder, payload, request, found)
    hardware.check()  # before times are modelled, which divides by its rates
    problem = Problem(
        payload.storages,
        request.traces or tuple(with_times(trace, hardware) for trace in payload.traces),
        arena,
        kept,
        hardware=hardware,
        wrap=request.wrap,
        host=request.host_memory,
    )
    plan = make_plan(problem, request.budget, names=payload.storage_names(), effort=request.effort)
    verify_plan(payload.storages, payload.traces, plan)
    return plan


def cpu_arenas(payload: Payload) -> dict[str, Arena]:
    """The arenas that this system and these files allow, by name, the preferred one first."""
    storages, traces = payload.storages, payload.traces
    granule = _granule(sum(s.nbytes for s in storages))
    arenas: dict[str, Arena] = {}
    if supports_populate():
        mapped = mapped_arena(storages, payload.files, granule=granule, traces=traces)
        if mapped is not None:
            arenas["mapped"] = mapped
    if supports_move():
        arenas["pooled"] = _pooled_arena(payload, granule)
    large = [e for s in storages if s.nbytes >= _SMALL for e in s.extents]
    unit = PAGE if all(e.file_offset % PAGE == 0 for e in large) else 64
    arenas["contiguous"] = packed_arena(storages, traces, kind="contiguous", granule=unit, alignment=unit)
    arenas["paged"] = packed_arena(storages, traces, kind="paged", granule=PAGE, alignment=64)
    return arenas


def _pooled_arena(payload: Payload, granule: int) -> Arena:
    """An arena of whole granules, at the files' own offsets where they are aligned, as direct reads need."""
    storages, traces = payload.storages, payload.traces
    arena = mapped_arena(storages, payload.files, granule=granule, page=granule, traces=traces)
    if arena is None:
        arena = packed_arena(storages, traces, kind="paged", granule=granule, alignment=64)
    segments = tuple(Range(s.start, round_up(s.stop, granule)) for s in arena.segments)
    return replace(arena, backing="anonymous", segments=segments)


def _granule(weight_bytes: int) -> int:
    """The mapped granule, doubled until the number of mappings is far below Linux's limit (65,530)."""
    granule = MAPPED_GRANULE
    while weight_bytes > _MOST_GRANULES * granule:
        granule *= 2
    return granule


def find_floors(payload: Payload, device: str, arena: str | None, keep: frozenset[int]) -> dict[str, Floor]:
    """The floor of each arena that the device allows, the preferred one first, or of `arena` alone."""
    arenas = cpu_arenas(payload)
    if device_kind(device) != "cpu":
        arenas = {"contiguous": arenas["contiguous"]}  # one allocation: nothing of a file is mapped there
    if arena is not None:
        if arena not in arenas:
            raise PlanError(f"these weights cannot be in an arena {arena!r}: choose from {', '.join(arenas)}")
        arenas = {arena: arenas[arena]}
    facts = payload.storages, payload.traces
    return {name: floor(Demand(*facts, one, keep)) for name, one in arenas.items()}


def _choose(
    folder: Path, payload: Payload, request: PlanRequest, floors: Mapping[str, Floor]
) -> tuple[Arena, Hardware]:
    """The arena to plan for, of those in `floors`, and the machine, which is measured where none is given."""
    arenas = cpu_arenas(payload)
    kind = device_kind(request.device)
    hardware: Hardware | str = request.hardware
    if hardware == "auto":
        hardware = hardware_of(request.device) or hardware
    if hardware == "auto" and kind == "cuda":
        with open_source(payload.files, folder) as source:
            hardware = measure_cuda(request.device, payload.weights, source)
    if hardware == "auto":
        with open_source(payload.files, folder) as source:
            arena, rate, reason = _measured_arena(payload.storages, arenas, floors, request.budget, source)
        measured = measure_hardware(payload.weights, rate, reason)
        if kind == "sim":  # the link from its host is taken to be as fast as what is read here
            measured = replace(measured, disk_bytes_per_s=measured.link_bytes_per_s)
        return arena, measured
    hardware = find_hardware(hardware) if isinstance(hardware, str) else hardware
    if not request.arena and hardware.disk_bytes_per_s is not None:
        # A device with a host before it has one buffer: nothing of a file is mapped there.
        floors = {"contiguous": floors["contiguous"]}
    return arenas[preferred(floors, request.budget)], hardware


def preferred(floors: Mapping[str, Floor], budget: int) -> str:
    """The first arena whose floor the budget reaches; where it reaches none, the one of the lowest floor."""
    usable = (name for name, found in floors.items() if found.upper_bytes <= budget)
    return next(usable, min(floors, key=lambda name: floors[name].upper_bytes))


def _measured_arena(
    storages: Sequence[Storage],
    arenas: Mapping[str, Arena],
    floors: Mapping[str, Floor],
    budget: int,
    source: Source,
) -> tuple[Arena, float, str]:
    """The first arena whose floor the budget reaches, the bytes per second at which it fills, and why it is.

    A mapping takes what the page cache holds, and direct reads bring the rest (runtime/arena/adaptive.py).
    """
    name = preferred(floors, budget)
    arena = arenas[name]
    if not source.files:
        return arena, 1e9, "there is no weight file to read"
    shift = 0 if _fits_blocks(storages, arena, source.block) else _OFF_BLOCKS
    read = measure_read(source, nbytes=_SAMPLE, seconds=_SECONDS, room=min(budget, _SAMPLE // 2), shift=shift)
    reading = f"{source.mode} reads at {read / 1e9:.2f} GB/s"
    if name != "mapped":
        return arena, read, f"{reading}; {source.note or _why_not_mapped(arenas, floors, budget)}"
    populated = measure_populate(source, nbytes=_SAMPLE, seconds=_SECONDS)
    rates = f"populating a mapping at {populated / 1e9:.2f} GB/s, {reading}"
    if source.mode == "direct" and supports_move():
        return arena, max(read, populated), f"{rates}; the page cache is cold"
    return arena, populated, rates


def _fits_blocks(storages: Sequence[Storage], arena: Arena, block: int) -> bool:
    """Whether most bytes lie in the arena as in whole blocks of their files, as direct reads need it."""
    fits = {True: 0, False: 0}
    for storage, place in zip(storages, arena.layout, strict=True):
        for extent in storage.extents if place >= 0 else ():
            fits[(place + extent.storage_offset - extent.file_offset) % block == 0] += extent.nbytes
    return fits[True] >= fits[False]


def _why_not_mapped(arenas: Mapping[str, Arena], floors: Mapping[str, Floor], budget: int) -> str:
    if "mapped" in floors:
        least = format_size(floors["mapped"].upper_bytes)
        return f"a mapped arena needs {least} and the budget is {format_size(budget)}"
    if "mapped" in arenas:
        return "asked for"
    if not supports_populate():
        return "this system cannot populate file mappings"
    return "the files align their tensors to less than 64 bytes, so they cannot be used where they are"


def kept_storages(payload: Payload, patterns: Sequence[str]) -> frozenset[int]:
    """The storages of the weights that patterns of FQNs match; PlanError for a pattern that matches none."""
    kept: set[int] = set()
    for pattern in patterns:
        matching = [w for w in payload.weights if fnmatchcase(w.fqn, pattern)]
        if not matching:
            names = ", ".join(w.fqn for w in payload.weights[:3])
            raise PlanError(f"keep pattern {pattern!r} matches no weight; the weights are {names}, ...")
        kept |= {part.storage for weight in matching for part in weight.parts}
    return frozenset(kept)

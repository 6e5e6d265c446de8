"""Chooses, by measurement, the arena that weights stream into on a CPU, and says why."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from penstock.runtime.calibrate import measure_hardware
from penstock.runtime.files.rates import measure_populate, measure_read
from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import round_up, supports_move, supports_populate
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Arena, Hardware, Range, Storage, Weight
from penstock.schedule.facts.problem import Demand
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.planner import Floor, floor
from penstock.schedule.space.layout import mapped_arena, packed_arena

MAPPED_GRANULE = 2 << 20  # the largest folio of the page cache, which is mapped and dropped whole
PAGE = mmap.PAGESIZE
_SAMPLE = 128 << 20
_SECONDS = 0.15

_MOST_GRANULES = 20_000
_OFF_BLOCKS = 64  # bytes: where no block begins
_SMALL = 64 << 10  # below it a packed tensor is not aligned to whole blocks (runtime/files/pack.py)


@dataclass(frozen=True)
class ArenaChoice:
    """An arena, the rate at which it fills, and the sentence that says why it was chosen."""

    arena: Arena
    link_bytes_per_s: float
    reason: str

    def measure(self, weights: Sequence[Weight]) -> Hardware:
        """This machine, with the rate at which this arena fills as its link."""
        return measure_hardware(weights, self.link_bytes_per_s, self.reason)


def cpu_arenas(payload: Payload) -> dict[str, Arena]:
    """The arenas that this system and these files allow, by name, the preferred first."""
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
    """Whole granules, at the files' own offsets where they are aligned, so that direct reads fit."""
    storages, traces = payload.storages, payload.traces
    arena = mapped_arena(storages, payload.files, granule=granule, page=granule, traces=traces)
    if arena is None:
        arena = packed_arena(storages, traces, kind="paged", granule=granule, alignment=64)
    segments = tuple(Range(s.start, round_up(s.stop, granule)) for s in arena.segments)
    return replace(arena, backing="anonymous", segments=segments)


def _granule(weight_bytes: int) -> int:
    """The mapped granule, doubled until Linux's limit on mappings (65,530) is far away."""
    granule = MAPPED_GRANULE
    while weight_bytes > _MOST_GRANULES * granule:
        granule *= 2
    return granule


def floors(payload: Payload, arenas: Mapping[str, Arena], keep: frozenset[int]) -> dict[str, Floor]:
    """The floor of each arena, in the order of `arenas`."""
    facts = payload.storages, payload.traces
    return {name: floor(Demand(*facts, arena, keep)) for name, arena in arenas.items()}


def preferred(floors: Mapping[str, Floor], budget: int) -> str:
    """The first arena whose floor the budget reaches; where it reaches none, that of the lowest floor."""
    usable = (name for name, found in floors.items() if found.upper_bytes <= budget)
    return next(usable, min(floors, key=lambda name: floors[name].upper_bytes))


def choose(
    storages: Sequence[Storage],
    arenas: Mapping[str, Arena],
    floors: Mapping[str, Floor],
    budget: int,
    source: Source,
) -> ArenaChoice:
    """The first arena whose floor the budget reaches, and how fast it fills.

    A mapping takes what the page cache holds, and direct reads bring the rest (runtime/arena/adaptive.py).
    """
    name = preferred(floors, budget)
    if not source.files:
        return ArenaChoice(arenas[name], 1e9, "there is no weight file to read")
    shift = 0 if _fits_blocks(storages, arenas[name], source.block) else _OFF_BLOCKS
    read = measure_read(source, nbytes=_SAMPLE, seconds=_SECONDS, room=min(budget, _SAMPLE // 2), shift=shift)
    reading = f"{source.mode} reads at {read / 1e9:.2f} GB/s"
    if name != "mapped":
        why = source.note or _why_not_mapped(arenas, floors, budget)
        return ArenaChoice(arenas[name], read, f"{reading}; {why}")
    populated = measure_populate(source, nbytes=_SAMPLE, seconds=_SECONDS)
    rates = f"populating a mapping at {populated / 1e9:.2f} GB/s, {reading}"
    if source.mode == "direct" and supports_move():
        return ArenaChoice(arenas["mapped"], max(read, populated), f"{rates}; the page cache is cold")
    return ArenaChoice(arenas["mapped"], populated, rates)


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
    if isinstance(patterns, str):
        raise PlanError(f"keep= takes a list of patterns, got {patterns!r}: give [{patterns!r}]")
    kept: set[int] = set()
    for pattern in patterns:
        matching = [w for w in payload.weights if fnmatchcase(w.fqn, pattern)]
        if not matching:
            names = ", ".join(w.fqn for w in payload.weights[:3])
            raise PlanError(f"keep pattern {pattern!r} matches no weight; the weights are {names}, ...")
        kept |= {part.storage for weight in matching for part in weight.parts}
    return frozenset(kept)

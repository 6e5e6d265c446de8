"""Which layout ranges a step reads, and how ranges are cut for copying."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from penstock.schedule.facts.model import Arena, Range, Storage
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import subtract


def cut(ranges: Iterable[Range], piece: int) -> list[Range]:
    """`ranges` in order, each cut every `piece` bytes, so that several readers can share one."""
    return [
        Range(start, min(start + piece, whole.stop))
        for whole in ranges
        for start in range(whole.start, whole.stop, piece)
    ]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The union of `ranges`, sorted and disjoint."""
    union: list[Range] = []
    for item in sorted(ranges):
        if union and item.start <= union[-1].stop:
            union[-1] = Range(union[-1].start, max(union[-1].stop, item.stop))
        elif item.nbytes:
            union.append(item)
    return union


def step_ranges(plan: Plan, storages: Sequence[Storage], reads: Iterable[int]) -> list[Range]:
    """What a step that reads the storages `reads` needs on the device beside the resident ranges."""
    arena = plan.arena
    needed = [
        _whole_granules(arena, Range(arena.layout[s], arena.layout[s] + storages[s].nbytes))
        for s in reads
        if arena.layout[s] >= 0 and storages[s].nbytes and s not in plan.outside
    ]
    return subtract(merge(needed), merge(plan.resident))


def _whole_granules(arena: Arena, item: Range) -> Range:
    if arena.kind == "contiguous":
        return item
    segment = arena.segments[bisect_right([s.start for s in arena.segments], item.start) - 1]
    start = item.start // arena.granule * arena.granule
    stop = -(-item.stop // arena.granule) * arena.granule
    return Range(max(start, segment.start), min(stop, segment.stop))

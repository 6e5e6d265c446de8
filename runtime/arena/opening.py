"""The memory that weights stream into, on a CPU.

Five ways of holding a layout, one interface (`WeightArena` in base.py):

  MappedArena      paged: the weight files themselves, mapped; filling populates, nothing is copied
  AdaptiveArena    the same, but what the page cache does not keep is read past it, into private memory
  PooledArena      paged: private memory taken once, whose granules move to where they are filled
  AnonymousArena   paged: private memory that is taken and given back page by page, filled by reads
  ContiguousArena  one buffer of the plan's size, filled by reads; storages may overlap in it

The plan decides when a range may be filled or dropped, and the streamer waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.arena.adaptive import AdaptiveArena
from penstock.runtime.arena.anonymous import AnonymousArena, ContiguousArena
from penstock.runtime.arena.base import WeightArena
from penstock.runtime.arena.mapped import MappedArena
from penstock.runtime.arena.pooled import PooledArena
from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import HUGE_PAGE, supports_move, supports_populate
from penstock.schedule.facts.model import Arena, Storage
from penstock.schedule.plan import Plan


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

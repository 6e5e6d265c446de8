"""The memory that weights stream into, on a CPU.

Five ways of holding a layout, one interface:

  MappedArena      paged: the weight files themselves, mapped; filling populates, nothing is copied
  AdaptiveArena    the same, but what the page cache does not keep is read past it, into private memory
  PooledArena      paged: private memory taken once, whose granules move to where they are filled
  AnonymousArena   paged: private memory that is taken and given back page by page, filled by reads
  ContiguousArena  one buffer of the plan's size, filled by reads; storages may overlap in it

The plan decides when a range may be filled or dropped, and the streamer waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.runtime.arena.adaptive import AdaptiveArena
from penstock.runtime.arena.anonymous import AnonymousArena, ContiguousArena
from penstock.runtime.arena.mapped import MappedArena
from penstock.runtime.arena.pooled import PooledArena
from penstock.runtime.system.memory import HUGE_PAGE, supports_move, supports_populate
from penstock.schedule.facts.model import Arena, Part, Storage
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    import torch

    from penstock.runtime.files.source import Source


class WeightArena(Protocol):
    """Memory for one layout. Ranges are half-open, in bytes of the layout.

    In a paged arena a range begins and ends at a page, or at an end of its segment.
    """

    @property
    def held_bytes(self) -> int:
        """Bytes of the layout that are filled or being filled, and not dropped."""

    @property
    def peak_bytes(self) -> int:
        """The most `held_bytes` has been."""

    def check(self) -> None:
        """Raise SourceError when bytes that are held can no longer be read, or may not be the file's.

        Called every few milliseconds, and when a pass ends.
        """

    def fill(self, start: int, stop: int) -> int:
        """Make a range hold its bytes, and return how many were brought.

        Blocks without the GIL; disjoint ranges may be filled from several threads at once. Raises
        SourceError when the bytes cannot be had: the range is then dropped.
        """

    def fill_ready(self, start: int, stop: int) -> int | None:
        """As `fill` where nothing has to be waited for; elsewhere nothing is filled, and None returned."""

    def drop(self, start: int, stop: int) -> None:
        """Drop a range, of which nothing may be read until it is filled again."""

    def view(self, part: Part) -> torch.Tensor:
        """The strided tensor at the one address of a part. It must not be used after `close`."""

    def mapped_bytes(self) -> int:
        """Bytes of whole pages that the process's page tables really hold for the arena.

        Raises StreamError where the system does not tell (only Linux does).
        """

    def close(self) -> None:
        """Unmap everything. No thread may be filling it; a second call does nothing."""


def open_arena(
    plan: Plan,
    storages: Sequence[Storage],
    source: Source,
    *,
    debug: bool = False,
    poison: bool = False,
    populate: bool | None = None,
) -> WeightArena:
    """Open the arena that a plan asks for, empty. `source` must outlive it.

    With `debug`, reading a dropped range of a paged arena kills the process with SIGSEGV instead
    of finding the bytes again. With `poison`, memory of a contiguous or pooled arena that holds no
    weight any more is filled with 0xFF, which is NaN in every floating-point format. `populate`
    says whether the system can fill a mapping (None: ask it). Where it cannot, a mapped plan gets an
    anonymous arena, which keeps the same addresses, granules and budget.

    Raises PlanError for a plan that does not belong to the files, StreamError when the system
    refuses the memory.
    """
    if plan.arena.kind == "contiguous":
        return ContiguousArena(plan, storages, source, poison=poison)
    if plan.arena.backing == "mapped" and (supports_populate() if populate is None else populate):
        adapts = source.mode == "direct" and plan.arena.granule % HUGE_PAGE == 0 and supports_move()
        kind = AdaptiveArena if adapts else MappedArena
        return kind(plan, storages, source, debug=debug)
    if _has_whole_huge_granules(plan.arena) and supports_move():
        return PooledArena(plan, storages, source, debug=debug, poison=poison)
    return AnonymousArena(plan, storages, source, debug=debug)


def _has_whole_huge_granules(arena: Arena) -> bool:
    """Whether granules can be moved: they are private, made of huge pages, and none is cut by a segment."""
    edges = [edge for segment in arena.segments for edge in (segment.start, segment.stop)]
    return (
        arena.backing == "anonymous"
        and arena.granule % HUGE_PAGE == 0
        and bool(edges)
        and not any(edge % arena.granule for edge in edges)
    )

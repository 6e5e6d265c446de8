"""The pieces of a layout that move together: runs, groups of spans, and blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.facts.model import Range
from penstock.schedule.facts.problem import Demand
from penstock.schedule.space.spans import Group, Reads, Run, read_runs, reads_of, span_groups


@dataclass(frozen=True)
class Block:
    """A storage as the searches place it, at a multiple of the granule.

    It begins `shift` bytes behind that, as in its granule of the layout. `size` is `shift` and its bytes,
    rounded up to granules.
    """

    storage: int
    range: Range
    shift: int
    size: int
    reads: Reads
    kept: bool
    produced: bool = False


@dataclass(frozen=True)
class Pieces:
    """The runs, groups and blocks of one demand. Each is worked out once, when it is first asked for."""

    demand: Demand

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs of neighbouring granules that the same steps read."""
        return read_runs(self.demand, self.demand.arena.granule)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The spans of a paged arena by the steps that read them."""
        return span_groups(self.runs, self.demand.arena.granule)

    @cached_property
    def copied_runs(self) -> tuple[Run, ...]:
        """The runs that copies bring: whole granules in a paged arena, any bytes in a contiguous one."""
        return self.runs if self.demand.arena.kind == "paged" else read_runs(self.demand, 1)

    @cached_property
    def copied(self) -> tuple[Group, ...]:
        """The spans of `copied_runs` by the steps that read them."""
        return self.groups if self.demand.arena.kind == "paged" else span_groups(self.copied_runs, 1)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The storages of a contiguous arena as they are placed."""
        return blocks_of(self.demand)

    @cached_property
    def breaks(self) -> Collection[int]:
        """The layout offsets at which segments begin. No copy crosses one of them."""
        return frozenset(segment.start for segment in self.demand.arena.segments)


def blocks_of(demand: Demand) -> tuple[Block, ...]:
    """A block for every storage that is read."""
    arena, blocks = demand.arena, []
    for s, reads in reads_of(demand).items():
        nbytes, shift = demand.storages[s].nbytes, arena.layout[s] % arena.granule
        size = -(-(shift + nbytes) // arena.granule) * arena.granule
        place = Range(arena.layout[s], arena.layout[s] + nbytes)
        produced = demand.storages[s].kind == "produced"
        blocks.append(Block(s, place, shift, size, reads, s in demand.keep and not produced, produced))
    return tuple(blocks)

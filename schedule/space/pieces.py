"""The pieces of a layout that move together, in each of the ways in which plans look at them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.facts.problem import Demand
from penstock.schedule.space.addresses import Block, blocks_of
from penstock.schedule.space.spans import Group, Run, read_runs, span_groups


@dataclass(frozen=True)
class Pieces:
    """The runs, groups and blocks of one demand, each worked out once, when it is first asked for."""

    demand: Demand

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbouring granules that the same steps read."""
        return read_runs(self.demand, self.demand.arena.granule)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The spans of a paged arena by the steps that read them."""
        return span_groups(self.runs, self.demand.arena.granule)

    @cached_property
    def copied(self) -> tuple[Group, ...]:
        """The groups of what copies bring: granules of a paged arena, storages of a contiguous one."""
        if self.demand.arena.kind == "paged":
            return self.groups
        return span_groups(read_runs(self.demand, 1), 1)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The storages of a contiguous arena as they are placed."""
        return blocks_of(self.demand)

    @cached_property
    def breaks(self) -> Collection[int]:
        """Layout offsets that no copy reaches over: the beginnings of segments."""
        return frozenset(segment.start for segment in self.demand.arena.segments)

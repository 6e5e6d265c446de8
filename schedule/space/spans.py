"""Spans, which plans keep, copy and drop, and the pieces of a layout that move together."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from penstock.schedule.facts.model import Range
from penstock.schedule.facts.problem import Demand

Reads = tuple[tuple[int, ...], ...]
"""For every trace, the steps, in ascending order, that read a piece of the layout."""

_CHUNKS = 30_000
"""The number of spans into which a layout of one storage is cut; boundaries of storages add more spans."""


@dataclass(frozen=True)
class Run:
    """Neighbouring granules, cut to their segment, that the same steps use; `kept` if never dropped.

    The first use of a `produced` one is the step that writes it.
    """

    range: Range
    reads: Reads
    kept: bool
    produced: bool = False

    @property
    def nbytes(self) -> int:
        return self.range.nbytes


@dataclass(frozen=True)
class Group:
    """The spans, in layout order, that the same steps use; `kept` if they are never dropped.

    The first use of `produced` ones is the step that writes them.
    """

    spans: tuple[Range, ...]
    reads: Reads
    kept: bool
    produced: bool = False

    @cached_property
    def bytes_of_first(self) -> tuple[int, ...]:
        """The bytes of the first 0, 1, 2, ... spans, summed."""
        return tuple(itertools.accumulate((span.nbytes for span in self.spans), initial=0))

    @property
    def nbytes(self) -> int:
        return self.bytes_of_first[-1]


def reads_of(demand: Demand) -> dict[int, Reads]:
    """The steps that use each storage of the arena; empty storages and those never used are left out.

    A produced storage that is read later is used by the step behind the one that writes it, too: no copy of
    it can be done before that one ends. Written by the last step of a call, it is used by all steps up to its
    first read: what leaves in the next call would have to have arrived there.
    """
    steps: dict[int, tuple[list[int], ...]] = {}
    outside = set(demand.outside)
    for number, trace in enumerate(demand.traces):
        for k, step in enumerate(trace.steps):
            for s in dict.fromkeys((*step.reads, *step.writes)):
                if demand.arena.layout[s] >= 0 and demand.storages[s].nbytes > 0 and s not in outside:
                    steps.setdefault(s, tuple([] for _ in demand.traces))[number].append(k)
    for s, reads in steps.items():
        for number, some in enumerate(reads if demand.storages[s].kind == "produced" else ()):
            if len(some) > 1:
                last = some[0] == demand.call_ends(number, some[0])
                some[1:1] = range(some[0] + 1, some[1] if last else min(some[0] + 2, some[1]))
    return {s: tuple(tuple(steps_of_call) for steps_of_call in reads) for s, reads in sorted(steps.items())}


def read_runs(demand: Demand, granule: int) -> tuple[Run, ...]:
    """The granules that any step reads, in layout order, as runs of granules that the same steps read.

    A granule that holds bytes of several storages is read whenever one of these is read.
    """
    reads = reads_of(demand)
    storages, arena = demand.storages, demand.arena
    edges: dict[int, list[tuple[int, bool]]] = {}
    for s in reads:
        start = arena.layout[s] // granule
        stop = -(-(arena.layout[s] + storages[s].nbytes) // granule)
        edges.setdefault(start, []).append((s, True))
        edges.setdefault(stop, []).append((s, False))
    runs: list[Run] = []
    inside: set[int] = set()
    for first, last in itertools.pairwise(sorted(edges)):
        for s, enters in edges[first]:
            (inside.add if enters else inside.discard)(s)
        if not inside:
            continue
        together = (set().union(*of_trace) for of_trace in zip(*(reads[s] for s in inside), strict=True))
        union = tuple(tuple(sorted(steps)) for steps in together)
        produced = any(storages[s].kind == "produced" for s in inside)
        always = not produced and not inside.isdisjoint(demand.keep)
        for piece in _cut(Range(first * granule, last * granule), arena.segments):
            runs.append(Run(piece, union, always, produced))
    return tuple(_joined(runs, arena.segments))


def span_groups(runs: Sequence[Run], granule: int) -> tuple[Group, ...]:
    """Cut runs into spans of at most one chunk, and group these by their reads, in layout order."""
    total = sum(run.range.nbytes for run in runs)
    chunk = max(1, -(-total // (_CHUNKS * granule))) * granule
    spans: dict[tuple[Reads, bool, bool], list[Range]] = {}
    for run in runs:
        alike = spans.setdefault((run.reads, run.kept, run.produced), [])
        alike.extend(_chunks(run.range, chunk, granule))
    return tuple(Group(tuple(some), *facts) for facts, some in spans.items())


def merged(ranges: Iterable[Range], breaks: Collection[int] = ()) -> tuple[Range, ...]:
    """The bytes of `ranges` in as few ranges as possible, ascending; no range crosses one of `breaks`."""
    result: list[Range] = []
    for piece in sorted(ranges, key=attrgetter("start")):
        stop = result[-1].stop if result else -1
        if piece.start < stop or (piece.start == stop and piece.start not in breaks):
            result[-1] = Range(result[-1].start, max(result[-1].stop, piece.stop))
        else:
            result.append(piece)
    return tuple(result)


def subtract(ranges: Iterable[Range], taken: Sequence[Range]) -> list[Range]:
    """The bytes of `ranges` that are in none of `taken` (sorted, disjoint)."""
    remaining = []
    starts = [t.start for t in taken]
    for piece in ranges:
        start = piece.start
        for hole in taken[max(0, bisect_right(starts, start) - 1) :]:
            if hole.start >= piece.stop:
                break
            if hole.stop <= start:
                continue
            if hole.start > start:
                remaining.append(Range(start, hole.start))
            start = hole.stop
        if start < piece.stop:
            remaining.append(Range(start, piece.stop))
    return remaining


def _cut(piece: Range, segments: Sequence[Range]) -> Iterator[Range]:
    for segment in segments:
        start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
        if start < stop:
            yield Range(start, stop)


def _joined(runs: Sequence[Run], segments: Sequence[Range]) -> Iterator[Run]:
    begins = {segment.start for segment in segments}
    numbered = _numbered(runs, begins)
    for _, same in itertools.groupby(numbered, key=lambda pair: (pair[0], pair[1].reads)):
        members = [run for _, run in same]
        yield replace(members[0], range=Range(members[0].range.start, members[-1].range.stop))


def _numbered(runs: Sequence[Run], begins: Collection[int]) -> Iterator[tuple[int, Run]]:
    """Yield each run with a number, which changes wherever a run does not continue the one before."""
    number, before = 0, None
    for run in runs:
        touches = before is not None and before.range.stop == run.range.start and before.kept == run.kept
        number += not touches or run.range.start in begins
        yield number, run
        before = run


def _chunks(run: Range, chunk: int, granule: int) -> Iterator[Range]:
    """Cut a run into pieces of about equal size, at most `chunk` bytes, that begin at granule boundaries."""
    first, last = run.start // granule, -(-run.stop // granule)
    count = -(-(last - first) * granule // chunk)
    edges = [(first + (last - first) * i // count) * granule for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield Range(max(start, run.start), min(stop, run.stop))


@dataclass(frozen=True)
class Block:
    """A storage, `shift` bytes behind a multiple of the granule; `size` is all of that in whole granules."""

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
    def copied(self) -> tuple[Group, ...]:
        """What copies bring: the groups of a paged arena, and each storage of a contiguous one by itself."""
        if self.demand.arena.kind == "paged":
            return self.groups
        return tuple(Group((block.range,), block.reads, block.kept, block.produced) for block in self.blocks)

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

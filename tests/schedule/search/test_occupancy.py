"""Copies and drops that addresses cause: every one of them, from a walk over single granules, and by hand."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from penstock.schedule.clock.transfers import MERGED_BYTES
from penstock.schedule.facts.model import Arena, Drop, Range, Step, Storage, Trace, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.search.draft import Occupancy, _parts
from penstock.schedule.space.addresses import Addressing
from penstock.schedule.space.spans import Block
from tests.schedule.traces import machine

GRANULE = 4


@dataclass(frozen=True)
class Placed:
    """Blocks at addresses at which no step reads two blocks from the same bytes."""

    problem: Problem
    blocks: tuple[Block, ...]
    placement: Addressing


def block(storage, start, nbytes, *reads, produced=False):
    shift = start % GRANULE
    size = -(-(shift + nbytes) // GRANULE) * GRANULE
    return Block(storage, Range(start, start + nbytes), shift, size, reads, False, produced)


def random_placed(dice):
    """Some blocks that one trace or two read, of a few bytes each, some of them neighbours in the layout."""
    lengths = [dice.randint(1, 6) for _ in range(dice.choice([1, 1, 2]))]
    blocks = []
    end = 0
    for number in range(dice.randint(1, 6)):
        start = end + dice.choice([0, 0, 1, 3])
        nbytes = dice.randint(1, 17)
        reads = [tuple(k for k in range(n) if dice.random() < 0.4) for n in lengths]
        if not any(reads):
            reads[0] = (dice.randrange(lengths[0]),)
        blocks.append(block(number, start, nbytes, *reads))
        end = start + nbytes
    kind = dice.choice(["contiguous", "paged"])
    layout = (*(one.range.start for one in blocks), -1)
    traces = tuple(
        Trace(f"m{which}", which, "", tuple(Step("s", (), 0, 10) for _ in range(n)), 0, 0, "modelled")
        for which, n in enumerate(lengths)
    )
    arena = Arena(kind, "anonymous", GRANULE, layout, (Range(0, end),))
    storages = (*(Storage(one.range.nbytes, "streamable") for one in blocks), Storage(8, "mutable"))
    problem = Problem(storages, traces, arena, hardware=machine(1e9))
    width = 2.0
    while True:
        width += 0.1
        addresses = tuple(GRANULE * dice.randrange(int(width)) for _ in blocks)
        placed = list(zip(blocks, addresses, strict=True))
        if not any(
            one is not other and _together(one, other) and _touch((one, at), (other, there))
            for one, at in placed
            for other, there in placed
        ):
            nbytes = max(at + one.size for one, at in placed)
            return Placed(problem, tuple(blocks), Addressing(addresses, nbytes))


def _together(one, other):
    return any(set(a) & set(b) for a, b in zip(one.reads, other.reads, strict=True))


def _touch(one, other):
    return one[1] < other[1] + other[0].size and other[1] < one[1] + one[0].size


@dataclass
class Walked:
    """What happens to each byte of the layout in a pass of one trace.

    `copies` has, for each byte that a step needs, the step and the last read before of what it overwrites.
    """

    resident: set[int]
    crossing: set[int]
    copies: dict[tuple[int, int], int]
    drops: set[tuple[int, int]]


def walked(placed, which):
    """Goes through the reads of every granule of the arena, in order of time."""
    steps = len(placed.problem.traces[which].steps)
    found = Walked(set(), set(), {}, set())
    for granule in range(placed.placement.nbytes // GRANULE):
        held = {}
        for b, (one, at) in enumerate(zip(placed.blocks, placed.placement.addresses, strict=True)):
            first = granule * GRANULE - at + one.range.start - one.shift
            mine = set(range(first, first + GRANULE)) & set(range(one.range.start, one.range.stop))
            if at <= granule * GRANULE < at + one.size:
                held[b] = mine
        if len(held) == 1:
            found.resident.update(*held.values())
            continue
        reads = sorted((k, b) for b in held for k in placed.blocks[b].reads[which])
        for j, (k, b) in enumerate(reads):
            before, user = reads[j - 1]
            if user != b:
                found.copies.update({(byte, k): before - (0 if j else steps) for byte in held[b]})
            elif j == 0:
                found.crossing |= held[b]
            if reads[(j + 1) % len(reads)][1] != b:
                found.drops |= {(byte, k) for byte in held[b]}
    return found


def runs_of(some, begins):
    """The bytes as few ranges, none of which goes on into another block."""
    start = stop = -1
    for byte in sorted(some):
        if byte != stop or byte in begins:
            if stop >= 0:
                yield Range(start, stop)
            start = byte
        stop = byte + 1
    if stop >= 0:
        yield Range(start, stop)


def expected_transfers(placed, walk, steps, early):
    """In order of steps and of starts, where none starts before the one ahead of it, or before the pass."""
    begins = {one.range.start for one in placed.blocks}
    rows = sorted(
        (step, after, one)
        for step, after in {(step, after) for (_, step), after in walk.copies.items()}
        for one in runs_of({b for (b, k), a in walk.copies.items() if (k, a) == (step, after)}, begins)
    )
    reached = max((after for _, after, _ in rows), default=0) - steps
    found = []
    for step, after, one in rows:
        reached = max(reached, after, 0 if step > early else -steps)
        found.append(Transfer(one.start, one.stop, step, reached))
    return tuple(found)


@pytest.mark.parametrize("seeds", range(4))
def test_copies_and_drops_are_those_of_a_walk_over_granules(seeds):
    seen = {"copies": 0, "crossing": 0, "resident": 0, "traces": 0, "early": 0}
    for seed in range(100 * seeds, 100 * seeds + 100):
        dice = Random(seed)
        placed = random_placed(dice)
        begins = {one.range.start for one in placed.blocks}
        occupancy = Occupancy(placed.problem, placed.blocks, placed.placement)
        early = dice.choice([9, 0])
        draft = occupancy.decide(early, 0)
        traces = placed.problem.traces
        walks = [walked(placed, which) for which in range(len(traces))]
        assert draft.arena_bytes == placed.placement.nbytes
        assert draft.resident == tuple(runs_of(walks[0].resident, begins))
        assert len(draft.streams) == len(traces)
        assert len(draft.boundaries) == (len(traces) if len(traces) > 1 else 0)
        for number, (walk, trace) in enumerate(zip(walks, traces, strict=True)):
            transfers, drops = draft.streams[number]
            assert transfers == expected_transfers(placed, walk, len(trace.steps), early)
            assert drops == tuple(
                Drop(one.start, one.stop, k)
                for k in sorted({step for _, step in walk.drops})
                for one in runs_of({byte for byte, step in walk.drops if step == k}, begins)
            )
            boundary = (draft.boundaries or (draft.boundary,))[number]
            held = [byte for one in boundary for byte in range(one.start, one.stop)]
            arriving = [byte for t in transfers if t.after < 0 for byte in range(t.start, t.stop)]
            assert sorted(held) == sorted([*walk.resident, *walk.crossing, *arriving])
            seen["copies"] += len(transfers)
            seen["crossing"] += bool(walk.crossing)
            seen["early"] += any(t.after == 0 and t.step for t in transfers) and not early
        assert draft.boundary == (draft.resident if len(traces) > 1 else boundary)
        seen["resident"] += bool(draft.resident)
        seen["traces"] += len(traces) > 1
        shifted = [at + one.shift for one, at in zip(placed.blocks, placed.placement.addresses, strict=True)]
        contiguous = placed.problem.arena.kind == "contiguous"
        assert draft.addresses == ((*shifted, -1) if contiguous else ())
    assert min(seen.values()) > 10, seen


def test_no_copy_waits_for_less_than_the_last_one_of_the_pass_before():
    """Blocks 0 and 1 take turns, and behind them 2 and 3, the last of which waits for step 4."""
    reads = (0, 1, 4, 5)
    blocks = tuple(block(b, 8 * b, 8, (k,)) for b, k in enumerate(reads))
    arena = Arena("contiguous", "anonymous", GRANULE, (0, 8, 16, 24), (Range(0, 32),))
    trace = Trace("m", 0, "", tuple(Step("s", (), 0, 10) for _ in range(6)), 0, 0, "modelled")
    problem = Problem((Storage(8, "streamable"),) * 4, (trace,), arena, hardware=machine(1e9))
    ((transfers, _),) = Occupancy(problem, blocks, Addressing((0, 0, 8, 8), 16)).decide(5, 0).streams
    assert [(t.step, t.after) for t in transfers] == [(0, -2), (1, 0), (4, 0), (5, 4)]


def test_small_parts_are_copied_with_a_neighbour_when_both_may_be():
    """Two parts of block 0 wait for different blocks; the second has 4 bytes."""
    blocks = (block(0, 0, 12, (2,)), block(1, 12, 8, (0,)), block(2, 20, 4, (1,)))
    arena = Arena("contiguous", "anonymous", GRANULE, (0, 12, 20), (Range(0, 24),))
    steps = tuple(Step("s", (), 0, 10) for _ in range(3))
    trace = Trace("m", 0, "", steps, 0, 0, "modelled")
    storages = tuple(Storage(one.range.nbytes, "streamable") for one in blocks)
    problem = Problem(storages, (trace,), arena, hardware=machine(1e9))
    occupancy = Occupancy(problem, blocks, Addressing((0, 0, 8), 12))
    apart, together = occupancy.decide(2, 4), occupancy.decide(2, 5)
    assert [t for t in apart.streams[0][0] if t.step == 2] == [Transfer(0, 8, 2, 0), Transfer(8, 12, 2, 1)]
    assert [t for t in together.streams[0][0] if t.step == 2] == [Transfer(0, 12, 2, 1)]


def test_a_copy_has_no_more_bytes_than_may_be_merged():
    whole = Range(5, 5 + 2 * MERGED_BYTES + 1)
    cuts = [5, 5 + MERGED_BYTES, 5 + 2 * MERGED_BYTES]
    assert list(_parts(whole)) == [Range(a, b) for a, b in zip(cuts, [*cuts[1:], whole.stop], strict=True)]
    assert list(_parts(Range(5, 5 + MERGED_BYTES))) == [Range(5, 5 + MERGED_BYTES)]


def test_copies_out_stand_among_the_copies_in_by_their_starts():
    blocks = (block(0, 0, 8, (0, 1, 5), produced=True), block(1, 8, 8, (3,)), block(2, 16, 8, (2, 4)))
    steps = tuple(Step("s", (), 4, 6) for _ in range(6))
    trace = Trace("m", 0, "", steps, 0, 0, "modelled")
    arena = Arena("contiguous", "anonymous", GRANULE, (0, 8, 16), (Range(0, 8), Range(8, 24)))
    storages = (Storage(8, "produced"), Storage(8, "streamable"), Storage(8, "streamable"))
    problem = Problem(storages, (trace,), arena, hardware=machine(8e9))
    draft = Occupancy(problem, blocks, Addressing((0, 0, 8), 16)).decide(5, 0)
    ((transfers, drops),) = draft.streams
    assert transfers == (Transfer(0, 8, 1, 0, "out"), Transfer(8, 16, 3, 1), Transfer(0, 8, 5, 3))
    assert drops == (Drop(0, 8, 1), Drop(8, 16, 3), Drop(0, 8, 5))
    assert (draft.resident, draft.boundary) == ((Range(16, 24),), (Range(16, 24),))

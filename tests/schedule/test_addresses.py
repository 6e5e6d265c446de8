"""Addresses and what follows from them: literal placements, then invariants on random traces."""

from __future__ import annotations

import itertools

from hypothesis import given

from penstock.schedule.addresses import ORDERS, blocks_of, place, tight
from penstock.schedule.contiguous import decide
from penstock.schedule.layout import packed_arena
from penstock.schedule.model import Arena, Drop, Range, Step, Storage, Trace, Transfer
from penstock.schedule.planner import floor
from tests.schedule.traces import Problem, problems

Facts = tuple[tuple[Storage, ...], tuple[Trace, ...], Arena]


def facts_of(sizes: tuple[int, ...], *reads: tuple[int, ...]) -> Facts:
    storages = tuple(Storage(size, "streamable") for size in sizes)
    steps = tuple(Step(f"s{k}", one, 0, 10) for k, one in enumerate(reads))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="contiguous", granule=64, alignment=64)
    return storages, traces, arena


def test_storages_of_one_step_lie_apart_and_others_share() -> None:
    facts = facts_of((64, 128, 64), (0, 1), (2,))
    assert tight(blocks_of(*facts, ()), facts[1]).addresses == (0, 64, 0)


def test_three_pairs_need_three_places() -> None:
    """Unit storages read as {A,B}, {B,C}, {A,C}: the floor is above the largest step."""
    found = floor(*facts_of((64, 64, 64), (0, 1), (1, 2), (0, 2)))
    assert (found.lower_bytes, found.upper_bytes) == (128, 192)


def test_a_window_keeps_neighbours_in_time_apart() -> None:
    storages, traces, arena = facts_of((64,) * 4, (0,), (1,), (2,), (3,))
    blocks = blocks_of(storages, traces, arena, ())
    found = place(blocks, traces, (), window=64, order="by use")
    assert found is not None
    assert found.addresses == (0, 64, 0, 64)


def test_from_both_ends_neighbours_overlap_in_part() -> None:
    storages, traces, arena = facts_of((128,) * 2, (0,), (1,))
    blocks = blocks_of(storages, traces, arena, ())
    found = place(blocks, traces, (), window=0, order="from both ends", cap=192)
    assert found is not None
    assert found.addresses == (0, 64)
    one = decide(blocks, traces, arena, found, early=1)
    assert one.resident == (Range(0, 64), Range(192, 256))
    assert one.streams[0][0] == (Transfer(64, 128, 0, -1), Transfer(128, 192, 1, 0))
    assert one.streams[0][1] == (Drop(64, 128, 0), Drop(128, 192, 1))
    assert one.boundary == (*one.resident, Range(64, 128))


def test_bytes_nobody_read_since_are_not_copied_again() -> None:
    storages, traces, arena = facts_of((64, 64), (0,), (0,), (1,))
    blocks = blocks_of(storages, traces, arena, ())
    one = decide(blocks, traces, arena, tight(blocks, traces), early=2)
    assert [(t.start, t.step, t.after) for t in one.streams[0][0]] == [(0, 0, -1), (64, 2, 1)]


@given(problems("contiguous"))
def test_blocks_of_one_step_never_overlap(problem: Problem) -> None:
    blocks = blocks_of(problem.storages, problem.traces, problem.arena, problem.keep)
    kept = {b for b, block in enumerate(blocks) if block.kept}
    for order, window in itertools.product(ORDERS[:2], (0, 100, 1000)):
        found = place(blocks, problem.traces, kept, window=window, order=order)
        assert found is not None
        assert found.nbytes >= tight(blocks, problem.traces).nbytes or window
        for a, b in itertools.combinations(range(len(blocks)), 2):
            together = set(blocks[a].reads[0]) & set(blocks[b].reads[0])
            if together or a in kept or b in kept:
                apart = found.addresses[a] + blocks[a].size <= found.addresses[b]
                assert apart or found.addresses[b] + blocks[b].size <= found.addresses[a]

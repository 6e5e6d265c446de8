"""Blocks of a contiguous arena, the least memory they need, and what follows from addresses."""

import itertools

import pytest
from hypothesis import given

from penstock.schedule.facts.model import Drop, Range, Step, Storage, Trace, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.search.draft import Occupancy
from penstock.schedule.space import addresses
from penstock.schedule.space.addresses import Addressing, pack_blocks, place_columns, place_oldest, tight
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import blocks_of
from tests.schedule.traces import machine, problems


def facts_of(sizes, *reads):
    storages = tuple(Storage(size, "streamable") for size in sizes)
    steps = tuple(Step(f"s{k}", one, 0, 10) for k, one in enumerate(reads))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="contiguous", granule=64, alignment=64)
    return Problem(storages, traces, arena, hardware=machine(1e9))


def test_storages_of_one_step_lie_apart_and_others_share():
    placement = tight(blocks_of(facts_of((64, 128, 64), (0, 1), (2,))))
    assert placement.nbytes == 192
    assert placement.addresses[0] >= 128 or placement.addresses[1] >= 64


def test_three_pairs_need_three_places():
    """Unit storages read as {A,B}, {B,C}, {A,C}: the floor is above the largest step."""
    found = floor(facts_of((64, 64, 64), (0, 1), (1, 2), (0, 2)))
    assert found.upper_bytes == 192


def test_the_floor_and_every_budget_share_one_search(monkeypatch):
    searched = []
    monkeypatch.setattr(
        addresses, "pack_blocks", lambda *given: searched.append(given) or pack_blocks(*given)
    )
    problem = facts_of((64, 128, 192, 64, 72), (0, 1), (1, 2), (0, 2), (3,), (4,))
    lowest = floor(problem).upper_bytes
    for budget in (lowest, lowest + 64, lowest + 128):
        make_plan(problem, budget)
    assert len(searched) == 1
    floor(facts_of((64, 128, 192, 64, 73), (0, 1), (1, 2), (0, 2), (3,), (4,)))
    assert len(searched) == 2


def test_each_storage_takes_the_place_that_was_read_longest_ago():
    blocks = blocks_of(facts_of((64,) * 5, (0,), (1,), (2,), (3,), (4,)))
    found = place_oldest(blocks, (), cap=192)
    assert found is not None
    assert found.addresses == (0, 64, 128, 0, 64)


def test_a_large_storage_takes_the_place_of_the_oldest_small_ones():
    blocks = blocks_of(facts_of((64, 64, 64, 128), (0,), (1,), (2,), (3,)))
    found = place_oldest(blocks, (), cap=192)
    assert found is not None
    assert found.addresses == (0, 64, 128, 0)


def test_resident_storages_are_apart():
    blocks = blocks_of(facts_of((64,) * 4, (0,), (1,), (2,), (3,)))
    found = place_oldest(blocks, {1}, cap=192)
    assert found is not None
    assert found.addresses == (64, 0, 128, 64)


def test_two_large_storages_stick_out_of_a_ring():
    """Of 256 bytes each, 128 are shared with the small ones, and the other 128 stay."""
    blocks = blocks_of(facts_of((256, 64, 64, 256), (0,), (1,), (2,), (3,)))
    found = place_oldest(blocks, (), cap=384, ends=(3, 0), ring=128)
    assert found is not None
    assert (found.addresses[0], found.addresses[3]) == (128, 0)
    assert {found.addresses[1], found.addresses[2]} == {128, 192}
    facts = facts_of((256, 64, 64, 256), (0,), (1,), (2,), (3,))
    one = Occupancy(facts, blocks, found).decide(3, 0)
    assert sum(r.nbytes for r in one.resident) == 256


def test_small_storages_take_turns_under_one_end_of_a_large_one():
    facts = facts_of((256, 64, 64, 64), (0,), (1,), (2,), (3,))
    blocks = blocks_of(facts)
    found = place_oldest(blocks, (), cap=256, ends=(0,), ring=128)
    assert found == Addressing((0, 128, 192, 128), 256)
    assert sum(r.nbytes for r in Occupancy(facts, blocks, found).decide(3, 0).resident) == 128


def test_columns_share_bytes_unless_one_step_reads_two_of_them():
    blocks = blocks_of(facts_of((128, 64, 192, 64), (0,), (1, 2), (3,)))
    assert place_columns(blocks, [((0, 2), 64), ((1, 3), 64)]) == Addressing((0, 256, 64, 256), 320)
    assert place_columns(blocks, [((0, 1, 3), 64)]) == Addressing((0, 64, 128, 64), 320)
    assert place_columns(blocks, [((1, 2), 64)]) is None


@pytest.mark.parametrize(("cap", "ends", "ring"), [(320, (0, 3), 64), (64, (), 0), (192, (0,), 64)])
def test_what_does_not_fit_has_no_place(cap, ends, ring):
    blocks = blocks_of(facts_of((256, 128, 64, 256), (0,), (1,), (2,), (3,)))
    assert place_oldest(blocks, (), cap=cap, ends=ends, ring=ring) is None


def test_storages_of_one_step_find_no_place_where_only_one_fits():
    blocks = blocks_of(facts_of((64, 64), (0, 1)))
    assert place_oldest(blocks, (), cap=64) is None


def test_neighbours_that_overlap_in_part_are_copied_in_part():
    demand = facts_of((128,) * 2, (0,), (1,))
    blocks = blocks_of(demand)
    one = Occupancy(demand, blocks, Addressing((0, 64), 192)).decide(1, 0)
    assert one.resident == (Range(0, 64), Range(192, 256))
    assert one.streams[0][0] == (Transfer(64, 128, 0, -1), Transfer(128, 192, 1, 0))
    assert one.streams[0][1] == (Drop(64, 128, 0), Drop(128, 192, 1))
    assert one.boundary == (*one.resident, Range(64, 128))


def test_small_parts_of_a_storage_are_copied_with_their_neighbours():
    """The last storage lies over both others: its first part could start a step earlier than its second."""
    demand = facts_of((64, 64, 128), (0,), (1,), (2,))
    blocks = blocks_of(demand)
    placement = Addressing((0, 64, 0), 128)
    for least, expected in ((0, [(128, 192, 0), (192, 256, 1)]), (65, [(128, 256, 1)])):
        one = Occupancy(demand, blocks, placement).decide(2, least)
        assert [(t.start, t.stop, t.after) for t in one.streams[0][0] if t.step == 2] == expected


def test_bytes_nobody_read_since_are_not_copied_again():
    demand = facts_of((64, 64), (0,), (0,), (1,))
    blocks = blocks_of(demand)
    one = Occupancy(demand, blocks, Addressing((0, 0), 64)).decide(2, 0)
    assert [(t.start, t.step, t.after) for t in one.streams[0][0]] == [(0, 0, -1), (64, 2, 1)]


@given(problems("contiguous"))
def test_blocks_of_one_step_never_overlap(problem):
    blocks = blocks_of(problem)
    kept = {b for b, block in enumerate(blocks) if block.kept}
    found = tight(blocks)
    for placement in (found, place_oldest(blocks, kept, cap=2 * found.nbytes)):
        for a, b in itertools.combinations(range(len(blocks)) if placement else (), 2):
            assert placement is not None
            together = any(set(x) & set(y) for x, y in zip(blocks[a].reads, blocks[b].reads, strict=True))
            if together or a in kept or b in kept:
                apart = placement.addresses[a] + blocks[a].size <= placement.addresses[b]
                assert apart or placement.addresses[b] + blocks[b].size <= placement.addresses[a]

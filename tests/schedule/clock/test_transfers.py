"""Transfers from residency: deadlines, room, merging, and what is on the device between calls."""

from hypothesis import given, settings

from penstock.schedule.bound.gaps import gaps_of
from penstock.schedule.clock.transfers import Loads
from penstock.schedule.facts.model import Drop, Range, Step, Storage, Trace, Transfer
from penstock.schedule.facts.problem import Demand
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces
from tests.schedule.traces import machine, problems

HARDWARE = machine(1e9)


def loads_of(sizes, *reads):
    storages = tuple(Storage(size, "streamable") for size in sizes)
    steps = tuple(Step(f"s{k}", one, 0, 10) for k, one in enumerate(reads))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    arena = packed_arena(storages, (trace,), kind="paged", granule=64, alignment=64)
    groups = Pieces(Demand(storages, (trace,), arena)).groups
    return Loads(groups, gaps_of(groups, trace), len(steps), breaks={0})


def streamed(loads, counts, *, cap, early, join=None):
    """What follows when all but the leading `counts` spans of each gap are copied."""
    rows = loads.after_first(counts)
    return loads.stream(rows, loads.never_in(rows), cap=cap, early=early, join=join)


def test_one_slot_copies_after_the_step_before():
    loads = loads_of((64, 64, 64), (0,), (1,), (2,))
    one = streamed(loads, [0] * 3, cap=64, early=2)
    assert one.transfers == (Transfer(0, 64, 0, -1), Transfer(64, 128, 1, 0), Transfer(128, 192, 2, 1))
    assert one.holding.drops == (Drop(0, 64, 0), Drop(64, 128, 1), Drop(128, 192, 2))
    assert one.holding.boundary == (Range(0, 64),)
    assert one.holding.peak_bytes == 64


def test_two_slots_copy_one_step_ahead_and_across_the_end():
    loads = loads_of((64, 64, 64), (0,), (1,), (2,))
    one = streamed(loads, [0] * 3, cap=128, early=2)
    assert [t.after for t in one.transfers] == [-2, -1, 0]
    assert one.holding.boundary == (Range(0, 64), Range(64, 128))
    assert one.holding.peak_bytes == 128


def test_nothing_starts_early_that_may_not():
    loads = loads_of((64, 64, 64), (0,), (1,), (2,))
    one = streamed(loads, [0] * 3, cap=128, early=0)
    assert [t.after for t in one.transfers] == [-2, 0, 0]


def test_neighbours_with_one_deadline_and_start_are_one_transfer():
    loads = loads_of((640, 640), (0,), (1,))
    one = streamed(loads, [0, 0], cap=640, early=1)
    assert [t.stop - t.start for t in one.transfers] == [640, 640]


def test_a_resident_part_is_neither_copied_nor_dropped():
    loads = loads_of((640, 640), (0,), (1,))
    one = streamed(loads, [3, 0], cap=3 * 64 + 640, early=1)
    assert one.transfers[0] == Transfer(192, 640, 0, -1)
    assert one.holding.drops[0] == Drop(192, 640, 0)


def test_what_is_kept_across_the_end_is_in_the_boundary_without_a_transfer():
    """Storage 0 is read last and first: copied once a pass, early enough for the last step."""
    loads = loads_of((64, 64, 64), (0,), (1,), (2,), (0,))
    kept = [gap.closes - gap.opens == 1 and gap.closes == 4 for gap in loads.gaps]
    one = streamed(loads, [int(k) for k in kept], cap=64, early=3)
    assert [(t.start, t.step, t.after) for t in one.transfers] == [(64, 1, 0), (128, 2, 1), (0, 3, 2)]
    assert one.holding.boundary == (Range(0, 64),)


@settings(max_examples=30)
@given(problems("paged"))
def test_room_is_never_exceeded_and_the_line_is_in_order(p):
    """Occupancy counted event by event over three passes, from when each transfer may start."""
    budget = p.budget(floor(p).upper_bytes)
    plan = make_plan(p, budget)
    schedule, n = plan.schedules[0], len(p.traces[0].steps)
    assert [t.step for t in schedule.transfers] == sorted(t.step for t in schedule.transfers)
    assert [t.after for t in schedule.transfers] == sorted(t.after for t in schedule.transfers)
    held = sum(r.nbytes for r in plan.boundary)
    assert held <= plan.arena_bytes
    for now in range(3 * n):
        held -= sum(d.stop - d.start for d in schedule.drops if d.step == now % n)
        held += sum(t.stop - t.start for t in schedule.transfers if t.after % n == now % n)
        assert held <= plan.arena_bytes
    assert held == sum(r.nbytes for r in plan.boundary)

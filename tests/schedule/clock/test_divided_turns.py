"""A divided plan of calls that come in turn: no transfer starts before the call before its own begins."""

import pytest

from penstock.schedule.clock.turns import divided, joined_traces
from penstock.schedule.facts.model import Range, Schedule, Step, Storage, Trace, Transfer
from penstock.schedule.plan import Plan
from penstock.schedule.space.layout import packed_arena
from tests.schedule.traces import GRANULE, machine


def starts(steps, transfers):
    """For each method the (step, after) of its transfers, from those (step, after) of the joined trace."""
    count = sum(steps)
    storages = tuple(Storage(GRANULE, "streamable") for _ in range(count))
    number, traces = 0, []
    for graph, n in enumerate(steps):
        own = tuple(Step(f"s{k}", (k,), 0, 10) for k in range(number, number + n))
        follows = (graph - 1) % len(steps)
        traces.append(Trace(f"m{graph}", graph, "", own, 0, 0, "modelled", follows=follows))
        number += n
    arena = packed_arena(storages, traces, kind="paged", granule=GRANULE, alignment=GRANULE)
    moved = tuple(Transfer(s * GRANULE, (s + 1) * GRANULE, s, after) for s, after in transfers)
    plan = Plan(
        budget=count * GRANULE,
        arena=arena,
        arena_bytes=count * GRANULE,
        outside=(),
        addresses=(),
        resident=(),
        boundary=tuple(Range(one.start, one.stop) for one in moved if one.after < 0),
        wrap="overlap",
        schedules=(Schedule(0, moved, (), 0),),
        traces=joined_traces(traces),
        hardware=machine(1e9),
        sizes=(GRANULE,) * count,
    )
    parts = divided(plan, traces).schedules
    return [[(one.step, one.after) for one in part.transfers] for part in parts]


CASES = {
    "near": ((2, 2), [(0, -1), (1, -1), (2, 0), (3, 1)], [[(0, -1), (1, -1)], [(0, -2), (1, -1)]]),
    "before the call before": ((2, 2), [(3, -3)], [[], [(1, -2)]]),
    "before the last call of the round before": ((2, 2), [(1, -4)], [[(1, -2)], []]),
    "from the end of the round before": ((2, 2), [(2, -1)], [[], [(0, -2)]]),
    "calls of other lengths": ((1, 3), [(0, -4)], [[(0, -3)], []]),
    "a short last call": ((3, 1), [(2, -3), (3, -3)], [[(2, -1)], [(0, -3)]]),
    "none before those issued before": ((2, 2), [(0, -1), (1, -2)], [[(0, -1), (1, -1)], []]),
    "in the order of calls": ((2, 2), [(2, 1), (1, -1)], [[(1, -1)], [(0, -1)]]),
    "none before the last of the round before": ((1, 3), [(0, -3), (3, 2)], [[(0, -2)], [(2, 1)]]),
    "three methods": ((1, 1, 2), [(2, -4), (3, 0)], [[], [], [(0, -1), (1, -1)]]),
}
"""The steps of each method, transfers (step, after) of all, and those of each method as they must become."""


@pytest.mark.parametrize("name", CASES)
def test_a_transfer_starts_no_earlier_than_the_call_before_its_own(name):
    steps, transfers, expected = CASES[name]
    assert starts(steps, transfers) == expected

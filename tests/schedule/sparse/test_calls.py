"""Recorded calls on the clock: literal cases computed by hand, and limits that hold for any."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.clock.event_graph import UnitCopy, simulate
from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import Arena, Pool, Schedule, Step, Trace, Transfer
from penstock.schedule.plan import Plan
from penstock.schedule.sparse.pool import timed_pool
from penstock.schedule.sparse.replay import replay, simulated_calls
from tests.schedule.sparse.recordings import PAGE, recording, recordings
from tests.schedule.traces import machine

BYTE_PER_NS = machine(1e9)


def planned(profile, pages, *transfers, **changed):
    """A plan with a pool of some pages; steps lead 10 ns and read 1,000, the tail is 100 and the gap 7."""
    (trace,) = profile.traces
    steps = tuple(replace(step, lead_ns=10, read_ns=1_000) for step in trace.steps)
    trace = replace(trace, steps=steps, tail_ns=100, gap_ns=7)
    hardware = changed.pop("hardware", BYTE_PER_NS)
    nothing = Arena("paged", "anonymous", PAGE, (-1,) * len(profile.storages), ())
    plan = Plan(
        budget=1 << 30,
        arena=nothing,
        arena_bytes=0,
        outside=(),
        addresses=(),
        resident=(),
        boundary=(),
        wrap="overlap",
        schedules=(Schedule(0, transfers, (), trace.compute_ns),),
        traces=(trace,),
        hardware=hardware,
        names=tuple(f"table.{k}" for k in range(len(profile.storages))),
        pool=timed_pool(profile.pool(pages * PAGE), [trace], hardware),
    )
    return replace(plan, **changed)


def times(plan, profile):
    """What calls wait and take, in ns."""
    return [(one.stall_ns, one.total_ns) for one in simulated_calls(plan, profile)]


def test_a_call_waits_for_what_it_misses():
    profile = recording([(8, PAGE, 0)], [[(0, [1, 2])], [(0, [2, 3])], [(0, [3])]])
    waits = [2 * PAGE, PAGE, 0]
    assert times(planned(profile, 2), profile) == [(ns, ns + 1_117) for ns in waits]


def test_units_that_come_ahead_hide_behind_the_read_before_theirs():
    """The second table's come while the first is read, and the next step waits for the rest of them."""
    profile = recording([(8, PAGE, 0), (8, PAGE, 0)], [[(0, [1]), (1, [1])], [(0, [1]), (1, [1])]])
    wait = PAGE + (PAGE - 1_000 - 10)
    assert times(planned(profile, 2), profile) == [(wait, wait + 2_127), (0, 2_127)]
    # Where only one fits, nothing comes ahead.
    assert times(planned(profile, 1), profile) == [(2 * PAGE, 2 * PAGE + 2_127)] * 2


def test_rounds_wait_for_one_another():
    profile = recording([(8, PAGE, 0)], [[(0, [0, 1, 2])]])
    (one,) = simulated_calls(planned(profile, 2), profile)
    assert (one.rounds, one.missed.units, one.stall_ns) == (2, 3, 3 * PAGE)


def test_units_take_their_share_of_a_link_that_is_always_busy():
    """Transfers of 10,000 ns a call, and then 4,096 for a unit: the link carries 14,096 in each call."""
    calls = [[(0, [k % 2])] for k in range(12)]
    profile = recording([(2, PAGE, 0)], calls)
    plan = planned(profile, 1, *(Transfer(0, 5_000, 0, after) for after in (-1, -1)))
    found = times(plan, profile)
    assert [total for _, total in found[1:]] == [10_000 + PAGE + 1_000 + 100 + 7 + 10 - 117] * 11
    assert found[0] == (10_000 - 10 + PAGE, 10_000 + PAGE + 1_107)


def test_the_link_makes_up_for_units_behind_what_was_issued():
    """A unit overtakes the transfer on its way for step 1, and the one issued after it comes later."""
    trace = Trace("f", 0, "", tuple(Step(f"s{k}", (), 0, 10) for k in range(4)), 0, 0, "modelled")
    schedule = Schedule(0, (Transfer(0, 100, 2, -1), Transfer(0, 100, 3, 1)), (), 0)
    given_units = [[UnitCopy(1, 50, (1,))]]
    now, _ = simulate(trace, schedule, BYTE_PER_NS, "overlap", 2, units=given_units)
    assert now.units == ((10, 60),)
    assert now.reads[1] == (10, 70)
    assert now.transfers == ((0, 100), (150, 250))
    assert now.reads[3][1] == 260


def test_what_nobody_waits_for_still_takes_the_link():
    """The next transfer comes behind it, and so do the units of the next pass."""
    trace = Trace("f", 0, "", tuple(Step(f"s{k}", (), 0, 10) for k in range(3)), 0, 0, "modelled")
    schedule = Schedule(0, (Transfer(0, 100, 2, 0),), (), 0)
    ahead = [[UnitCopy(0, 50, ())], []]
    now, _ = simulate(trace, schedule, BYTE_PER_NS, "overlap", 2, units=ahead)
    assert (now.units, now.transfers) == (((0, 50),), ((50, 150),))
    late = [[UnitCopy(2, 500, ())], [UnitCopy(0, 50, (0,))]]
    now, then = simulate(trace, replace(schedule, transfers=()), BYTE_PER_NS, "overlap", 2, units=late)
    assert (now.units, then.units) == (((20, 520),), ((520, 570),))
    assert then.reads[0] == (30, 580)


def test_methods_take_turns_and_each_begins_cold():
    profile = recording([(8, PAGE, 0)], [[(0, [1])], [(0, [1])], [(0, [2])]])
    (trace,), (read,) = profile.traces, profile.routes.reads
    other = replace(trace, method="other", graph=1)
    routes = replace(
        profile.routes,
        reads=(read, replace(read, method="other", graph=1)),
        calls=(*profile.routes.calls[:2], (profile.routes.calls[2][0]._replace(read=1),)),
    )
    both = replace(profile, routes=routes, traces=(trace, other))
    plan = planned(profile, 1)
    later = replace(plan.traces[0], method="other", graph=1)
    plan = replace(plan, traces=(*plan.traces, later), schedules=(*plan.schedules, Schedule(1, (), (), 0)))
    found = simulated_calls(plan, both)
    assert [(one.number, one.method, one.missed.units) for one in found] == [
        (0, "forward", 1),
        (1, "forward", 0),
        (2, "other", 1),
    ]


def test_tiles_are_asked_for_by_every_call():
    profile = recording([(8, PAGE, 0)], [[(0, [1])], []])
    plan = planned(profile, 9)
    (step,) = plan.traces[0].steps
    tiles = replace(step.sparse[0], tiles=True)
    tiled = replace(plan.traces[0], steps=(step, replace(step, name="head", sparse=(tiles,))))
    assert plan.pool is not None
    plan = replace(plan, traces=(tiled,), pool=replace(plan.pool, tiles=True))
    (one,) = simulated_calls(plan, profile)  # of the other call nobody knows the method
    assert (one.asked.units, one.missed.units) == (9, 8)


def test_what_cannot_be_simulated():
    profile = recording([(8, PAGE, 0), (8, PAGE, 1)], [[(0, [1]), (1, [2])]])
    plan = planned(profile, 2)
    with pytest.raises(PlanError, match="reads all weights whole, so routes change nothing"):
        simulated_calls(replace(plan, pool=None), profile)
    with pytest.raises(PlanError, match="this program is trained"):
        simulated_calls(replace(plan, traces=(replace(plan.traces[0], follows=1),)), profile)
    fewer = replace(profile, routes=replace(profile.routes, reads=profile.routes.reads[:1], calls=()))
    with pytest.raises(
        PayloadError, match=r"units of 'table\.1' in step look\.up\.1, of which the routes tell"
    ):
        simulated_calls(plan, fewer)
    # A pool that serves less than was recorded is no harm: the rest is read whole.
    assert isinstance(plan.pool, Pool)
    half = replace(plan, pool=replace(plan.pool, layout=(plan.pool.layout[0], -1)))
    (one,) = simulated_calls(half, profile)
    assert one.asked.units == 1


@settings(max_examples=60, deadline=None)
@given(recordings(), st.integers(1, 30), st.data())
def test_no_call_is_faster_than_compute_and_calls_wait_no_longer_than_at_worst(profile, pages, data):
    """Beside transfers, whose delay another call may pay for, all waits together are at most the worst."""
    n = len(profile.traces[0].steps)
    drawn = data.draw(st.lists(st.tuples(st.integers(1, 9_000), st.integers(0, n - 1)), max_size=4))
    transfers = [
        Transfer(0, nbytes, step, step - 1 - k % n) for k, (nbytes, step) in enumerate(sorted(drawn))
    ]
    transfers.sort(key=lambda one: (one.step, one.after))
    reached = -n
    for k, one in enumerate(transfers):
        reached = max(reached, one.after)
        transfers[k] = replace(one, after=min(reached, one.step - 1))
    hardware = machine(1e9, latency_ns=data.draw(st.sampled_from([0, 400])))
    plan = planned(profile, pages, *transfers, hardware=hardware)
    calls = simulated_calls(plan, profile)
    alone = simulate(plan.traces[0], plan.schedules[0], hardware, "overlap", len(calls) + 1)
    total, asked_ns = list(accumulate(one.total_ns for one in calls)), 0
    for k, one in enumerate(calls):
        assert one.total_ns >= plan.compute_ns
        assert 0 <= one.stall_ns <= one.total_ns - plan.compute_ns
        # Each unit is a page, so a call never reads more than it asks for.
        assert one.missed.nbytes <= one.asked.nbytes
        asked_ns += one.asked.nbytes + one.asked.units * hardware.link_latency_ns // 4
        assert total[k] <= alone[k + 1].call_start + asked_ns
        assert total[k] >= alone[k + 1].call_start
    assert sum(one.missed.nbytes for one in calls) == replay(profile, plan.pool).penstock.nbytes  # type: ignore[arg-type]

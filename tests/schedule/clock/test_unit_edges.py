"""Copies of units in the timeline: each takes the link once, before the first transfer that waits for it."""

import pytest

from penstock.schedule.clock.event_graph import UnitCopy, simulate
from penstock.schedule.facts.model import Schedule, Step, Trace, Transfer
from tests.schedule.traces import machine

LINK = machine(1e9)
"""A byte takes a nanosecond."""

PASSES = 4


def run(transfers, *units, lead=0):
    """The passes of three steps of 10 ns, with transfers (bytes, step, after), and units of some passes."""
    steps = tuple(Step(f"s{k}", (k,), lead, 10) for k in range(3))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    schedule = Schedule(0, tuple(Transfer(0, n, step, after) for n, step, after in transfers), (), 0)
    return simulate(trace, schedule, LINK, "overlap", PASSES, units=units)


def later(with_units, without):
    """How much later each transfer of each pass ends with units."""
    return [
        [ours[1] - theirs[1] for ours, theirs in zip(one.transfers, other.transfers, strict=True)]
        for one, other in zip(with_units, without, strict=True)
    ]


def test_a_step_asks_for_its_unit_when_its_lead_has_ended_and_waits_for_it():
    (first, *_) = run([], [UnitCopy(1, 7, (1,))], lead=4)
    assert first.units == ((18, 25),)
    assert [end for _, end in first.reads] == [14, 35, 49]


def test_units_are_copied_one_after_another():
    (first, *_) = run([], [UnitCopy(1, 7, (1,)), UnitCopy(1, 5, (2,)), UnitCopy(2, 3, (2,))])
    assert first.units == ((10, 17), (17, 22), (27, 30))
    assert [end for _, end in first.reads] == [10, 27, 40]


def test_a_unit_comes_behind_what_its_step_reads_whole():
    (first, *_) = run([(50, 1, -1)], [UnitCopy(1, 7, (1,))])
    assert first.units == ((50, 57),)
    assert [end for _, end in first.reads] == [10, 67, 77]


def test_a_unit_comes_behind_those_of_the_pass_before():
    """Also where nothing waited for these."""
    _, second, third, _ = run([], [UnitCopy(0, 1, ()), UnitCopy(2, 100, ())], [UnitCopy(0, 5, (0,))])
    assert second.units == ((120, 125),)
    assert [end for _, end in second.reads] == [135, 145, 155]
    assert third.units == ()
    assert third.call_start == 155


BUSY = [(50, 0, -3), (50, 1, -2), (50, 2, -1)]
"""Transfers that leave the link no pause: all for the next pass, one behind each step."""


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_unit_is_made_up_for_in_the_next_pass_where_no_transfer_of_its_own_waits(step):
    """Transfers of its own pass have started before. Passes after the next one have no more of it."""
    found = later(run(BUSY, [UnitCopy(step, 7, (step,))]), run(BUSY))
    assert found == [[0, 0, 0], [7 * (k >= step) for k in range(3)], [7, 7, 7], [7, 7, 7]]


def test_a_unit_is_made_up_for_in_its_own_pass_before_the_transfer_that_waits_for_its_step():
    """And not again in the next pass."""
    transfers = [(50, 0, -1), (50, 1, -1), (50, 2, 0)]
    found = later(run(transfers, [UnitCopy(0, 7, (0,))]), run(transfers))
    assert found[0] == [0, 0, 7]
    assert found[1] == found[2] == found[3] == [7, 7, 7]


def test_units_of_every_pass_add_up():
    """Each pass takes the link for its own units, and for those of no other."""
    units = [[UnitCopy(0, ns, (0,))] for ns in (7, 11, 3)]
    assert [one[-1] for one in later(run(BUSY, *units), run(BUSY))] == [0, 7, 18, 21]

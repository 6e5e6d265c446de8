"""Faults between the parts of the runtime are found on the rig by wrong bytes; random plans run right."""

from itertools import zip_longest

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from penstock.schedule.facts.errors import PenstockError
from tests.hunt import nightly_but, scaled
from tests.rig import machine
from tests.rig.rig_runs import LateDisk, RigRun, run_everywhere
from tests.runtime.device.device_runs import CountError, Parts, WrongBytesError, cases, disk_cases
from tests.runtime.device.simulated.faults import FAULTS, PLANS, PROBES, RECORDS, WAITS
from tests.runtime.device.simulated.test_sim import case_of
from tests.schedule.traces import problems

LATE_ORDERS = machine.ORDERS[1:2] + machine.ORDERS[3:]
"""Those in which what runs when is decided, so that a fault is found each time."""

ORDERINGS = [name for name, fault in {**WAITS, **RECORDS, **PLANS, **PROBES}.items() if fault.by != "error"]
"""What goes wrong with order. Copies of other bytes are found in any (test_device.py), errors in none."""


def plainest_last():
    """All cases, those that show most faults first, without a host between and with one in turn."""
    pairs = zip_longest(cases()[::-1], disk_cases()[::-1])
    return [one for pair in pairs for one in pair if one]


@pytest.mark.parametrize(("order", "number"), nightly_but({("late", 0), ("random", 1)}, machine.ORDERS))
def test_all_cases_run_right_in_all_orders(order, number):
    run_everywhere(Parts(), (*cases(), *disk_cases()), [(order, number)])


@pytest.mark.parametrize("name", ORDERINGS)
def test_faults_are_found_by_wrong_bytes(name):
    fault = FAULTS[name]
    fault.fired = 0
    with pytest.raises((WrongBytesError, CountError, PenstockError)):
        run_everywhere(fault, plainest_last(), LATE_ORDERS)
    assert fault.fired


@pytest.mark.random
@settings(max_examples=scaled(12), deadline=None)
@seed(4)
@given(problems("contiguous", methods=2), st.none() | st.floats(0, 0.6), st.integers(0, 99))
def test_random_plans_run_on_the_rig_in_random_orders(p, share, number):
    one = case_of(p, share)
    if one.plan.arena_bytes:
        for order in (("random", number), ("late", 0), ("lagging", 0)):
            with machine.ordered(*order):
                RigRun(one, disk=LateDisk if order[0] == "late" else None).go()

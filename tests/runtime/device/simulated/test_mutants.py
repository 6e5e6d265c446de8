"""Faults are put between the parts of the runtime, and each is found; so is every change of a plan.

A fault (faults.py) has to be found by the vector clocks, by bytes that differ from the files', by a count, or
by an error of penstock's own; any other exception is a failure of the test. A change of a plan has to be
refused by the verifier, or run right: what the device finds, the verifier refuses.
"""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from penstock.runtime.device.simulated import HOST as THE_HOST
from penstock.runtime.device.simulated import RaceError, SimDevice
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.facts.errors import PenstockError, PlanError
from penstock.schedule.facts.model import Drop, Range
from penstock.schedule.verify.proof import verify_plan
from tests.hunt import nightly_but
from tests.runtime.device.device_runs import (
    HARDWARE,
    POLICIES,
    CountError,
    Parts,
    Run,
    SlowPassError,
    WrongBytesError,
    cases,
    run_everywhere,
    small_cases,
)
from tests.runtime.device.faulty_device import Site
from tests.runtime.device.simulated.faults import FAULTS, HARMLESS, IN_CALLS, OfDevice
from tests.runtime.device.simulated.ordered_device import OrderedDevice

FOUND = (WrongBytesError, CountError, SlowPassError, PenstockError)
"""RaceError and what is out of bounds are PenstockErrors."""

BY = {RaceError: "race", WrongBytesError: "bits", CountError: "count", SlowPassError: "time"}


def test_a_run_without_a_fault_takes_what_it_should():
    run_everywhere(Parts())


@pytest.mark.parametrize("name", nightly_but([*FAULTS][::3], FAULTS))
def test_faults_are_found(name):
    fault = FAULTS[name]
    fault.fired = 0
    with pytest.raises(FOUND) as found:
        run_everywhere(fault)
    assert fault.fired
    assert BY.get(found.type, "error") == fault.by, found.value


@pytest.mark.parametrize(
    "name",
    ["kernels do not wait for copies", "a copy ends a granule early", "resident ranges are not copied"],
)
def test_the_outputs_of_a_program_show_faults(stack, name):
    """Where nothing tells the simulated device what kernels read, as on a real one."""
    fault, program = FAULTS[name], stack.open()
    fault.fired = 0
    plan = program.plan("50%", device="sim:t4")
    same = []
    for device in (SimDevice(plan.hardware), fault.device(SimDevice(plan.hardware))):
        with torch.no_grad(), load_module(program, plan, LoadRequest(), device=device) as module:
            same.append(torch.equal(module(stack.tokens), stack.expected))
    assert fault.fired
    assert same == [True, False]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_streamer_does_not_rely_on_changes_nothing(name):
    HARMLESS[name].fired = 0
    run_everywhere(HARMLESS[name], POLICIES[:1])
    assert HARMLESS[name].fired


@pytest.mark.parametrize(("name", "first"), [("barrier", 1), ("breaks", 2)])
def test_every_single_wait_is_needed(name, first):
    """Each is left out alone: unless its stream was behind the event already, that is a race.

    Only the `first` copies of all wait for kernels that have read nothing yet.
    """
    (case,) = (one for one in cases() if one.name == name)
    found, unneeded, number = 0, 0, 0
    while (outcome := without_wait(case, number)) != "none":
        found += outcome == "race"
        unneeded += outcome == "unneeded"
        number += 1
    assert found > number // 2
    assert unneeded == first


def without_wait(case, number):
    """What becomes of a run without its n-th wait: `race`, `redundant`, `unneeded`, or `none` without one."""
    redundant = []

    def leave_out(device, call):
        detector, known = case_device.detector, call.event.event.known
        clocks = [detector.clock_of(THE_HOST), detector.clock_of(call.stream.name)]
        redundant.append(all(max(c.get(one, 0) for c in clocks) >= known[one] for one in known))

    case_device = SimDevice(HARDWARE)
    fault = OfDevice("race", Site("wait", during=IN_CALLS, number=number), leave_out)
    try:
        Run(case, case_device, fault).go()
    except RaceError:
        return "race"
    return ("redundant" if redundant[0] else "unneeded") if redundant else "none"


def mutants_of(plan):
    """Each transfer, drop, address, resident range and boundary of a plan taken out or moved."""
    for number, schedule in enumerate(plan.schedules):
        for changed in _of_schedule(schedule, len(plan.traces[number].steps)):
            schedules = list(plan.schedules)
            schedules[number] = changed
            yield replace(plan, schedules=tuple(schedules))
    for name in ("resident", "boundary"):
        yield from (replace(plan, **{name: ranges}) for ranges in _of_ranges(getattr(plan, name)))
    for k, address in enumerate(plan.addresses):
        for shift in (-64, 64):
            if address >= 0:
                addresses = (*plan.addresses[:k], address + shift, *plan.addresses[k + 1 :])
                yield replace(plan, addresses=addresses)
    yield replace(plan, arena_bytes=plan.arena_bytes - 64)
    yield from (replace(plan, host=host) for host in _of_host(plan.host))


def _of_ranges(ranges):
    for k, item in enumerate(ranges):
        for new in ((), (Range(item.start + 64, item.stop),), (Range(item.start, item.stop - 64),)):
            yield (*ranges[:k], *new, *ranges[k + 1 :])


def _of_host(host):
    if host is None:
        return
    yield None
    yield replace(host, nbytes=host.nbytes - 64)
    held = host.resident
    for k, item in enumerate(held):
        for new in ((), (Range(item.start + 64, item.stop),), (Range(item.start, item.stop + 64),)):
            yield replace(host, resident=(*held[:k], *new, *held[k + 1 :]))


def _of_schedule(schedule, steps):
    moved = schedule.transfers
    for k, t in enumerate(moved):
        for new in _of_transfer(t, steps):
            yield replace(schedule, transfers=(*moved[:k], *new, *moved[k + 1 :]))
        if k:
            yield replace(schedule, transfers=(*moved[: k - 1], t, moved[k - 1], *moved[k + 1 :]))
    for ranges in _of_ranges(schedule.boundary or ()):
        yield replace(schedule, boundary=ranges)
    for nbytes in (-64, 64):
        yield replace(schedule, staging_bytes=max(0, schedule.staging_bytes + nbytes))
        for k, staged in enumerate(schedule.staged):
            counts = (*schedule.staged[:k], max(0, staged + nbytes), *schedule.staged[k + 1 :])
            yield replace(schedule, staged=counts)
    for k, d in enumerate(schedule.drops):
        for drops in (
            (),
            (Drop(d.start, d.stop, d.step - 1),),
            (Drop(d.start, d.stop, (d.step + 1) % steps),),
        ):
            yield replace(schedule, drops=(*schedule.drops[:k], *drops, *schedule.drops[k + 1 :]))


def _of_transfer(t, steps):
    yield ()
    yield (replace(t, after=t.after - 1),)
    yield (replace(t, after=t.after - 2),)
    yield (replace(t, after=t.after + 1),)
    yield (replace(t, step=(t.step + 1) % steps),)
    yield (replace(t, start=t.start + 64),)
    yield (replace(t, stop=t.stop - 64),)
    yield (replace(t, stop=t.stop + 64),)


def found_by_device(case):
    """Whether the device finds something wrong, as a fault is found; a crash is nothing found."""
    try:
        for policy, seed in POLICIES:
            Run(case, OrderedDevice(HARDWARE, policy=policy, seed=seed)).go()
    except FOUND:
        return True
    return False


@pytest.mark.parametrize(
    "case",
    nightly_but(lambda case: case.name in ("equal", "in turn", "host"), [*cases()[:6], *small_cases()]),
    ids=lambda case: case.name,
)
def test_changes_of_plans_are_refused_or_right(case):
    """The verifier and the device share nothing: neither may let through what the other finds."""
    total = refused = found = 0
    for plan in mutants_of(case.plan):
        total += 1
        changed = replace(case, planned=lambda plan=plan: plan)
        try:
            verify_plan(case.storages, plan.traces, plan)
        except PlanError:
            refused += 1
            with suppress(
                KeyError, IndexError, ValueError, ZeroDivisionError
            ):  # the plan is refused, after all
                found += found_by_device(changed)
        else:
            assert not found_by_device(changed), f"the verifier lets through {plan}"
    assert refused > total // 2
    assert found > 0


def test_a_race_is_reported_by_transfer_step_and_bytes():
    with pytest.raises(RaceError) as found:
        run_everywhere(FAULTS["kernels do not wait for copies"])
    for part in (
        "bytes 0 to",
        "of the arena on sim",
        "the transfer of layout bytes",
        "step 'step.",
        "stream 'copies'",
    ):
        assert part in str(found.value)

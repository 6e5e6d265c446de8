"""Each wait, record, release and bound of the streamer is taken out or moved, and each transfer of plans.

A mutant of the streamer has to be caught by the vector clocks, the poison, or a check of its own. One of
a plan has to be refused by the verifier, or be right: what the device catches, the verifier refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.runtime.device import host as host_weights
from penstock.runtime.device import memory as device_memory
from penstock.runtime.device import resident, staging
from penstock.runtime.device import streamer as device_streamer
from penstock.runtime.sim.device import SimDevice
from penstock.runtime.sim.races import RaceError
from penstock.schedule.facts.errors import PenstockError, PlanError
from penstock.schedule.facts.model import Drop, HostTier, Range, Schedule, Transfer
from penstock.schedule.plan import Plan
from penstock.schedule.verify.proof import verify_plan
from tests.runtime.device.device_runs import (
    HARDWARE,
    POLICIES,
    Case,
    Run,
    SlowPassError,
    WrongBytesError,
    cases,
    run_everywhere,
    small_disk_cases,
)
from tests.runtime.sim.mutants import HOST, MEMORY, RESIDENT, STAGING, STREAMER, WAIT, mutant

CAUGHT = (WrongBytesError, SlowPassError, PenstockError, KeyError, IndexError, AttributeError)
"""RaceError and bounds are PenstockErrors; a lookup that fails is an event that was never recorded."""


def test_nothing_is_caught_where_nothing_is_changed() -> None:
    run_everywhere(streamers=mutant(device_streamer, WAIT, WAIT))


@pytest.mark.parametrize("name", STREAMER)
def test_mutants_of_the_streamer_are_caught(name: str) -> None:
    with pytest.raises(CAUGHT):
        run_everywhere(streamers=mutant(device_streamer, *STREAMER[name]))


@pytest.mark.parametrize("name", MEMORY)
def test_mutants_of_the_memory_are_caught(name: str) -> None:
    with pytest.raises(CAUGHT):
        run_everywhere(memories=mutant(device_memory, *MEMORY[name]))


@pytest.mark.parametrize("name", STAGING)
def test_mutants_of_the_staging_are_caught(name: str) -> None:
    changed = mutant(device_streamer, WAIT, WAIT)
    changed.__dict__["Staging"] = mutant(staging, *STAGING[name]).Staging
    with pytest.raises(CAUGHT):
        run_everywhere(streamers=changed)


@pytest.mark.parametrize("name", HOST)
def test_mutants_of_the_host_are_caught(name: str) -> None:
    changed = mutant(device_memory, "host.held(item)", "host.held(item)")
    changed.__dict__["HostWeights"] = mutant(host_weights, *HOST[name]).HostWeights
    with pytest.raises(CAUGHT):
        run_everywhere(memories=changed)


@pytest.mark.parametrize("name", RESIDENT)
def test_mutants_of_loading_are_caught(name: str) -> None:
    changed = mutant(device_memory, "host.held(item)", "host.held(item)")
    loading = mutant(resident, *RESIDENT[name])
    changed.__dict__.update(Load=loading.Load, load_resident=loading.load_resident)
    with pytest.raises(CAUGHT):
        run_everywhere(memories=changed)


def mutants_of(plan: Plan) -> Iterator[Plan]:
    """Each transfer, drop, address, resident range and boundary of a plan taken out or moved."""
    for number, schedule in enumerate(plan.schedules):
        for changed in _of_schedule(schedule, len(plan.traces[number].steps)):
            schedules = list(plan.schedules)
            schedules[number] = changed
            yield replace(plan, schedules=tuple(schedules))
    for name in ("resident", "boundary"):
        ranges = getattr(plan, name)
        for k, item in enumerate(ranges):
            for new in ((), (Range(item.start + 64, item.stop),), (Range(item.start, item.stop - 64),)):
                yield replace(plan, **{name: (*ranges[:k], *new, *ranges[k + 1 :])})
    for k, address in enumerate(plan.addresses):
        for shift in (-64, 64):
            if address >= 0:
                addresses = (*plan.addresses[:k], address + shift, *plan.addresses[k + 1 :])
                yield replace(plan, addresses=addresses)
    yield replace(plan, arena_bytes=plan.arena_bytes - 64)
    yield from (replace(plan, host=host) for host in _of_host(plan.host))


def _of_host(host: HostTier | None) -> Iterator[HostTier | None]:
    if host is None:
        return
    yield None
    yield replace(host, nbytes=host.nbytes - 64)
    held = host.resident
    for k, item in enumerate(held):
        for new in ((), (Range(item.start + 64, item.stop),), (Range(item.start, item.stop + 64),)):
            yield replace(host, resident=(*held[:k], *new, *held[k + 1 :]))


def _of_schedule(schedule: Schedule, steps: int) -> Iterator[Schedule]:
    moved = schedule.transfers
    for k, t in enumerate(moved):
        for new in _of_transfer(t, steps):
            yield replace(schedule, transfers=(*moved[:k], *new, *moved[k + 1 :]))
        if k:
            yield replace(schedule, transfers=(*moved[: k - 1], t, moved[k - 1], *moved[k + 1 :]))
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


def _of_transfer(t: Transfer, steps: int) -> Iterator[tuple[Transfer, ...]]:
    yield ()
    yield (replace(t, after=t.after - 1),)
    yield (replace(t, after=t.after - 2),)
    yield (replace(t, after=t.after + 1),)
    yield (replace(t, step=(t.step + 1) % steps),)
    yield (replace(t, start=t.start + 64),)
    yield (replace(t, stop=t.stop - 64),)
    yield (replace(t, stop=t.stop + 64),)


def caught_by_device(case: Case) -> bool:
    try:
        for policy, seed in POLICIES:
            Run(case, SimDevice(HARDWARE, policy=policy, seed=seed)).go()
    except (*CAUGHT, ZeroDivisionError, ValueError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("case", [*cases()[:6], *small_disk_cases()], ids=lambda case: case.name)
def test_mutants_of_plans_are_refused_or_right(case: Case) -> None:
    """The verifier and the device share nothing: neither may let through what the other catches."""
    total = refused = caught = 0
    for plan in mutants_of(case.plan):
        total += 1
        try:
            verify_plan(case.storages, plan.traces, plan)
        except PlanError:
            refused += 1
            caught += caught_by_device(replace(case, plan=plan))
        else:
            assert not caught_by_device(replace(case, plan=plan)), f"the verifier lets through {plan}"
    assert refused > total // 2
    assert caught > 0


def test_a_race_is_reported_by_transfer_step_and_bytes() -> None:
    with pytest.raises(RaceError) as caught:
        run_everywhere(streamers=mutant(device_streamer, *STREAMER["kernels do not wait"]))
    for part in (
        "bytes 0 to",
        "of the arena on sim",
        "the transfer of layout bytes",
        "step 'step.",
        "stream 'copies'",
    ):
        assert part in str(caught.value)

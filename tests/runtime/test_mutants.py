"""Each wait, record, release and bound of the streamer is taken out or moved, and each transfer of plans.

A mutant of the streamer has to be caught by the vector clocks, the poison, or a check of its own. One of
a plan has to be refused by the verifier, or be right: what the simulated device catches, the verifier refuses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from penstock.runtime import device_memory, device_streamer
from penstock.runtime.happens_before import RaceError
from penstock.runtime.sim import SimDevice
from penstock.schedule.errors import PenstockError, PlanError
from penstock.schedule.model import Drop, Plan, Range, Schedule, Transfer
from penstock.schedule.verify import verify_plan
from tests.runtime.device_runs import HARDWARE, POLICIES, Case, Run, Wrong, cases, run_everywhere

CAUGHT = (Wrong, PenstockError, KeyError, IndexError)
"""RaceError and bounds are PenstockErrors; a lookup that fails is an event that was never recorded."""

_WAIT = "self._device.wait(self._copies, self._freed(piece))"
_COPY = 'self._copy(Range(piece.start, piece.stop), f"for step {piece.step}")'
_RECORD = "reading.arrived[piece.step] = self._device.record(self._copies)"
_READING = "reading = self._next if position.ahead else self._this"
_ENDED = "self._this.ended[step] = self._device.record(self._device.current_stream())"
_KERNELS_WAIT = "self._device.wait(self._device.current_stream(), event)"
_DEMAND_BEFORE = "self._device.wait(self._copies, self._device.record(stream))"
_DEMAND_AFTER = "self._device.wait(stream, self._device.record(self._copies))"
_DEMAND_COPY = 'self._copy(item, "on demand")'
_FREED = "self._this.ended[piece.after + self._position.method.steps]"
_ENTRY = "self._entry = self._device.record(self._device.current_stream())"
_TURN = "self._this, self._next = self._next, _Pass()"
_POISON = "self._overwrite(self.methods[graph].drops.get(step, ()))"
_BARRIER = "self._device.wait(self._device.current_stream(), self._device.record(self._copies))"

STREAMER = {
    "copies do not wait": (_WAIT, "pass"),
    "copies wait for themselves": (_WAIT, "self._device.wait(self._copies, self._device.record(self._copies))"),
    "copies wait for the entry only": (_WAIT, "self._device.wait(self._copies, self._entry)"),
    "copies wait when they are done": (f"{_WAIT}\n            {_COPY}", f"{_COPY}\n            {_WAIT}"),
    "nothing is copied": (_COPY, "pass"),
    "a copy begins a granule late": (_COPY, _COPY.replace("piece.start,", "piece.start + 64,")),
    "a copy ends a granule early": (_COPY, _COPY.replace("piece.stop)", "piece.stop - 64)")),
    "a copy is recorded before it": (
        f"{_COPY}\n            {_READING}\n            {_RECORD}",
        f"{_READING}\n            {_RECORD}\n            {_COPY}",
    ),
    "a copy is recorded on the kernels": (
        _RECORD,
        "reading.arrived[piece.step] = self._device.record(self._device.current_stream())",
    ),
    "a copy is not recorded": (_RECORD, "pass"),
    "the first copy of a step counts": (
        _RECORD,
        "reading.arrived.setdefault(piece.step, self._device.record(self._copies))",
    ),
    "copies for the next pass count for this": (_READING, "reading = self._this"),
    "kernels do not wait": (_KERNELS_WAIT, "pass"),
    "copies wait instead of kernels": (_KERNELS_WAIT, "self._device.wait(self._copies, event)"),
    "kernels wait for the step before": ("event = self._this.arrived.get(step)", "event = self._this.arrived.get(step - 1)"),
    "kernels do not wait for what stays": ("self._await(method.steps)", "pass"),
    "a release is not recorded": (_ENDED, "self._this.ended[step] = self._entry"),
    "a release is recorded on the copies": (_ENDED, "self._this.ended[step] = self._device.record(self._copies)"),
    "a release counts for the step before": (_ENDED, _ENDED.replace("[step]", "[step - 1]")),
    "steps end one early": ("self._position.ended = step + 1", "self._position.ended = step + 2"),
    "steps end one late": ("self._position.ended = step + 1", "self._position.ended = step"),
    "copies wait for a step before": ("self._this.ended[piece.after]", "self._this.ended.get(piece.after - 1, self._entry)"),
    "copies across calls wait for the entry": (_FREED, "self._entry"),
    "copies across calls wait for a step before": (_FREED, "self._this.ended.get(piece.after - 1 + self._position.method.steps, self._entry)"),
    "the events of a pass are lost": (_TURN, "self._this, self._next = _Pass(), _Pass()"),
    "the entry is not recorded again": (_ENTRY, f"self._entry = self.__dict__.get('_entry') or {_ENTRY[14:]}"),
    "the entry is recorded on the copies": (_ENTRY, "self._entry = self._device.record(self._copies)"),
    "dropped bytes are overwritten after the release": (
        f"        if self._poison:\n            {_POISON}\n        {_ENDED}",
        f"        {_ENDED}\n        if self._poison:\n            {_POISON}",
    ),
    "more than dropped bytes is overwritten": ("move.target + move.nbytes, POISON", "move.target + move.nbytes + 64, POISON"),
    "copies on demand do not wait": (_DEMAND_BEFORE, "pass"),
    "kernels do not wait for copies on demand": (_DEMAND_AFTER, "pass"),
    "nothing is copied on demand": (_DEMAND_COPY, "pass"),
    "a barrier is none": (_BARRIER, "pass"),
    "a pass of another method goes on": ("if now.method.graph == graph:", "if True:"),
    "a pass that failed goes on": (
        "self._restart(self._position.method.graph)",
        "self._running = False",
    ),
    "what stays is never loaded": (
        "queue = first_pass(self._plan, method, resident_loaded=self._resident_loaded, piece=None)",
        "queue = first_pass(self._plan, method, resident_loaded=True, piece=None)",
    ),
    "nothing is enqueued when a pass begins": ("        self._issue()\n        self._await(method.steps)", "        self._await(method.steps)"),
    "nothing is enqueued at a release": ("self._position.ended = step + 1\n        self._issue()", "self._position.ended = step + 1"),
    "a miss is taken for a hit": ("if self._demand is None and self._expected and self._expected[-1] == step:", "if True:"),
}  # fmt: skip

MEMORY = {
    "a copy arrives 64 bytes late": ("Move(piece.file_offset, piece.address,", "Move(piece.file_offset, piece.address + 64,"),
    "a copy is read 64 bytes early": ("Move(piece.file_offset,", "Move(piece.file_offset - 64,"),
    "a copy is 64 bytes short": ("piece.stop - piece.start)", "piece.stop - piece.start - 64)"),
    "a copy is 64 bytes long": ("piece.stop - piece.start)", "piece.stop - piece.start + 64)"),
    "resident storages are not loaded": ("self._load_outside(device, source)", "pass"),
    "addresses are those of the layout": ("layout[s], plan.addresses[s])", "layout[s], layout[s])"),
}  # fmt: skip


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced, which must be there once."""
    assert module.__file__
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{source.count(old)} times: {old}"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec
    changed = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    return changed


def test_nothing_is_caught_where_nothing_is_changed() -> None:
    run_everywhere(streamers=mutant(device_streamer, _WAIT, _WAIT))


@pytest.mark.parametrize("name", STREAMER)
def test_mutants_of_the_streamer_are_caught(name: str) -> None:
    with pytest.raises(CAUGHT):
        run_everywhere(streamers=mutant(device_streamer, *STREAMER[name]))


@pytest.mark.parametrize("name", MEMORY)
def test_mutants_of_the_memory_are_caught(name: str) -> None:
    with pytest.raises(CAUGHT):
        run_everywhere(memories=mutant(device_memory, *MEMORY[name]))


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


def _of_schedule(schedule: Schedule, steps: int) -> Iterator[Schedule]:
    moved = schedule.transfers
    for k, t in enumerate(moved):
        for new in _of_transfer(t, steps):
            yield replace(schedule, transfers=(*moved[:k], *new, *moved[k + 1 :]))
        if k:
            yield replace(schedule, transfers=(*moved[: k - 1], t, moved[k - 1], *moved[k + 1 :]))
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


@pytest.mark.parametrize("case", cases()[:6], ids=lambda case: case.name)
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

"""Faults of order that plans of cases() do not show: each has a scenario, which runs right without it.

What shows one is wrong bytes, an error, or a time of the rig's clock, which counts operations (streams.h). So
a fault is found in each of the rig's orders, whatever runs when.
"""

from dataclasses import replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device import streamer as staging
from penstock.runtime.device.accelerator import AcceleratorDevice, EventClock
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.model import Drop, HostTier, Range, Schedule, Step, Storage, Trace, Transfer
from penstock.schedule.verify.proof import verify_plan
from tests.mutants.orders import ORDER_FAULTS
from tests.rig import machine
from tests.rig.rig_runs import PromptDisk, RigRun, plan_of
from tests.runtime.device.device_runs import UNIT, Case, CountError, Parts, WrongBytesError, case, cases
from tests.runtime.device.simulated.faults import Passing
from tests.runtime.training.spill_plans import spilling_plan

OPERATIONS = 64
"""Kernels that keep a stream busy for longer than all else takes that a pass enqueues at once."""


def keep_busy(scratch):
    """Enqueue `OPERATIONS` kernels on the current stream."""
    for _ in range(OPERATIONS):
        scratch.fill_(1)


class Timed(Parts):
    """Notes times on the rig's clock: in each of `pairs`, the second may not come before the first."""

    def __init__(self):
        self.pairs = []

    def device(self, device):
        self.clock, self.scratch = EventClock(device), torch.empty(8, device="rig")
        return device

    def check(self):
        if not self.pairs:
            raise CountError("nothing was timed")
        if any(self.clock.ns_between(*pair) < 0 for pair in self.pairs):
            raise CountError("what should wait has come first")


class TimedMisses(Timed):
    """The kernels before each step on demand are many, and its copies end after them."""

    def streamer(self, streamer):
        timed = self

        class Probes(Passing):
            def acquire(self, graph, step):
                misses = streamer.counters.misses
                keep_busy(timed.scratch)
                before = timed.clock.now()
                super().acquire(graph, step)
                if streamer.counters.misses > misses:
                    with streamer._copies:
                        timed.pairs.append((before, timed.clock.now()))

        return Probes(streamer)


class TimedOuts(Timed):
    """The copies before each one out are many, and the end of the step that waits for it comes after it."""

    def device(self, device):
        self._outs = {}
        copy_out = device.copy_out

        def late(stream, source, moves, label):
            with stream:
                keep_busy(self.scratch)
            copy_out(stream, source, moves, label)
            with stream:
                self._outs[label.step] = self.clock.now()

        device.copy_out = late
        return super().device(device)

    def streamer(self, streamer):
        timed = self

        class Probes(Passing):
            def release(self, graph, step):
                super().release(graph, step)
                if step in timed._outs:
                    timed.pairs.append((timed._outs.pop(step), timed.clock.now()))

        return Probes(streamer)


def named(name, some):
    return next(one for one in some if one.name == name)


def run_timed(one, timed):
    RigRun(one, timed).go()
    timed.check()


def load_late_kernels_before_misses(program):
    run_timed(named("misses", cases()), TimedMisses())


@cache
def spilling():
    """A forward writes values, which leave the arena at once, and its backward reads them in reverse."""
    weights = case("spilling", [4, 3, 5, 2, 1], [[[k] for k in range(4)]], 0.3, []).storages[:-1]
    storages = (*weights, *(Storage(UNIT * n, "produced", ()) for n in (3, 5, 2, 4)))
    count = len(weights)
    forward = tuple(Step(f"step.{k}", (k,), 30, 200, writes=(count + k,)) for k in range(count))
    backward = tuple(Step(f"back.{k}", (k, count + k), 30, 200) for k in reversed(range(count)))
    traces = tuple(
        Trace(f"method_{graph}", graph, "", steps, 40, 10, "modelled", follows=1 - graph)
        for graph, steps in enumerate((forward, backward))
    )
    payload = SimpleNamespace(storages=storages, traces=traces)
    plan = spilling_plan(payload)
    return Case("spilling", storages, lambda: plan, ((0, "in order"), (1, "in order")) * 3)


def copy_out_late(program):
    run_timed(spilling(), TimedOuts())


@cache
def with_a_ring():
    """Two methods that bring nothing for other calls, through a ring that reads ahead for one of them.

    Both begin with the storage that stays. The planner would bring the next one before the call begins.
    """
    planned = case("two methods", [2] * 6, [[[0], [1], [2]], [[0], [3], [4]]], 0, [], host=2 * UNIT)
    layout, nbytes = planned.plan.arena.layout, 2 * UNIT
    ranges = [Range(start, start + nbytes) for start in layout]
    schedules = tuple(
        Schedule(
            graph,
            tuple(Transfer(ranges[s].start, ranges[s].stop, k, k - 1) for k, s in enumerate(streamed, 1)),
            tuple(Drop(ranges[s].start, ranges[s].stop, k) for k, s in enumerate(streamed, 1)),
            1,
            staged=(nbytes, nbytes),
            staging_bytes=nbytes,
        )
        for graph, streamed in enumerate(((1, 2), (3, 4)))
    )
    plan = replace(
        planned.plan,
        budget=3 * nbytes,
        arena_bytes=2 * nbytes,
        addresses=(0, *[nbytes] * 4, -1),
        resident=(ranges[0],),
        boundary=(ranges[0],),
        schedules=schedules,
        host=HostTier(nbytes, ()),
    )
    verify_plan(planned.storages, plan.traces, plan)
    return replace(planned, planned=lambda: plan, passes=tuple((k, "in order") for k in (0, 1, 1, 0, 1)))


def call_another_method_than_was_read_ahead(program):
    RigRun(with_a_ring()).go()


def align_reads(program):
    """Reads of 768 bytes are large here, and blocks have 1 KiB. The disk reads as soon as it may."""
    sizes, reads = [4, 1, 6, 2, 2, 9, 3, 1, 5, 2, 3], [[k] for k in range(10)]
    passes = [(0, "in order"), (1, "in order"), (1, "in order"), (0, "in order")]
    aligned = case("aligned", sizes, [reads, reads[:6]], 0.4, passes, host=11 * UNIT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "_LARGE", 3 * UNIT)
        patched.setattr(staging, "BLOCK", 4 * UNIT)
        RigRun(aligned, disk=PromptDisk).go()


def close_while_replays_run(program):
    """A pass is captured, and its caller replays it on a stream of his own as the module is closed."""
    stream, values, scratch = torch.Stream("rig"), torch.randn(2, 64).to("rig"), torch.empty(8, device="rig")
    device = AcceleratorDevice("rig")
    plan = plan_of(program, "50%", wrap="barrier")
    with torch.no_grad(), load_module(program, plan, LoadRequest(device="rig"), device=device) as streamed:
        streamed(values)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(AcceleratorDevice, "capturing", True)
            streamed(values)
        torch.accelerator.current_stream().synchronize()
        inner = streamed._weights.streamer
        arena = inner._weights.arena
        expected = arena.cpu()
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            keep_busy(scratch)
            found = arena.clone()
        waited = machine.blocked().get("a device", 0)
    if machine.blocked().get("a device", 0) == waited:
        raise CountError("closing has not waited for the device")
    taken = [torch.full((4096,), 7, dtype=torch.uint8, device="rig") for _ in range(64)]
    torch.accelerator.current_stream().synchronize()
    with stream:
        if not torch.equal(found.cpu(), expected):
            raise WrongBytesError("a replay has read memory that was given back")
    del taken


def lose_the_last_copy_of_a_pass(program):
    """The thread that copies from ordinary memory fails at the last copy of a pass, which must raise."""
    device, values, copies = AcceleratorDevice("rig", page_lock=False), torch.randn(2, 64).to("rig"), [0, 0]
    plan = plan_of(program, "50%", wrap="barrier")

    def copy(stream, *args):
        copies[0] += 1
        if copies[0] == copies[1]:
            stream.run(fail)
        else:
            AcceleratorDevice.copy(device, stream, *args)

    def fail():
        raise RuntimeError("the link is down")

    with torch.no_grad(), load_module(program, plan, LoadRequest(device="rig"), device=device) as streamed:
        streamed(values)
        device.copy = copy
        expected = streamed(values)
        copies[:] = 0, copies[0]
        try:
            output = streamed(values)
        except RuntimeError as error:
            if "the link is down" in str(error):
                return
            raise
        if not torch.equal(output, expected):
            raise WrongBytesError("a pass has computed with a weight that was not copied")
        raise CountError(f"no error in a pass of {copies[0]} copies of which one failed")


def take_all_streams(program):
    """The stream of copies is none that the caller can get."""
    with program.load(plan=plan_of(program, "50%"), device="rig") as streamed:
        inner = streamed._weights.streamer
        streams = [torch.accelerator.current_stream(), *(torch.Stream("rig") for _ in range(100))]
        if inner._copies in streams:
            raise CountError("kernels of the caller's run on the stream of copies")


SCENARIOS = {
    "copies on demand do not wait for earlier kernels": load_late_kernels_before_misses,
    "the end of a step waits for the copies out of another": copy_out_late,
    "closing does not wait for replays": close_while_replays_run,
    "events of a thread that has failed look done": lose_the_last_copy_of_a_pass,
    "a pass follows the reads ahead of another method": call_another_method_than_was_read_ahead,
    "a read skips bytes of the ring that are not free": align_reads,
    "copies have a stream that the caller can get": take_all_streams,
}
"""What shows each fault of order, by its name in `ORDER_FAULTS`."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    path = tmp_path_factory.mktemp("orders") / "m.penstock"
    return penstock.compile(export(module, (torch.zeros(2, 64),)), path)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_run_right_in_any_order(program, order, name):
    SCENARIOS[name](program)


@pytest.mark.parametrize("name", ORDER_FAULTS)
def test_faults_of_order_are_found_in_any_order(program, order, name, monkeypatch):
    fault = ORDER_FAULTS[name]
    module = import_module("penstock." + fault.path.removesuffix(".py").replace("/", "."))
    function = attrgetter(fault.scope)(module)
    monkeypatch.setattr(function, "__code__", fault.code_for(function))
    with pytest.raises((WrongBytesError, CountError, PenstockError)):
        SCENARIOS[name](program)

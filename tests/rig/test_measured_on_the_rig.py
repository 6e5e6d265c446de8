"""Times of a device are those of its kernels, and not those of the calls that enqueue them."""

import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device.accelerator import AcceleratorDevice, EventClock
from penstock.runtime.machine import calibrate
from penstock.runtime.machine.figures import measurements
from tests.rig import machine


def test_steps_are_timed_where_they_run(tmp_path, order):
    """An operation of the rig takes a millisecond: a kernel, the end of a tensor, the record of an event."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Sigmoid(), nn.Linear(8, 8, bias=False))
    values = torch.randn(2, 8)
    program = penstock.compile(export(module.requires_grad_(False), (values,)), tmp_path / "m.penstock")
    plan = program.plan("100%", device="rig", hardware="h200")
    with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
        there = values.to("rig")
        streamed(there)
        before = machine.blocked()
        trace = streamed.measure(there)
        assert set(machine.blocked()) - set(before) <= {"an event"}  # it waits when all is called
    assert [(step.lead_ns, step.read_ns) for step in trace.steps] == [
        (1_000_000, 2_000_000),
        (5_000_000, 3_000_000),
    ]
    assert (trace.tail_ns, trace.times) == (1_000_000, "measured")


def test_a_clock_of_events_starts_nothing_early(late):
    clock = EventClock(AcceleratorDevice("rig"))
    start = clock.now()
    there = torch.zeros(8, device="rig").add_(1)
    stop = clock.now()
    assert machine.blocked() == {}
    assert clock.ns_between(start, stop) == 3_000_000
    assert clock.ns_between(start, start) == 0
    assert there.tolist() == [1] * 8


def test_times_of_streams_can_be_compared(order):
    """What waits for another stream begins when that has come there; else it runs beside it."""
    streams = [torch.Stream("rig") for _ in range(2)]

    def now(stream):
        event = torch.Event("rig", enable_timing=True)
        event.record(stream)
        return event

    values = torch.zeros(8, device="rig")
    streams[1].wait_stream(streams[0])
    began, beside = now(streams[0]), now(streams[1])
    with streams[0]:
        for _ in range(20):
            values.add_(1)
    done = now(streams[0])
    streams[1].wait_event(done)
    behind = now(streams[1])
    torch.accelerator.synchronize()
    assert began.elapsed_time(done) == 21
    assert done.elapsed_time(began) == -21
    assert began.elapsed_time(beside) == 1  # the wait of its stream is behind an event of the other
    assert done.elapsed_time(behind) == 2  # the wait, and the record


def test_a_device_is_measured_once(monkeypatch, tmp_path, order):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = ()
    reserved = torch.accelerator.memory_reserved()
    first = calibrate.measure_accelerator("rig", weights, None)
    assert torch.accelerator.memory_reserved() == reserved  # its buffers are given back
    assert (first.name, first.memory_nbytes) == ("rig:0", machine.MEMORY)
    assert min(first.flops_per_s, first.memory_bytes_per_s, first.link_bytes_per_s) > 0
    assert "measured on rig" in first.note
    assert "page-locked" in first.note
    known = [one.subject.quantity for one in measurements()]
    assert sorted(known) == ["copies", "memory", "products"]
    before = machine.blocked()
    assert calibrate.measure_accelerator("rig", weights, None) == first
    assert machine.blocked() == before

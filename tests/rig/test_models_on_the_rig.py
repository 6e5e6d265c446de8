"""Whole programs stream to the rig with the bits of the resident module; times are those of kernels."""

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device.accelerator import AcceleratorDevice, EventClock
from penstock.runtime.machine import calibrate
from penstock.runtime.machine.figures import measurements
from tests.rig import machine
from tests.rig.rig_runs import plan_of
from tests.runtime.models import Stack, aligned


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A small stack of blocks whose head is tied to its embedding, as a program, and the module itself."""
    torch.manual_seed(0)
    module = Stack(64, 4, 90).eval().requires_grad_(False)
    path = tmp_path_factory.mktemp("stack") / "stack.penstock"
    return penstock.compile(export(module, (torch.zeros(2, 5, dtype=torch.int64),)), path), module


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_a_stack_streams_to_the_rig(stack, order, wrap):
    program, module = stack
    calls = [torch.randint(0, 90, (2, 5)).to("rig") for _ in range(3)]
    resident = aligned(module).to("rig")
    expected = [resident(tokens) for tokens in calls]
    for budget in (program.floor("rig"), "60%"):
        plan = plan_of(program, budget, wrap=wrap)
        with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
            before = machine.blocked()
            outputs = [streamed(tokens) for tokens in calls]
            assert machine.blocked() == before  # the streamer never waits
            assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
            assert streamed.stats.bytes_moved > plan.streamed_bytes
            assert streamed.stats.misses == 0


class Split(nn.Module):
    """Layers on a device; on the CPU a table, a count of calls, an empty tensor, and one made in the call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("calls", torch.zeros(1))
        self.table, self.empty = torch.randn(2, 32), torch.empty(0, 32)

    def forward(self, x):
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x).tanh()
        made = torch.tensor([2.0, 3.0], device=x.device)[:, None]
        return torch.cat(
            [self.empty.to(x.device), x * made * self.calls.to(x.device)]
        ), self.table + self.calls


@pytest.mark.parametrize("share", ["50%", "100%"])
def test_what_a_program_for_the_rig_has_on_the_cpu_stays_there(late, tmp_path, share):
    module = Split().requires_grad_(False).to("rig")
    module.calls = module.calls.cpu()
    x = torch.randn(2, 32).to("rig")
    program = penstock.compile(export(module, (x,)), tmp_path / "split.penstock")
    plan = program.plan(share, device="rig", hardware="h200")
    expected = [[one.clone() for one in module(x)] for _ in range(3)]
    allocated = torch.accelerator.memory_allocated()
    with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
        held, stats = torch.accelerator.memory_allocated() - allocated, streamed.stats
        outputs = [streamed(x) for _ in range(3)]
        assert [[one.device.type for one in each] for each in outputs] == [["rig", "cpu"]] * 3
        pairs = [pair for each in zip(outputs, expected, strict=True) for pair in zip(*each, strict=True)]
        assert [torch.equal(*pair) for pair in pairs] == [True] * 6
        assert streamed.stats.misses == 0
        assert (streamed.stats.bytes_moved > 0) == (share == "50%")
    assert stats.held_bytes <= held < stats.held_bytes + 512 * 16
    assert stats.held_bytes <= plan.budget - (2 * 32 + 1) * 4


@pytest.mark.parametrize("share", ["60%", "100%"])
def test_a_method_for_the_cpu_beside_one_for_the_rig_moves_whole(late, tmp_path, share):
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False) for _ in range(2))
    first, second = (nn.ModuleDict({name: one}) for name, one in zip(("a", "b"), layers, strict=True))
    first.forward, second.forward = first["a"].forward, second["b"].forward
    x = torch.randn(2, 32)
    methods = {"first": export(first, (x,)), "second": export(second.to("rig"), (x.to("rig"),))}
    program = penstock.compile(methods, tmp_path / "both.penstock")
    plan = program.plan(share, device="rig", hardware="h200")
    first.to("rig")
    with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
        assert torch.equal(streamed.first(x.to("rig")), first(x.to("rig")))
        assert torch.equal(streamed.second(x.to("rig")), second(x.to("rig")))


def test_one_name_for_weights_on_two_devices_is_refused(late, tmp_path):
    layer, x = nn.Linear(32, 32).requires_grad_(False), torch.randn(2, 32)
    methods = {"first": export(layer, (x,))}
    methods["second"] = export(nn.Linear(32, 32).requires_grad_(False).to("rig"), (x.to("rig"),))
    with pytest.raises(penstock.PassError, match="two methods have weights called 'weight' that differ"):
        penstock.compile(methods, tmp_path / "both.penstock")


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

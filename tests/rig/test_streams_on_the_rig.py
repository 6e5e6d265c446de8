"""What only late kernels show: passes on several streams, and closing while kernels run."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device import streamer
from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.facts.model import Range
from tests.rig import machine
from tests.rig.rig_runs import plan_of


class Wide(nn.Module):
    """Linears of one size, of which the first ones stay; each output shows all weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    torch.manual_seed(1)
    module = Wide().requires_grad_(False)
    path = tmp_path_factory.mktemp("wide") / "wide.penstock"
    return penstock.compile(export(module, (torch.zeros(2, 64),)), path), module


@pytest.mark.parametrize("share", ["50%", "80%", "100%"])
def test_closing_waits_for_kernels_on_any_stream(wide, order, share):
    program, module = wide
    values = torch.randn(2, 64).to("rig")
    expected = module.to("rig")(values)
    stream = torch.Stream("rig")
    stream.wait_stream(torch.accelerator.current_stream())
    plan = plan_of(program, share, keep=("layers.7.*",))  # read behind all probes
    streamed = program.load(plan=plan, device="rig")
    with torch.no_grad(), stream:
        output = streamed(values)
    streamed.close()
    del streamed
    taken = [torch.full((4096,), 7.0, device="rig") for _ in range(64)]  # the memory that was given back
    torch.accelerator.current_stream().synchronize()
    with stream:
        assert torch.equal(output, expected)
    del taken


class Counting(AcceleratorDevice):
    """Counts what is called for kernels to wait for, by whether it is for those of the caller."""

    waits: Counter[bool]

    def _wait(self, stream, event):
        self.waits[stream == self.current_stream()] += 1
        super()._wait(stream, event)


def test_a_streamed_step_makes_no_event_and_records_and_waits_once(wide, late, monkeypatch):
    """What it costs the host. A pass has one event of its own, for which the next one waits."""
    program, _ = wide
    calls, copy = Counter[str](), torch.Tensor.copy_

    class Event(torch.Event):
        def __init__(self, *_, **__):
            calls["events"] += 1

        def record(self, stream=None):
            calls["records"] += 1
            super().record(stream)

    def copied(self, *given, **options):
        calls["copies"] += options == {"non_blocking": True}  # others are those of kernels
        return copy(self, *given, **options)

    device, values = Counting("rig"), torch.randn(2, 64).to("rig")
    device.waits = Counter()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    plan = plan_of(program, "50%")
    transfers = plan.schedules[0].transfers
    with torch.no_grad(), load_module(program, plan, LoadRequest(device="rig"), device=device) as streamed:
        engine = streamed._weights.streamer
        steps = len(engine.probed(0))
        pieces = sum(len(engine._weights.moves(Range(t.start, t.stop))) for t in transfers)
        for turn in range(5):
            calls.clear()
            device.waits.clear()
            streamed(values)
            if turn > 1:  # once the pool has the events of two passes
                assert calls == {"events": 1, "records": steps + len(transfers) + 1, "copies": pieces}
                assert device.waits == {False: len(transfers), True: len({t.step for t in transfers}) + 1}
    assert len(transfers) > 1


def test_starting_over_keeps_nothing_of_earlier_starts(wide, late):
    program, _ = wide
    values, counts = torch.randn(2, 64).to("rig"), []
    with torch.no_grad(), program.load(plan=plan_of(program, "50%"), device="rig") as streamed:
        for _ in range(4):
            streamed._weights.streamer.abort()
            for _ in range(2):
                streamed(values)
            gc.collect()
            counts.append(sum(isinstance(one, streamer._Transfer) for one in gc.get_objects()))
    assert counts[0] > 0
    assert len({*counts}) == 1


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50)).requires_grad_(False)
    path = tmp_path_factory.mktemp("embedding") / "m.penstock"
    return penstock.compile(export(module, (torch.arange(6),)), path), module


def test_an_error_of_a_late_kernel_is_the_devices_and_closing_stays_clean(embedding, order):
    program, module = embedding
    tokens, plan = torch.arange(6), plan_of(program, "60%")
    expected = module.to("rig")(tokens.to("rig")).cpu()
    streamed = program.load(plan=plan, device="rig")
    with torch.no_grad():
        wrong = (tokens + 45).to("rig")
        with pytest.raises((RuntimeError, penstock.StreamError), match="index out of range"):
            streamed(wrong).cpu()
        with pytest.raises(penstock.StreamError, match=r"rig:0 is lost .* index out of range"):
            streamed(wrong)
        streamed.close()
        torch.ops.rig.restart()  # as a new process would
        with program.load(plan=plan, device="rig") as again:
            assert torch.equal(again(tokens.to("rig")).cpu(), expected)


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("share", ["floor", "60%"])
def test_passes_on_streams_in_turn_see_each_others_weights(wide, order, wrap, share):
    program, module = wide
    calls = [torch.randn(2, 64).to("rig") for _ in range(6)]
    resident = module.to("rig")
    expected = [resident(values) for values in calls]
    streams = [torch.Stream("rig") for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())
    budget = program.floor("rig") if share == "floor" else share
    plan = plan_of(program, budget, wrap=wrap)
    outputs = []
    with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
        before = machine.blocked()
        for number, values in enumerate(calls):
            with streams[number % 2]:
                outputs.append(streamed(values))
        assert machine.blocked() == before
        streams[0].synchronize()  # as far as the other has to come for it, and no further
        for number, output in enumerate(outputs):
            with streams[number % 2]:
                assert torch.equal(output, expected[number]), number

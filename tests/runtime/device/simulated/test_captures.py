"""Passes that a caller captures as a CUDA graph, by the rules of graphs, beside passes that are called."""

import gc

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from tests.runtime.device.simulated.ordered_device import CapturedDevice
from tests.runtime.models import Stack, aligned, broken

PREFILL, DECODE = torch.arange(12).view(2, 6), torch.arange(2).view(2, 1)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """One method for six tokens and one for a single token, with the same weights."""
    torch.manual_seed(0)
    module = aligned(Stack(64, 4, 90).eval()).requires_grad_(False)
    methods = {"prefill": export(module, (PREFILL,)), "decode": export(module, (DECODE,))}
    path = tmp_path_factory.mktemp("methods") / "methods.penstock"
    return penstock.compile(methods, path), module


def load(opened, share="50%"):
    budget = opened.floor("sim:t4") if share == "floor" else share
    plan = opened.plan(budget, device="sim:t4", wrap="barrier")
    device = CapturedDevice(plan.hardware)
    return load_module(opened, plan, LoadRequest(), device=device), device


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_one_method_is_captured_and_the_other_is_called(program, share):
    """The one on a stream of its own, and the other on one of two in turn."""
    module, (streamed, device) = program[1], load(program[0], share)
    streams = [device.current_stream(), device.open_kernels("another")]
    with torch.no_grad(), streamed:
        for number, captured in enumerate((False, False, True, False, True)):
            with device.kernels_on(streams[number % 2]):
                assert torch.equal(streamed.prefill(PREFILL), module(PREFILL))
            streamed.decode(DECODE)
            if captured:
                with device.capture():
                    assert torch.equal(streamed.decode(DECODE), module(DECODE))
            assert torch.equal(streamed.decode(DECODE), module(DECODE))
        with device.capture():
            assert torch.equal(streamed.prefill(PREFILL), module(PREFILL))
        assert torch.equal(streamed.decode(DECODE), module(DECODE))
        assert streamed.stats.misses == 0


class Shallow(nn.Module):
    """One method goes through all layers, and the other through the first, which stays."""

    def __init__(self):
        super().__init__()
        self.first, self.others = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def deep(self, x):
        x = self.first(x)
        for layer in self.others:
            x = layer(x).relu()
        return x

    def shallow(self, x):
        return self.first(x)


def test_a_pass_that_copies_nothing_is_captured_behind_one_that_does(tmp_path):
    module, x, methods = Shallow().requires_grad_(False), torch.randn(2, 64), {}
    for name in ("deep", "shallow"):
        module.forward = getattr(module, name)
        methods[name] = export(module, (x,))
    opened = penstock.compile(methods, tmp_path / "shallow.penstock")
    plan = opened.plan("60%", device="sim:t4", wrap="barrier", keep=("first.*",))
    device = CapturedDevice(plan.hardware)
    with torch.no_grad(), load_module(opened, plan, LoadRequest(), device=device) as streamed:
        for name in ("deep", "deep", "shallow"):
            assert torch.equal(streamed.call(name, x), getattr(module, name)(x))
        moved = streamed.stats.bytes_moved
        with device.capture():
            assert torch.equal(streamed.call("shallow", x), module.shallow(x))
        assert streamed.stats.bytes_moved == moved > 0
        assert torch.equal(streamed.call("deep", x), module.deep(x))


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_an_exception_in_a_capture_leaves_later_calls_as_they_were(program, share):
    module, (streamed, device) = program[1], load(program[0], share)
    with torch.no_grad(), streamed:
        for _ in range(2):
            streamed.decode(DECODE)
        with broken(streamed, 3, InterruptedError), device.capture():
            streamed.decode(DECODE)
        for tokens, call in ((DECODE, streamed.decode), (PREFILL, streamed.prefill)) * 2:
            assert torch.equal(call(tokens), module(tokens))
        with device.capture():
            assert torch.equal(streamed.prefill(PREFILL), module(PREFILL))


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_what_a_capture_would_load_is_not_taken_for_loaded(program, share):
    module, (streamed, device) = program[1], load(program[0], share)
    with torch.no_grad(), streamed:
        assert torch.equal(streamed.decode(DECODE), module(DECODE))
        with broken(streamed, 3, InterruptedError):
            streamed.decode(DECODE)
        with device.capture():
            assert torch.equal(streamed.decode(DECODE), module(DECODE))
        for tokens, call in ((DECODE, streamed.decode), (PREFILL, streamed.prefill)) * 2:
            assert torch.equal(call(tokens), module(tokens))


def test_what_replays_would_not_do_is_not_captured(program):
    """Bringing weights for a pass to come, and reading from disk."""
    opened, module = program
    overlapping = opened.plan("50%", device="sim:t4")
    read = opened.plan("50%", device="sim:t4", wrap="barrier", host_memory=opened.weight_bytes // 3)
    assert read.schedules[0].staging_bytes > 0
    for plan, why in ((overlapping, "wrap='barrier'"), (read, "more host_memory=")):
        device = CapturedDevice(plan.hardware)
        with torch.no_grad(), load_module(opened, plan, LoadRequest(), device=device) as streamed:
            for _ in range(2):
                assert torch.equal(streamed.decode(DECODE), module(DECODE))
                with (
                    pytest.raises(penstock.StreamError, match=f"cannot be captured .*{why}"),
                    device.capture(),
                ):
                    streamed.decode(DECODE)


def test_memory_that_replays_may_touch_is_kept_until_the_module_is_gone(program):
    streamed, device = load(program[0])
    with torch.no_grad():
        streamed.decode(DECODE)
        with device.capture():
            streamed.decode(DECODE)
    arena = max((one.untyped_storage() for one in streamed._weights.tensors.values()), key=len)
    for _ in range(2):
        streamed.close()
        with pytest.raises(penstock.StreamError, match="closed"):
            streamed.decode(DECODE)
        assert len(arena) == streamed.plan.arena_bytes > 0
    del streamed
    gc.collect()
    assert len(arena) == 0

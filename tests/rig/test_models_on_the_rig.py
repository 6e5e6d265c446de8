"""Whole programs stream to the rig, and give the bits of the module that is resident there."""

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
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

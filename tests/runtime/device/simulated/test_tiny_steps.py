"""Programs of many tiny steps, whose launches take the calling thread longer than the device takes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.integrations import apply
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.clock.event_graph import launched_steps
from penstock.schedule.facts.hardware import PRESETS
from tests.runtime.device.simulated.ordered_device import CapturedDevice

H200 = "sim:h200"
X = torch.ones(2, 32)
LIMIT = "the calling thread is the limit: launching the "


def tiny(count=60):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count))).eval()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return penstock.compile(export(tiny(), (X,)), tmp_path_factory.mktemp("tiny") / "tiny.penstock")


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("share", ["5%", "30%", "60%", "95%"])
def test_passes_take_what_is_predicted(program, wrap, share):
    plan = program.plan(share, device=H200, wrap=wrap)
    times = []
    with torch.no_grad(), program.load(plan=plan, device=H200) as module:
        assert module._weights.probed(0) == launched_steps(plan, 0)
        for _ in range(60):  # until the device has caught up with the launches
            module(X)
            times.append(module.stats.simulated_seconds)
    assert times[-1] - times[-2] == pytest.approx(plan.predicted_seconds, abs=1e-9)
    launching = 5_800 * len(launched_steps(plan, 0))
    assert plan.predicted_ns >= launching
    if share == "5%":
        assert plan.predicted_ns == launching > plan.compute_ns
        alone = replace(PRESETS["h200"], host_step_ns=0)
        assert program.plan(share, device=H200, hardware=alone, wrap=wrap).predicted_ns < launching


def test_a_load_whose_launches_are_the_limit_can_be_replayed(program, said):
    with program.load("5%", device=H200) as module:
        plan = module._weights.plan
    assert plan.wrap == "barrier"
    assert plan == program.plan("5%", device=H200)
    count = len(launched_steps(plan, 0))
    words = f"{LIMIT}{count} streamed steps of forward takes {5.8 * count:.3g} us a pass, compute 204 us; "
    assert f"{words}planned with wrap='barrier', so that calls can be captured as graphs, whose " in said()
    device = CapturedDevice(plan.hardware)
    with torch.no_grad(), load_module(program, plan, LoadRequest(), device=device) as module:
        expected = module(X)
        with device.capture():
            assert torch.equal(module(X), expected)


def test_a_wrap_that_is_given_stays(program, said):
    plan = program.plan("5%", device=H200, wrap="overlap")
    assert plan.wrap == "overlap"
    with program.load(plan=plan, device=H200) as module:
        assert module._weights.plan.wrap == "overlap"
    assert LIMIT not in said()


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("95%", {}),  # few steps stream
        ("100%", {}),
        ("5%", {"hardware": replace(PRESETS["h200"], host_step_ns=0)}),
        ("5%", {"hardware": replace(PRESETS["h200"], link_bytes_per_s=1e8)}),  # the link is the limit
        ("5%", {"host_memory": "64KiB"}),  # what comes from a disk cannot be captured
    ],
)
def test_calls_overlap_where_replays_would_gain_nothing(program, said, budget, options):
    assert program.plan(budget, device=H200, **options).wrap == "overlap"
    assert LIMIT not in said()


class Wide(nn.Module):
    """A weight that is ten times as large as each of the five behind it."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 320, bias=False)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))

    def forward(self, x):
        x = self.wide(x)[:, :32]
        for layer in self.layers:
            x = layer(x)
        return x


def test_calls_overlap_where_joining_them_costs_more_than_launches(tmp_path, said):
    program = penstock.compile(export(Wide().eval(), (X,)), tmp_path / "wide.penstock")
    overlap, barrier, chosen = (
        program.plan(54_272, device=H200, wrap=wrap) for wrap in ("overlap", "barrier", None)
    )
    assert barrier.predicted_ns > overlap.predicted_ns == 5_800 * len(launched_steps(overlap, 0))
    assert chosen == overlap
    assert LIMIT not in said()


def test_apply_says_what_would_help(tmp_path, said):
    model = tiny(24)
    expected = model(X)
    with torch.no_grad(), apply(model, "30KiB", device=H200, cache=tmp_path):
        for _ in range(3):
            assert torch.equal(model(X), expected)
    line = next(line for line in said().splitlines() if LIMIT in line)
    assert line.endswith(
        "larger batches help, and penstock.compile, whose programs can be captured and replayed as graphs"
    )

"""Whole programs on the simulated device whose host holds a part of the weights."""

import itertools
import os
import shutil

import pytest
import torch

import penstock
from tests.hunt import nightly_but


@pytest.mark.parametrize(
    ("host_memory", "wrap"),
    nightly_but(
        {("25%", "overlap"), ("64KiB", "barrier")},
        itertools.product(("25%", "60%", "64KiB"), ("overlap", "barrier")),
    ),
)
def test_a_host_that_holds_a_part_streams_the_rest_from_the_files(stack, host_memory, wrap):
    program = stack.open()
    budget = program.floor("sim:rtx4090") + (1 << 20)
    plan = program.plan(budget, device="sim:rtx4090", wrap=wrap, host_memory=host_memory)
    with torch.no_grad(), program.load(plan=plan, device="sim:rtx4090") as module:
        times = []
        for _ in range(4):
            assert torch.equal(module(stack.tokens), stack.expected)
            times.append(module.stats.simulated_seconds)
        assert module.stats.misses == 0
        assert 0 < module.stats.pinned_bytes <= plan.host.nbytes
        # To let reads go past the page cache, the ring gives up to 4 KiB for each large one.
        assert times[-1] - times[-2] == pytest.approx(plan.predicted_seconds, rel=1e-3)


def test_host_memory_is_capped_as_the_machine_is(stack, monkeypatch):
    program = stack.open()
    budget = program.floor("sim:h100")
    monkeypatch.setattr("penstock.runtime.memory_split.usable_bytes", lambda: 2 << 20)
    with torch.no_grad(), program.load(budget, device="sim:h100") as module:
        assert torch.equal(module(stack.tokens), stack.expected)
        assert 0 < module.stats.pinned_bytes <= 2 << 20
    with program.load(budget, device="sim:h100", host_memory="3MiB") as module:
        assert 2 << 20 < module.stats.pinned_bytes <= 3 << 20
    with pytest.raises(penstock.BudgetError, match="a CPU has no host behind it"):
        program.load("50%", host_memory="3MiB")
    with pytest.raises(penstock.PlanError, match="host_memory= are decided by the plan"):
        program.load(plan=program.plan("50%", device="sim"), device="sim", host_memory="3MiB")


class Halves(torch.nn.Module):
    """Two methods that read other weights."""

    def __init__(self):
        super().__init__()
        self.ups = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(6))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(6))

    def encode(self, x):
        for layer in self.ups:
            x = layer(x).relu()
        return x

    def decode(self, x):
        for layer in self.downs:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize(
    ("budget", "host_memory"),
    nightly_but(
        {("30%", "64KiB"), ("51%", "50%"), ("75%", "100%"), ("90%", "200%")},
        itertools.product(("30%", "51%", "75%", "90%"), ("64KiB", "50%", "100%", "200%")),
    ),
)
def test_two_methods_with_other_weights_share_a_host(tmp_path, budget, host_memory):
    module, x = Halves().eval(), torch.randn(2, 96)
    exported = {}
    for name in ("encode", "decode"):
        module.forward = getattr(module, name)
        exported[name] = torch.export.export(module, (x,))
    program = penstock.compile(exported, tmp_path / "halves.penstock")
    with torch.no_grad(), program.load(budget, device="sim:h100", host_memory=host_memory) as loaded:
        for name in ("encode", "encode", "decode", "encode", "decode", "decode"):
            assert torch.equal(loaded.call(name, x), getattr(module, name)(x)), name


def test_limits_of_the_host_are_said(stack, monkeypatch):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match="give at least 16384"):
        program.load("100%", device="sim:h100", host_memory=1)
    plan = program.plan("50%", device="sim:h100")
    monkeypatch.setattr("penstock.runtime.memory_split.usable_bytes", lambda: 1 << 20)
    with pytest.raises(penstock.BudgetError, match=r"1\.00 MiB may be taken: plan with host_memory="):
        program.load(plan=plan, device="sim:h100")
    with torch.no_grad(), program.load("50%", device="sim") as module:  # no preset, and yet a disk
        assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.pinned_bytes <= 1 << 20


def test_a_file_that_changes_while_it_streams_is_an_error_and_the_next_load_says_so(stack, tmp_path):
    path = tmp_path / "copy.penstock"
    shutil.copytree(stack.path, path)
    program = penstock.open(path)
    module = program.load(program.floor("sim:h100"), device="sim:h100", host_memory="1MiB")
    with torch.no_grad():
        module(stack.tokens)
        weights = max(path.iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(weights, weights.stat().st_size - 4096)
        for _ in range(2):
            with pytest.raises(penstock.SourceError, match="truncated while in use"):
                module(stack.tokens)
    module.close()
    with pytest.raises(penstock.SourceError):
        penstock.open(path)

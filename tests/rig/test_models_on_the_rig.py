"""Whole programs stream to the rig, and give the bits of the module that is resident there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import export

import penstock
from tests.rig import machine
from tests.runtime.models import Stack, aligned


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small stack of blocks whose head is tied to its embedding, as a program, and the module itself."""
    torch.manual_seed(0)
    module = Stack(64, 4, 90).eval().requires_grad_(False)
    path = tmp_path_factory.mktemp("stack") / "stack.penstock"
    return penstock.compile(export(module, (torch.zeros(2, 5, dtype=torch.int64),)), path), module


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_a_stack_streams_to_the_rig(stack: Any, order: str, wrap: Any) -> None:
    program, module = stack
    calls = [torch.randint(0, 90, (2, 5)).to("rig") for _ in range(3)]
    resident = aligned(module).to("rig")
    expected = [resident(tokens) for tokens in calls]
    for budget in (program.floor("rig"), "60%"):
        plan = program.plan(budget, device="rig", hardware="h200", wrap=wrap)
        with torch.no_grad(), program.load(plan=plan, device="rig") as streamed:
            before = machine.blocked()
            outputs = [streamed(tokens) for tokens in calls]
            assert machine.blocked() == before  # the streamer never waits
            assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
            assert streamed.stats.bytes_moved > plan.streamed_bytes
            assert streamed.stats.misses == 0

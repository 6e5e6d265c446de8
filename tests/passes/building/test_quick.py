"""An export that spares what nobody asks for is the same export."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn

from penstock.passes.building.fake_export import quick

COUNTED = re.compile(r"<eval_with_key>\.\d+")
"""The name of a compiled graph, which counts those that were compiled before."""


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            scale = x.sum()
        return self.linear(x) * scale


class Layers(nn.Module):
    def __init__(self, branching):
        super().__init__()
        self.branching = branching
        self.layers = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if not self.branching:
            return x
        return torch.cond(x.sum() > 0, lambda value: value + 1, lambda value: value - 1, (x,))


def exported(context, monkeypatch, branching):
    """An exported program, and how often graphs of it were compiled."""
    recompile, compiled = fx.GraphModule.recompile, []

    def counting(module):
        compiled.append(module)
        return recompile(module)

    torch.manual_seed(0)
    module = Layers(branching).eval().requires_grad_(False)
    with monkeypatch.context() as patch, context:
        patch.setattr(fx.GraphModule, "recompile", counting)
        return torch.export.export(module, (torch.ones(2, 4),), strict=False), len(compiled)


@pytest.mark.parametrize("branching", [False, True])
def test_graphs_stacks_and_results_are_those_of_torch(monkeypatch, branching):
    before, often = exported(nullcontext(), monkeypatch, branching)
    after, seldom = exported(quick(), monkeypatch, branching)
    assert seldom < often
    if not torch.__version__.startswith("2.11."):  # which calls its graphs more often
        assert branching or seldom <= 3  # bodies of control flow are called while they are exported
    for first, second in zip(before.graph_module.modules(), after.graph_module.modules(), strict=True):
        if isinstance(first, fx.GraphModule):
            assert first.code == second.code
            stacks = [
                [COUNTED.sub("", node.stack_trace or "") for node in one.graph.nodes]
                for one in (first, second)
            ]
            assert stacks[0] == stacks[1]
            assert any(stack and f'{__file__}", line' in stack for stack in stacks[1])
    assert COUNTED.sub("", str(before)) == COUNTED.sub("", str(after))
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    assert torch.equal(before.module()(x), after.module()(x))


def test_torch_is_as_it_was_afterwards():
    tracebacks = fx.proxy.CapturedTraceback
    with quick():
        assert fx.proxy.CapturedTraceback is not tracebacks
    assert fx.proxy.CapturedTraceback is tracebacks

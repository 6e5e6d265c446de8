"""Regions of another grad mode: apart from them, one step reads the whole model."""

import copy

import pytest
import torch
from torch import nn

from penstock.passes.annotate import annotate
from penstock.passes.graph.nodes import inline_grad_regions, without_grad_regions
from penstock.passes.lowering import eager
from penstock.passes.probes import insert_probes, streaming
from tests.passes.pass_runs import prepare, same_bits

# Torch itself looks at it when it traces a branch.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("calls", torch.zeros(8))


class WholeForward(Net):
    @torch.no_grad()
    def forward(self, x):
        self.calls.add_(1)
        return {"y": self.b(torch.relu(self.a(x))), "calls": self.calls}, self.c(x)


class Mixed(Net):
    """Regions before, inside and behind others; a branch and a weight's view inside of one."""

    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
            with torch.enable_grad():
                y = self.b(y) * self.calls
            y = torch.cond(x.sum() > 0, self.c, torch.relu, (y,))
        z = self.a(y)
        with torch.no_grad():
            self.calls.mul_(2)
            return y, x, z + self.c(z), self.b.weight.T[1:]


class Branching(Net):
    @torch.no_grad()
    def forward(self, x):
        y = torch.relu(self.a(x))
        with torch.enable_grad():
            z = torch.relu(y)
        return torch.cond(x.sum() > 0, self.c, self.b, (y + z,))


@pytest.fixture(params=[(m, strict) for m in (WholeForward, Mixed, Branching) for strict in (False, True)])
def exported(request):
    kind, strict = request.param
    torch.manual_seed(0)
    model = kind().eval()
    with torch.enable_grad():
        program = torch.export.export(model, (torch.randn(3, 8),), strict=strict)
    assert "wrap_with_set_grad_enabled" in str(program.graph)
    return model, program


def test_streamed_output_has_the_bits_of_the_model(exported):
    model, program = exported
    model = copy.deepcopy(model)
    lowered, streamer = prepare(program)
    steps = lowered.payload.traces[0].steps
    bound = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], range(len(steps)))
    for _ in range(2):
        x = torch.randn(3, 8)
        with torch.no_grad(), streaming(streamer):
            assert same_bits(bound(x), model(x))


def test_every_kernel_is_a_step_of_its_own(exported):
    payload = annotate(exported[1])
    assert all(len(step.reads) <= 4 for step in payload.traces[0].steps), "only a branch reads two layers"
    assert sum(len(step.reads) <= 2 for step in payload.traces[0].steps) >= 1
    assert not any("grad" in step.name for step in payload.traces[0].steps)


def test_probes_go_into_the_graph_that_was_annotated_and_into_a_copy(exported):
    graph_module = exported[1].graph_module
    payload = annotate(exported[1])
    for graph in (graph_module, copy.deepcopy(graph_module)):
        probed = insert_probes(graph, payload)
        calls = [str(node.target) for node in probed.graph.nodes]
        assert calls.count("penstock.acquire.default") == len(payload.traces[0].steps)


def test_the_program_stays_as_it_was_and_another_is_not_copied(exported):
    program = exported[1]
    before = str(program.graph)
    inlined = without_grad_regions(program)
    assert str(program.graph) == before
    assert without_grad_regions(inlined) is inlined
    assert inline_grad_regions(inlined.graph_module) is inlined.graph_module
    names = [spec.arg.name for spec in inlined.graph_signature.output_specs]
    assert names == [node.name for node in inlined.graph.output_node().args[0]]

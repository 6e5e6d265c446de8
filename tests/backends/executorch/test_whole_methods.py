"""Methods for AOTInductor: what they are compiled from, without values too, and what is refused."""

import pytest
import torch
from executorch.exir import to_edge
from torch import nn

import penstock
from penstock.backends.executorch import PenstockPartitioner
from penstock.backends.executorch.facts import as_torch_exports, operators_of
from penstock.passes.graph.nodes import with_aten_operators
from tests.hunt import nightly_but

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # ExecuTorch's own


class Formats(nn.Module):
    """Views, copies that keep an order of dimensions or make another, and another dtype."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x).view(4, 16, 2, 2).permute(0, 3, 1, 2)
        wide = y.contiguous().to(memory_format=torch.channels_last).to(torch.float64)
        return y.clone() + wide + self.linear.weight[:2, :16].unsqueeze(0).expand(4, 2, 16).select(1, 0)[0, 0]


def test_views_and_memory_formats_are_those_of_the_model():
    x = torch.randn(4, 64)
    program = torch.export.export(Formats().eval(), (x,))
    expected = program.module()(x)
    edge = with_aten_operators(to_edge(program).exported_program())
    copies = {target.name() for target in operators_of(edge)}
    assert {"aten::permute_copy", "dim_order_ops::_to_dim_order_copy"} <= copies
    restored = as_torch_exports(edge)
    names = {target.name() for target in operators_of(restored)}
    assert {"aten::permute", "aten::select.int", "aten::_to_copy"} <= names
    assert not any(name.endswith("view_copy") or name.startswith("dim_order_ops") for name in names)
    assert torch.equal(restored.module()(x), expected)
    copied = [node for node in restored.graph.nodes if "memory_format" in node.kwargs]
    formats = {(node.kwargs["memory_format"], node.meta["val"].stride()) for node in copied}
    assert {(torch.channels_last, (64, 1, 4, 2)), (torch.preserve_format, (64, 1, 4, 2))} <= formats


def test_a_program_without_values_is_compiled_and_planned(lower):
    program = penstock.fake_export(lambda: nn.Linear(128, 128), (torch.randn(2, 128),))
    exported = lower(program, kernels="aotinductor").exported
    (region,) = exported.regions
    assert (region.kernels, exported.payload.files) == ("aotinductor", ())
    assert exported.payload.program is not None
    assert list(exported.programs) == [exported.payload.program.path] == [region.program]
    assert exported.floor(arena="contiguous") >= 4 * 128 * 128
    assert exported.plan("100%").streamed_bytes == 0


class Heads(nn.Module):
    """Attention with two heads, whose outputs are joined by a view of a copy."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, 2, 32).transpose(1, 2) for one in (self.q, self.k, self.v))
        found = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.o(found.transpose(1, 2).contiguous().view(batch, length, -1))


@pytest.mark.parametrize("dynamic", nightly_but([True], [False, True]))
def test_a_view_of_a_contiguous_copy_of_a_transposed_value(lower, dynamic):
    x, sizes = torch.randn(2, 4, 64), torch.export.Dim("length", min=2, max=8)
    program = torch.export.export(Heads().eval(), (x,), dynamic_shapes=({1: sizes},) if dynamic else None)
    restored = as_torch_exports(with_aten_operators(to_edge(program).exported_program()))
    assert torch.equal(restored.module()(x), program.module()(x))
    formats = [
        node.kwargs.get("memory_format")
        for node in restored.graph.nodes
        if node.target is torch.ops.aten.clone.default and node.meta["val"].shape[2] == 2
    ]
    assert formats == [torch.contiguous_format]
    (region,) = lower(program, kernels="aotinductor").exported.regions
    assert region.kernels == "aotinductor"


class Returning(nn.Module):
    """Returns a buffer that it writes, or a number."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(64, 64), what
        self.register_buffer("sum", torch.zeros(64))

    def forward(self, x):
        y = self.linear(x)
        if self.what == "number":
            return y, x.shape[0]
        self.sum.add_(y.sum(0))
        return self.sum


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("number", r"returns the number '\w+', which a compiled method cannot: return tensors only"),
        (
            "buffer",
            r"writes buffer 'sum' and returns it, which a compiled method cannot: return a copy of it",
        ),
    ],
)
def test_results_that_a_compiled_method_cannot_have(what, sentence):
    rows = torch.export.Dim("rows", min=2, max=8)
    program = torch.export.export(Returning(what), (torch.randn(4, 64),), dynamic_shapes=({0: rows},))
    edge = to_edge(program).exported_program()
    with pytest.raises(penstock.PassError, match=sentence):
        PenstockPartitioner(kernels="aotinductor").partition(edge)


def test_a_number_among_the_inputs_is_refused(lower):
    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, times):
            return self.linear(x) * times

    shapes = {"x": None, "times": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Times(), (torch.randn(4, 64), 3), dynamic_shapes=shapes)
    with pytest.raises(penstock.PassError, match="input 'times' is a number that each call chooses"):
        lower(program, kernels="aotinductor")

"""What users do by mistake is refused by name, before anything is written."""

import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import penstock

WIDTH = 64


def exported():
    return torch.export.export(nn.Linear(WIDTH, WIDTH), (torch.randn(2, WIDTH),))


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, "expected an exported program, .* got Linear: export the model first"),
        (lambda: {"a": nn.Linear(2, 2)}, {}, "method 'a' is Linear, expected an exported program"),
        (lambda: {1: exported()}, {}, "1 cannot be the name of a method"),
        (lambda: {"a-b": exported()}, {}, "'a-b' cannot be the name of a method"),
        (lambda: {"close": exported()}, {}, "modules have a 'close' of their own"),
        (lambda: {"parameters": exported()}, {}, "modules have a 'parameters' of their own"),
        (exported, {"resident_below": "1MiB"}, "resident_below= is for compiled programs"),
        (exported, {"lowering": "inductor", "options": {"bogus": 1}}, "Inductor has no option 'bogus'"),
        (
            exported,
            {"lowering": "inductor", "options": {"bogus.cpp": 1}},
            r"Inductor has no option 'bogus\.cpp'",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(tmp_path, program, options, message):
    with pytest.raises(penstock.PassError, match=message):
        penstock.compile(program(), tmp_path / "out.penstock", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_passes_are_counted_at_every_budget(stack, budget):
    with torch.no_grad(), stack.open().load(budget) as module:
        for _ in range(2):
            module(stack.tokens)
        module.measure(stack.tokens)
        assert module.stats.passes == 3


@pytest.mark.parametrize(
    "use", [lambda m: m.load_state_dict({}, strict=False), pickle.dumps, lambda m: m.state_dict()]
)
def test_uses_of_an_offloaded_module_are_refused_by_name(tmp_path, use):
    module = nn.Linear(WIDTH, WIDTH)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    penstock.offload(module, tmp_path / "model.safetensors")
    with pytest.raises(penstock.StreamError, match="neither copy, move nor save it"):
        use(module)


class Leaf(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Leaf(WIDTH + k, WIDTH + k + 1) for k in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.usefixtures("compiler")
def test_more_compilations_than_dynamo_keeps_are_refused_before_the_crash(tmp_path):
    module = Layers(12).eval()
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    penstock.offload(module, tmp_path / "model.safetensors")
    torch._dynamo.reset()
    streamed = torch.compile(module, backend="penstock", options={"budget": "100%"})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with pytest.raises(BackendCompilerFailed, match=r"raise torch\._dynamo\.config\.recompile_limit"):
            streamed(torch.randn(2, WIDTH))
    torch._dynamo.reset()

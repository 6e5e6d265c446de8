"""Modules that torch.jit compiled are refused by every public function that takes a module or a program."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.integrations import apply

# Since torch 2.14 another kind of warning.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*torch.jit.*:{kind}Warning") for kind in ("Deprecation", "Future")
]

X = (torch.ones(2, 4),)
REFUSED = "compiled, so that its Python is gone: give the nn.Module that it was made from"


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(Inner())
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.inner(x))


def save(model, folder):
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "m.safetensors")


TAKES_A_MODULE = {
    "annotate": lambda model, _: penstock.annotate(model),
    "a method": lambda model, _: penstock.annotate({"decode": model}),
    "compile": lambda model, folder: penstock.compile(model, folder / "m.penstock"),
    "bind": lambda model, folder: penstock.bind(model, folder / "m.safetensors"),
    "deferred_init, built": lambda model, _: penstock.deferred_init(model),
    "deferred_init": lambda model, _: penstock.deferred_init(lambda: model),
    "fake_export, built": lambda model, _: penstock.fake_export(model, X),
    "fake_export": lambda model, _: penstock.fake_export(lambda: model, X),
    "offload": lambda model, folder: penstock.offload(model, folder / "m.safetensors"),
    "apply": lambda model, folder: apply(model, "1MB", cache=folder),
}


@pytest.mark.parametrize("take", TAKES_A_MODULE.values(), ids=TAKES_A_MODULE.keys())
def test_a_scripted_module_is_refused_in_a_sentence(take, tmp_path):
    scripted = torch.jit.script(Inner())
    save(scripted, tmp_path)
    with pytest.raises(penstock.PassError, match=f"is a RecursiveScriptModule, which torch.jit {REFUSED}"):
        take(scripted, tmp_path)


def test_a_traced_module_is_refused_too():
    with pytest.raises(penstock.PassError, match=f"is a TopLevelTracedModule, .* {REFUSED}"):
        penstock.annotate(torch.jit.trace(Inner(), X))


@pytest.mark.parametrize("name", ["fake_export", "offload", "apply"])
def test_a_scripted_part_of_a_module_is_refused_by_its_name(name, tmp_path):
    model = Outer()
    save(model, tmp_path)
    with pytest.raises(penstock.PassError, match=f"^inner is a RecursiveScriptModule, .* {REFUSED}"):
        TAKES_A_MODULE[name](model, tmp_path)


class Traced(Outer):
    """A part that torch.jit traced, which torch.export takes, and a scripted one that no call reaches."""

    def __init__(self):
        super().__init__()
        self.traced = torch.jit.trace(Inner(), X)

    def forward(self, x):
        return self.layer(self.traced(x))


def test_a_traced_part_and_one_that_is_not_called_are_exported_unbuilt(tmp_path):
    model = Traced()
    save(model, tmp_path)
    exported = penstock.fake_export(Traced, X)
    program = penstock.compile(exported, tmp_path / "m.penstock", weights=tmp_path / "m.safetensors")
    with program.load("100%") as module, torch.no_grad():
        assert torch.equal(module(*X), model(*X))


def test_a_scripted_part_can_be_initialised_later():
    torch.manual_seed(3)
    found = penstock.deferred_init(Outer).materialize("inner")
    torch.manual_seed(3)
    assert torch.equal(found.layer.weight, Outer().inner.layer.weight)

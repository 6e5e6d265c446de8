"""Weights that consist of several tensors of a checkpoint, such as the experts of a layer."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock

EXPERTS, WIDTH, INNER = 3, 16, 24
NAMES = {
    "gate_up": [f"experts.{e}.{w}.weight" for e in range(EXPERTS) for w in ("gate", "up")],
    "down": [f"experts.{e}.down.weight" for e in range(EXPERTS)],
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x):
        gate, up = torch.bmm(x, self.gate_up.mT).chunk(2, dim=-1)
        return torch.bmm(gate.sigmoid() * up, self.down.mT)


X = torch.linspace(-1, 1, EXPERTS * 4 * WIDTH).reshape(EXPERTS, 4, WIDTH)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Experts().eval()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """One tensor for each expert and projection, in no order."""
    path = tmp_path_factory.mktemp("experts") / "model.safetensors"
    tensors = tensors_of(model)
    save_file({name: tensors[name] for name in sorted(tensors, key=lambda name: name[::-1])}, path)
    return path


def tensors_of(model):
    halves = model.gate_up.detach().unflatten(1, (2, INNER)).flatten(0, 1)
    found = dict(zip(NAMES["gate_up"], halves.unbind(), strict=True))
    found |= dict(zip(NAMES["down"], model.down.detach().unbind(), strict=True))
    return {name: value.contiguous() for name, value in found.items()}


def exported():
    return penstock.fake_export(Experts, (X,))


def test_experts_in_files_of_their_own_are_one_weight(model, checkpoint):
    bound = penstock.bind(exported(), checkpoint, rename=NAMES)
    with torch.no_grad():
        assert torch.equal(bound.module()(X), model(X))


@pytest.mark.parametrize("pack", [True, False])
def test_they_stream_packed_or_from_where_they_are(model, checkpoint, tmp_path, pack):
    path = tmp_path / "experts.penstock"
    program = penstock.compile(exported(), path, weights=checkpoint, rename=NAMES, pack=pack)
    assert (path / "weights.safetensors").exists() == pack
    assert [len(s.extents) for s in program.payload.storages] == ([1, 1] if pack else [6, 3])
    assert program.verify() == program.weight_bytes
    with torch.no_grad(), program.load(program.floor_bytes) as module:
        assert torch.equal(module(X), model(X))


def test_they_are_cast_one_by_one(model, tmp_path):
    path = tmp_path / "half.safetensors"
    save_file({name: value.half() for name, value in tensors_of(model).items()}, path)
    bound = penstock.bind(exported(), path, rename=NAMES, cast=True)
    assert torch.equal(bound.state_dict["gate_up"], model.gate_up.detach().half().float())


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (NAMES["gate_up"][:-1], {}, r"is \[3, 48, 16\] in the program, and the 5 tensors .* have 120 rows"),
        ([*NAMES["gate_up"][:-1], "experts.0.down.weight"], {}, r"give those whose rows, one after another"),
        ([*NAMES["gate_up"][:-1], "experts.9.up.weight"], {}, "1 of the program's weights are not in"),
        ([], {}, "expected the name of a tensor, or several"),
        (["experts.0.gate.weight", 3], {}, "expected the name of a tensor, or several"),
        (NAMES["gate_up"], {"slices": {"gate_up": (1, 0, 2)}}, "gate_up consists of several tensors"),
    ],
)
def test_tensors_that_are_not_all_of_a_weight_are_refused(checkpoint, names, options, message):
    with pytest.raises(penstock.SourceError, match=message):
        penstock.bind(exported(), checkpoint, rename=NAMES | {"gate_up": names}, **options)


@pytest.mark.parametrize("names", [{"a": "whole", "b": ["up", "down"]}, {"a": ["up", "down"], "b": "whole"}])
@pytest.mark.parametrize("same", [True, False])
def test_a_tie_of_one_tensor_and_several_must_have_one_value(tmp_path, names, same):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Parameter(torch.zeros(4, 8))

        def forward(self, x):
            return x @ self.a.T + x @ self.b.T

    whole = torch.arange(32.0).reshape(4, 8)
    up, down = (part + (not same) for part in whole.split(2))
    save_file({"whole": whole, "up": up.clone(), "down": down.clone()}, tmp_path / "tied.safetensors")
    program = torch.export.export(Tied(), (torch.ones(1, 8),))
    if same:
        bound = penstock.bind(program, tmp_path / "tied.safetensors", rename=names)
        assert torch.equal(bound.state_dict["a"], whole)
    else:
        with pytest.raises(penstock.SourceError, match="is tied to another in the program, but tensor"):
            penstock.bind(program, tmp_path / "tied.safetensors", rename=names)

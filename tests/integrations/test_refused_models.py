"""Models that cannot stream, and what users of apply and load are told: never of an export."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn

import penstock
from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError, PenstockError
from tests import quantised_models
from tests.integrations import models


def layers():
    return models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def offloaded():
    from accelerate import cpu_offload

    model = layers()
    cpu_offload(model, torch.device("cpu"))
    return model


def cast():
    model = layers()
    apply_layerwise_casting(model, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return model


def in_groups():
    model, cpu = layers(), torch.device("cpu")
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    return model


def opaque():
    model = layers()
    model[0].weight = nn.Parameter(quantised_models.Opaque(model[0].weight.detach()), requires_grad=False)
    return model


def compressed():
    model = layers()
    model[1].quantization_scheme = object()  # compressed-tensors sets it on each layer that it quantises
    return model


def several(second):
    """A pipeline of two components."""
    return SimpleNamespace(components={"encoder": layers(), "unet": second})


def sharing():
    pipeline = several(layers())
    pipeline.components["unet"][1].weight = pipeline.components["encoder"][0].weight
    return pipeline


REFUSED = {
    "a name": (lambda: "some/model", "got a str: folders and names are for penstock.integrations.load"),
    "a pipeline of transformers": (
        lambda: SimpleNamespace(model=layers()),
        "SimpleNamespace: give its model",
    ),
    "a dict": (dict, r"expected a module.* got a dict"),
    "accelerate": (offloaded, "wrapped by accelerate: remove its hooks"),
    "casting": (cast, r"Sequential has a hook of diffusers .*\(layerwise_casting\): load"),
    "offloading": (in_groups, r"Sequential has a hook of diffusers .*\(group_offloading\): load"),
    "devices": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        "Sequential lies on several devices, cpu, meta: move it to one",
    ),
    "opaque": (lambda: several(opaque()), r"weight 0\.weight is a Opaque, which does not say"),
    "compressed-tensors": (compressed, r"was quantised with compressed-tensors, .*: give its folder to"),
    "shared": (sharing, r"encoder\.0\.weight and unet\.1\.weight are one parameter"),
}


def held(model):
    """What the modules of a model hold: their parameters and what else they have."""
    parts = getattr(model, "components", {"": model}).values()
    modules = [one for part in parts if isinstance(part, nn.Module) for one in part.modules()]
    return [[*map(id, one._parameters.values()), sorted(vars(one))] for one in modules]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_sentence_and_left_as_it_was(name, tmp_path):
    make, words = REFUSED[name]
    model = make()
    before = held(model)
    with pytest.raises(PassError, match=words):
        apply(model, "1MB", cache=tmp_path)
    assert held(model) == before
    if name in ("compressed-tensors", "shared"):
        for part in getattr(model, "components", {"": model}).values():
            assert all(value.untyped_storage().nbytes() for value in part.parameters())


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"memory": "lots"}])
def test_options_that_are_none_are_refused_before_memory_is_given_back(options, tmp_path):
    model = layers()
    with pytest.raises(PenstockError, match=repr(*options.values())):
        apply(model, **{"memory": "400KB", "cache": tmp_path} | options)
    model(torch.ones(1, 8))


WORDS = re.compile(r"\b(export|exported|artifact|payload|program|compiled|compile|weights=|rename)\b")
KNOWN = {
    "is an artifact of penstock: penstock.open opens it, `penstock run` runs it",  # said to whoever gives one
}


class Raising(nn.Module):
    """It computes, and then raises an error of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.error = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.error is not None:
            raise self.error
        return x


def test_an_error_of_the_model_is_its_own(tmp_path):
    model, x = Raising().eval(), torch.ones(1, 128)
    expected = model(x)
    with apply(model, "300KB", cache=tmp_path):
        for kind in (KeyError, IndexError, AttributeError, ValueError, RuntimeError, OSError) * 2:
            model.error = kind("scale")  # the first one in the first call
            with pytest.raises(kind) as caught:
                model(x)
            assert caught.value is model.error
            model.error = None
            assert torch.equal(model(x), expected)


def test_no_error_speaks_of_what_the_user_did_not_do():
    """Every string of every `raise` in the code of `apply` and `load`."""
    folder = Path(penstock.__file__).parent / "integrations"
    files = sorted(folder.rglob("*.py"))
    raised = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Raise):
                continue
            raised += 1
            pieces = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            said = "".join(piece for piece in pieces if isinstance(piece, str))
            found = WORDS.search(said)
            assert found is None or any(one in said for one in KNOWN), f"{file.name}:{node.lineno}: {said}"
    assert raised > 50


def test_sparse_weights_are_refused_by_name(tmp_path):
    model = torch.nn.Linear(4, 4)
    model.mask = torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(
        PassError, match=r"weight mask is sparse \(torch.sparse_coo\): call to_dense\(\) first"
    ):
        apply(model, "1MB", cache=tmp_path)

"""What the users of `apply` and `load` are told: of what they did, and never of an export or an artifact."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.integrations import apply, load
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.integrations import models

WORDS = re.compile(r"\b(export|exported|artifact|payload|program|compiled|compile|weights=|rename)\b")
KNOWN = {
    "is an artifact of penstock: penstock.open opens it, `penstock run` runs it"  # said to whoever gives one
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


@pytest.mark.parametrize(
    "error",
    [
        KeyError("scale"),
        IndexError("3"),
        AttributeError("a"),
        ValueError("v"),
        RuntimeError("r"),
        OSError("o"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("calls", [0, 2])
def test_an_error_of_the_model_is_its_own(error, calls, tmp_path):
    model, x = Raising().eval(), torch.ones(1, 128)
    expected = model(x)
    with apply(model, "300KB", cache=tmp_path):
        for _ in range(calls):
            model(x)
        model.error = error
        with pytest.raises(type(error)) as caught:
            model(x)
        assert caught.value is error
        model.error = None
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("way", ["apply", "load"])
def test_a_tracer_is_told_a_way_that_this_door_has(way, tmp_path):
    model, ids = models.llama(num_hidden_layers=1), torch.arange(4)[None]
    if way == "apply":
        applied = apply(model, "1MB", cache=tmp_path / "cache")
    else:
        model.save_pretrained(tmp_path / "model")
        model = load(tmp_path / "model", "1MB", cache=tmp_path / "cache")
        applied = model.penstock_applied
    advice = r"have the weights in memory for that \(restore\(\) what apply returned, or load the model with"
    with pytest.raises(StreamError, match=advice):
        torch.export.export(model, (ids,))
    applied.close()


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


def test_apply_and_load_are_told_from_each_other(tmp_path):
    with pytest.raises(PassError, match=r"got a str: folders and names are for penstock\.integrations\.load"):
        apply("some/model", "1MB")
    with pytest.raises(SourceError, match=r"what is in memory is for penstock\.integrations\.apply"):
        load(Raising(), "1MB")  # type: ignore[arg-type]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        SourceError, match=r"model\.gguf is a file: give a model's folder, with its config\.json"
    ):
        load(tmp_path / "model.gguf", "1MB")

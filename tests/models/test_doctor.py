"""What the doctor says of models, healthy and not."""

import json
import sys
from os import truncate

import pytest

from tests.integrations.models import llama

MODELS = """
import numpy
import torch
from torch import nn

X = (torch.zeros(2, 64),)

class Healthy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(64).mul(2), persistent=False)
        self.register_buffer("count", torch.zeros(64))

    def forward(self, x):
        self.count.add_(1)
        return self.second(self.first(x) * self.scale) + self.count

def healthy():
    return Healthy(), X

class Allocating(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(numpy.zeros((1024, 1024))).float())

    def forward(self, x):
        return x @ self.table[:64]

def allocating():
    return Allocating(), X

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64, device="cuda:0")
        self.second = nn.Linear(64, 64, device="cuda:1")

    def forward(self, x):
        return self.second(self.first(x).to("cuda:1"))

def two():
    return Two(), X

class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, device="cuda")
        self.tables = [torch.from_numpy(numpy.ones(64, dtype="float32"))]

    def forward(self, x):
        return self.layer(x) + self.tables[0]

def listed():
    return Listed(), X

def deciding():
    return Deciding(), X

@torch.library.custom_op("doctor_test::cpu_only", mutates_args=(), device_types="cpu")
def cpu_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@cpu_only.register_fake
def _(x):
    return torch.empty_like(x)

class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return cpu_only(self.layer(x))

def custom():
    return Custom(), X

def broken():
    return nn.Linear(2, "x"), X
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models_of_a_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("models_of_a_test", None)


def test_all_that_matters_is_said_and_nothing_else(folder, penstock):
    done = penstock("doctor", "models_of_a_test:healthy", "--json")
    assert done.status == 0, done.err
    said = [(one["check"], one["outcome"], one["message"]) for one in json.loads(done.out)]
    assert [(name, outcome) for name, outcome, _ in said] == [
        ("construction", "ok"),
        ("buffers", "note"),
        ("export", "ok"),
        ("devices", "ok"),
        ("operators", "ok"),
        ("streaming", "ok"),
        ("streaming", "note"),
        ("ties", "note"),
    ]
    messages = {f"{name} {outcome}": message for name, outcome, message in said}
    assert "no checkpoint has scale" in messages["buffers note"]
    assert "count always stay" in messages["streaming note"]
    assert "first.weight, second.weight share one memory" in messages["ties note"]


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("allocating", 1, "the constructor really allocates 8.00 MiB on the CPU at "),
        ("allocating", 1, "torch.from_numpy(numpy.zeros((1024, 1024))).float()"),
        ("listed", 1, "the constructor really allocates 256 B on the CPU at "),
        ("two", 1, "uses cuda:0, cuda:1: a program is loaded on one device"),
        ("deciding", 1, "in forward: return x if x.sum() > 0 else -x"),
        ("custom", 0, "doctor_test.cpu_only.default have no CUDA kernel"),
        ("broken", 1, 'in broken: return nn.Linear(2, "x"), X'),
    ],
)
def test_what_is_wrong_is_named_with_its_line(folder, penstock, model, status, message):
    done = penstock("doctor", f"models_of_a_test:{model}", "--json")
    assert done.status == status, done.err
    assert any(message in one["message"] for one in json.loads(done.out)), done.out


def test_files_of_weights_that_are_incomplete_are_a_problem(folder, penstock):
    llama(num_hidden_layers=1).save_pretrained("model")
    assert "ok      files" in penstock("doctor", "model").out
    truncate("model/model.safetensors", 9999)
    done = penstock("doctor", "model")
    assert (done.status, "problem files" in done.out, "incomplete" in done.out) == (1, True, True)


def test_a_pass_that_fails_is_a_finding(folder, penstock, monkeypatch):
    def fail(_):
        raise ValueError("not like this\nat all")

    monkeypatch.setattr("penstock.models.doctor.annotate", fail)
    done = penstock("doctor", "models_of_a_test:healthy", "--json")
    last = {"check": "streaming", "outcome": "problem", "message": "ValueError: not like this"}
    assert (done.status, json.loads(done.out)[-1]) == (1, last)

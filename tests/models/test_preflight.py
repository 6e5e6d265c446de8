"""Preflight: what is said of a model that was never built."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from penstock.passes.building import fake_export
from penstock.passes.graph import propagation
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "dtype": "bfloat16",
}

FACTORY = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]), (torch.zeros(1, 512),)

def huge():
    return nn.Linear(1 << 21, 1 << 21, bias=False), (torch.zeros(1, 1 << 21),)

def wrong():
    return nn.Linear(4, 4)

class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def deciding():
    return Deciding(), (torch.zeros(3),)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "factories_of_a_test.py").write_text(FACTORY)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("factories_of_a_test", None)


Facts = Callable[..., dict[str, Any]]


@pytest.fixture
def facts(penstock):
    def ask(*arguments):
        done = penstock("preflight", *arguments, "--json")
        assert done.status in (0, 1), done.err
        found = json.loads(done.out)
        return found

    return ask


def test_a_configuration_is_planned_for_each_hardware_and_budget(folder, facts):
    from transformers import AutoConfig, LlamaForCausalLM

    sizes = ("--budget", "25%", "--budget", "100%")
    found = facts(str(folder), "--hardware", "t4", "--hardware", "h200", *sizes, "--context", "100")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    parameters = sum(p.numel() for p in model.parameters())
    assert found["weight_bytes"] == pytest.approx(2 * parameters, rel=0.01)  # the rotary table is computed
    assert found["cache_bytes"] == 2 * 3 * 2 * 16 * 2 * 100
    findings = found["findings"]
    assert [one["hardware"] for one in findings] == ["t4", "t4", "h200", "h200"]
    assert all(one["runs"] and one["lower_bound_seconds"] <= one["seconds_per_pass"] for one in findings)
    assert [one["streamed_bytes_per_pass"] > 0 for one in findings] == [True, False, True, False]


def test_what_an_export_is_spared_changes_no_figure(folder, facts, monkeypatch):
    asked = (str(folder), "--hardware", "h200", "--budget", "25%", "--context", "100")
    found = facts(*asked)
    monkeypatch.setattr(fake_export, "quick", nullcontext)
    monkeypatch.setattr(propagation, "facts_of", lambda value: object())  # nothing counts as seen
    assert facts(*asked) == found


def test_a_function_is_exported_without_building_what_it_returns(folder, facts, penstock):
    found = facts("factories_of_a_test:huge", "--hardware", "h200")
    assert found["weight_bytes"] == 4 << 42
    assert not found["findings"][0]["runs"]
    assert "below the floor" in found["findings"][0]["verdict"][0]
    page = folder / "plan.html"
    options = ("--hardware", "l4", "--budget", "50%", "--host-memory", "1MiB", "--report", str(page))
    found = facts("factories_of_a_test:build", *options)["findings"][0]
    assert 0 < found["host_bytes"] <= 1 << 20
    assert found["disk_bytes_per_pass"] > 0
    assert found["confidence"]["level"] == "assumed"
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    assert "overwrite it with --force" in penstock("preflight", "factories_of_a_test:build", *options).err
    assert page.read_text() == "mine"
    assert penstock("preflight", "factories_of_a_test:build", *options, "--force").status == 0
    assert page.read_text().startswith("<!doctype html>")


def test_more_than_the_memory_of_the_device_is_said(folder, penstock):
    config = TINY | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    done = penstock("preflight", str(folder / "config.json"), "--hardware", "rtx4090", "--budget", "30GB")
    assert done.status == 0
    assert "It does not fit into rtx4090" in done.out
    assert "The link limits it" in done.out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing.json", "nothing.json is neither a file that exists nor module:function"),
        ("no_such_module:build", "no_such_module:build cannot be imported"),
        ("factories_of_a_test:number", "is int, expected a function"),
        ("factories_of_a_test:wrong", "returns Linear, expected a module and example inputs"),
        ("factories_of_a_test:deciding", "in forward: return x if x.sum() > 0 else -x"),
        ("{folder}/factories_of_a_test.py", "is not a config.json"),
        ("{folder}/other", "names the architectures ['NoSuchModel']"),
        ("{folder}/empty", "is no configuration that transformers knows"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(folder, penstock, model, message):
    for name, config in (("other", TINY | {"architectures": ["NoSuchModel"]}), ("empty", {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    done = penstock("preflight", model.format(folder=folder), "--hardware", "h200")
    assert done.status == 2
    said = done.err.splitlines()[-1]  # torch may log before
    assert said.startswith("penstock: ")
    assert message in said
    assert "Traceback" not in done.err


def test_the_device_of_a_preset_holds_weights_of_a_real_module():
    """What preflight counts is what the module has."""
    from penstock.passes.annotate import annotate
    from penstock.passes.building.fake_export import fake_export

    build = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    payload = annotate(fake_export(build, (torch.zeros(1, 8),), "cuda"))
    assert sum(s.nbytes for s in payload.storages) == sum(p.nbytes for p in build().parameters())

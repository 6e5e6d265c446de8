"""What a user of `preflight` and `doctor` reads when something is wrong, and in 80 columns."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from penstock import open as open_program

MODELS = """
import torch
from torch import nn

X = torch.zeros(1, 512)
print("a model may print")

def build():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]), (X,)

def two():
    return nn.Linear(512, 512), (X, X)

def named():
    return nn.Linear(512, 512), {"inptu": X}

def bare():
    return nn.Linear(512, 512), X

def asks(size):
    return nn.Linear(size, size), (X,)

def empty():
    return nn.GELU(), (X,)

class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def deciding():
    return Deciding(), (X,)
"""
NAMES = ("factory_of_a_user", "raising_of_a_user", "broken_of_a_user")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    texts = (MODELS, 'raise RuntimeError("set a token first")\n', "def build(:\n")
    for name, text in zip(NAMES, texts, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("raising_of_a_user:build", 'raise RuntimeError("set a token first"): set a token first'),
        ("broken_of_a_user:build", "broken_of_a_user.py:1: invalid syntax"),
        (":build", ":build is neither a file that exists nor module:function"),
        ("factory_of_a_user.py:build", "write factory_of_a_user:build, without .py"),
        ("factory_of_a_user:asks", "takes (size), expected a function that can be called without arguments"),
        ("factory_of_a_user:two", "(2 by position) that do not fit Linear.forward(input): too many"),
        ("factory_of_a_user:named", "(inptu) that do not fit Linear.forward(input): missing a required"),
        ("factory_of_a_user:bare", "gives Tensor as example inputs, expected a tuple"),
        ("factory_of_a_user:deciding", "in forward: return x if x.sum() > 0 else -x"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused_in_one_line(penstock, model, message):
    done = penstock("preflight", model, "--hardware", "h200")
    assert done.status == 2
    said = [line for line in done.err.splitlines() if line != "a model may print"]
    assert len(said) == 1, done.err
    assert message in said[0]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("preflight", ("--hardware", "H200"), "did you mean 'h200'"),
        ("preflight", ("--hardware", "auto"), "a model that was never built has none"),
        (
            "preflight",
            ("--hardware", "t4", "--budget", "1GB", "--budget", "0.3"),
            "--budget '0.3' is a fraction",
        ),
        ("preflight", ("--hardware", "t4", "--host-memory", "5x"), "--host-memory '5x' has the unknown unit"),
        ("compile", ("model.penstock", "--resident-below", "5%"), "--resident-below '5%' is a percentage"),
    ],
)
def test_sizes_and_hardware_are_checked_before_a_model_is_read(penstock, command, options, words):
    done = penstock(command, "no_such_module:build", *options)
    assert (done.status, done.out) == (2, "")
    assert words in done.err


def test_the_table_keeps_each_value_whole_in_80_columns(penstock):
    budgets = ("--budget", "50%", "--budget", "1KiB")
    done = penstock("preflight", "factory_of_a_user:build", "--hardware", "rtx4090", *budgets)
    assert done.status == 0, done.err
    rows = [line for line in done.out.splitlines() if "rtx4090" in line and "for weights" not in line]
    assert ["3.01 MiB" in rows[0], "does not run" in rows[1]] == [True, True]
    assert max(map(len, done.out.split("\nrtx4090,")[0].splitlines())) <= 80
    assert "the least budget that works" in done.out


@pytest.mark.parametrize(
    ("kind", "experts", "options"),
    [
        (LlamaConfig, {}, []),
        # Its files have a tensor for each expert, under other names; the model stacks them.
        (MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}, ["--no-pack"]),
    ],
)
def test_the_folder_of_a_model_is_compiled_in_one_command(folder, penstock, kind, experts, options):
    torch.manual_seed(0)
    config = kind(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        dtype="bfloat16",
        **experts,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny").eval()
    done = penstock("compile", "tiny", "tiny.penstock", "--tokens", "6", "--json", *options)
    assert done.status == 0, done.err
    ids = torch.arange(6)[None]
    with torch.no_grad(), open_program("tiny.penstock").load("60%") as module:
        assert torch.equal(module(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_function_is_compiled_with_the_weights_that_are_named(folder, penstock):
    torch.save(
        {
            f"{k}.{part}": torch.ones(512, 512)[:, : 512 if part == "weight" else 1].squeeze(1).clone()
            for k in range(6)
            for part in ("weight", "bias")
        },
        "model.pt",
    )
    refused = penstock("compile", "factory_of_a_user:build", "model.penstock")
    assert refused.status == 2
    assert "weight 0.bias has no values (it is fake): name the files with weights=" in refused.err
    assert "writing" not in refused.err
    done = penstock("compile", "factory_of_a_user:build", "model.penstock", "--weights", "model.pt")
    assert done.status == 0, done.err


def test_examples_stand_on_lines_of_their_own(penstock):
    said = [line.strip() for line in penstock("preflight", "--help").out.splitlines()]
    begins = [line.removeprefix("\u2022 ") for line in said if line.startswith("\u2022 penstock preflight")]
    assert len(begins) == 2


def test_what_a_model_prints_is_not_among_the_facts(penstock):
    done = penstock("doctor", "factory_of_a_user:empty", "--json")
    assert "a model may print" in done.err
    said = {(one["check"], one["outcome"]): one["message"] for one in json.loads(done.out)}
    assert said["streaming", "note"] == "the model has no weights: there is nothing to stream"
    assert done.status == 0

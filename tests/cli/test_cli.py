"""The command line in this process: what it prints, and status 2 with one sentence for bad input."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim, export
from torch.export import save as save_exported

from penstock.cli import main as cli


class Model(nn.Module):
    """Two linears, a dynamic batch, a dynamic number and a constant without a literal."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x, n, *, limit):
        y = self.down(self.up(x)).clamp(max=limit) * n
        return {"y": y, "wide": torch.complex(y.double(), y.double()).sum()}


@dataclass(frozen=True)
class Files:
    folder: Path
    exported: Path
    artifact: Path
    model: Model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from penstock.runtime.artifact import compile

    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("cli"), Model()
    sizes = {"x": {0: Dim("batch", min=1, max=16)}, "n": Dim.DYNAMIC, "limit": None}
    program = export(model, (torch.randn(2, 256), 3), {"limit": float("inf")}, dynamic_shapes=sizes)
    save_exported(program, folder / "model.pt2")
    compile(program, folder / "model.penstock")
    return Files(folder, folder / "model.pt2", folder / "model.penstock", model)


@pytest.fixture
def plain(tmp_path):
    """An artifact whose inputs and outputs are tensors that a file can hold."""
    from penstock.runtime.artifact import compile

    torch.manual_seed(0)
    program = export(nn.Linear(64, 64), (torch.randn(2, 64),))
    return compile(program, tmp_path / "plain.penstock").path


# What each command prints.


def test_compile_plan_inspect_verify_and_run(penstock, files, tmp_path):
    artifact = tmp_path / "new.penstock"
    facts = json.loads(penstock("compile", "--trust", files.exported, artifact, "--json").out)
    assert facts["path"] == str(artifact)
    assert 0 < facts["floor_bytes"] <= facts["weight_bytes"]
    plan = tmp_path / "plan.json"
    done = penstock("plan", artifact, "--budget", "70%", "--output", plan, "--json")
    assert done.status == 0
    assert json.loads(done.out)["plan"] == json.loads(plan.read_text())
    inspected = json.loads(penstock("inspect", artifact, "--json").out)
    assert inspected["weight_bytes"] == facts["weight_bytes"]
    verified = json.loads(penstock("verify", artifact, "--json").out)
    assert verified["verified_bytes"] == facts["weight_bytes"]
    ran = penstock("run", artifact, "--budget", "70%", "--passes", 2, "--json")
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    assert len(report["pass_seconds"]) == 2
    assert report["peak_bytes"] <= report["budget"]
    assert report["outputs"] == {"y": "float32 [2, 256]", "wide": "complex128 []"}


def test_inputs_and_outputs_are_files(penstock, plain, tmp_path):
    x = torch.randn(2, 64)
    save_file({"input": x}, tmp_path / "in.safetensors")
    output = tmp_path / "out.safetensors"
    arguments = ["run", plain, "--budget", "100%", "--input", tmp_path / "in.safetensors"]
    assert penstock(*arguments, "--output", output).status == 0
    torch.manual_seed(0)
    # Not bit for bit: what a file holds is less aligned than memory of its own.
    torch.testing.assert_close(load_file(output)["output"], nn.Linear(64, 64)(x).detach())
    assert "exists" in refused(penstock(*arguments, "--output", output))


def test_numbers_come_from_sizes_and_from_files(penstock, files, tmp_path):
    done = penstock("run", files.artifact, "--budget", "100%", "--size", "n=5", "--json")
    assert done.status == 0, done.err
    given = tmp_path / "in.safetensors"
    save_file({"x": torch.randn(4, 256), "n": torch.tensor(5)}, given)
    done = penstock("run", files.artifact, "--budget", "100%", "--input", given, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["outputs"]["y"] == "float32 [4, 256]"
    save_file({"x": torch.randn(4, 256), "n": torch.ones(2)}, given)
    assert "input n is a number" in refused(
        penstock("run", files.artifact, "--budget", "100%", "--input", given)
    )


def test_version_and_help(penstock):
    assert penstock("--version").out.startswith("penstock ")
    assert penstock("-h").out == penstock("--help").out
    for path in cli.COMMANDS:
        command = path.rpartition(".")[2]
        text = penstock(command, "--help").out
        assert "Example" in text
        assert f"Usage: penstock {command} " in text
        assert penstock(command, "-h").out == text


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("penstock pl", {"plan"}),
        ("penstock plan model.penstock --hard", {"--hardware"}),
        ("penstock plan model.penstock --hardware h", {"h100", "h200"}),
        ("penstock run model.penstock --device sim:rtx5", {"sim:rtx5090"}),
        ("penstock simulate model.penstock --arena p", {"paged"}),
        ("penstock run model.penstock --engine n", {"native"}),
        ("penstock convert model.pt --dtype b", {"bfloat16"}),
    ],
)
def test_a_shell_completes_commands_options_and_names(penstock, monkeypatch, typed, offered):
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert set(penstock().out.split()) == offered


def test_what_show_completion_prints_makes_bash_complete(tmp_path):
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(penstock --show-completion)"; COMP_WORDS=(penstock si); COMP_CWORD=1; '
        '$(complete -p penstock | sed "s/.*-F \\([^ ]*\\).*/\\1/") penstock; echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command_line = ["bash", "-c", script]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("simulate\n", "")


# Wrong input.


def refused(done):
    """The one sentence of a refusal."""
    assert done.status == 2, done
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if line.startswith("penstock: ")]
    assert len(lines) == 1, done.err
    return lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget", "0"], "not positive"),
        (["--budget", "-1"], "not a size"),
        (["--budget", "much"], "not a size"),
        (["--budget", "0.5"], "--budget '0.5' is a fraction, not a number of bytes: write '50%'"),
        (["--budget", "12parsecs"], "unknown unit"),
        (["--budget", "1"], "below the floor"),
        (["--budget", "100%", "--keep", "lm_head.*"], "matches no weight"),
        (["--budget", "100%", "--arena", "ring"], "arena 'ring'"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_budgets_and_patterns(penstock, files, command, options, words):
    assert words in refused(penstock(command, files.artifact, *options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "decode"], "no method 'decode'"),
        (["--size", "batch"], "NAME=N"),
        (["--size", "rows=3"], "no dynamic size rows"),
        (["--size", "n=many"], "not a whole number"),
        (["--size", "n=-1"], "not a whole number"),
        (["--input", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--output", "nowhere/out.safetensors"], "there is no folder nowhere to write out.safetensors to"),
        (["--output", "/"], "/ is a folder: choose a file for this output"),
    ],
)
def test_runs(penstock, plain, files, options, words):
    artifact = plain if "--output" in options else files.artifact
    assert words in refused(penstock("run", artifact, "--budget", "100%", *options))


def test_sizes_out_of_range(penstock, files):
    for size in (17, 10**30):
        sentence = refused(penstock("run", files.artifact, "--budget", "100%", "--size", f"batch={size}"))
        assert f"batch={size} is out of its range" in sentence


def test_outputs_that_no_file_can_hold(penstock, files, tmp_path):
    output = tmp_path / "out.safetensors"
    sentence = refused(penstock("run", files.artifact, "--budget", "100%", "--output", output))
    assert "complex128" in sentence
    assert not output.exists()


def test_inputs_of_other_names_or_shapes(penstock, plain, tmp_path):
    given = tmp_path / "in.safetensors"
    arguments = ["run", plain, "--budget", "100%", "--input", given]
    save_file({"y": torch.randn(2, 64)}, given)
    assert "must hold the tensors input: it lacks input, and also has y" in refused(penstock(*arguments))
    save_file({"input": torch.randn(2, 63)}, given)
    assert "has input of the shape [2, 63], expected [2, 64]" in refused(penstock(*arguments))
    given.write_bytes(b"not a file of tensors")
    assert "in.safetensors is not a safetensors file" in refused(penstock(*arguments))


@pytest.mark.parametrize("command", ["plan", "inspect", "verify", "run"])
def test_what_is_no_artifact(penstock, files, tmp_path, command):
    budget = ["--budget", "100%"] if command in ("plan", "run") else []
    long = tmp_path / ("x" * 300)
    assert "is not an artifact: there is no such folder; give" in refused(penstock(command, long, *budget))
    harmed = Path(shutil.copytree(files.artifact, tmp_path / "harmed.penstock"))
    (harmed / "payload.json").write_text('{"format": "penstock", "version": 99}')
    assert "version" in refused(penstock(command, harmed, *budget))


def test_weights_of_another_dtype_are_cast_where_that_is_asked(penstock, files, tmp_path):
    save_file({n: v.double() for n, v in files.model.state_dict().items()}, tmp_path / "model.safetensors")
    arguments = (
        "--trust",
        files.exported,
        tmp_path / "a.penstock",
        "--weights",
        tmp_path / "model.safetensors",
    )
    assert "cast=True" in refused(penstock("compile", *arguments))
    assert penstock("compile", *arguments, "--cast").status == 0


def test_what_cannot_be_compiled(penstock, files, tmp_path):
    output, text = tmp_path / "a.penstock", tmp_path / "text.pt2"
    text.write_text("no program")
    cases = [
        ((tmp_path / "nowhere.pt2", output), "is not a file"),
        ((tmp_path, output), "holds no config.json"),
        ((text, output), "is not a program"),
        ((tmp_path / ("x" * 300), output), "File name too long"),
        ((files.exported, files.artifact), "exists"),
        ((files.exported, tmp_path, "--force"), "is not an artifact"),
        ((files.exported, tmp_path / "no" / "folder"), "is no folder that can be written to"),
        ((files.exported, output, "--no-pack"), "weights="),
        ((files.exported, output, "--rename", "fqn"), "FQN=NAME"),
        ((files.exported, output, "--weights", tmp_path / "nowhere.safetensors"), "nowhere.safetensors"),
        ((files.exported, output, "--weights", text), "neither a .safetensors file"),
    ]
    for arguments, words in cases:
        assert words in refused(penstock("compile", "--trust", *arguments)), arguments
    assert "may run code: give --trust" in refused(penstock("compile", files.exported, output))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.pt2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["run"],
        ["preflight", "os:getcwd"],
        ["run", "a.penstock", "--budget", "1", "--passes", "0"],
        ["run", "a.penstock", "--budget", "1", "--seed", "9" * 30],
        ["run", "a.penstock", "--budget", "1", "--seed", "x"],
        ["inspect", "--colour"],
    ],
)
def test_wrong_usage(penstock, arguments):
    done = penstock(*arguments)
    assert (done.status, "Traceback" in done.err) == (2, False)
    assert "Usage" in done.err

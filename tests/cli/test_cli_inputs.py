"""What the command line is given: it works, or one line names what was typed and what to type."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock as api
from penstock.cli.terminal.options import check_outputs, load_exported
from penstock.integrations import load
from penstock.schedule.facts.errors import SourceError
from tests.forked import run_forked
from tests.integrations import models

COMMANDS = """
import os, sys, torch
from penstock.cli import main as cli

for given in ("compile --trust model.pt2 model.penstock", "run model.penstock --budget 100%"):
    child = os.fork()
    if not child:
        sys.argv = ["penstock", *given.split()]
        cli.main()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, given
    assert "transformers" not in sys.modules
"""
"""Commands in processes of their own, each forked from one that has imported torch."""


def test_a_program_whose_outputs_are_of_a_library_is_compiled_and_run_without_importing_it(tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return BaseModelOutput(last_hidden_state=self.layer(x))

    torch.export.save(torch.export.export(Model(), (torch.zeros(1, 4),)), tmp_path / "model.pt2")
    done = run_forked(COMMANDS, folder=tmp_path, warnings="default")
    assert done.status == 0, done.err
    assert "Traceback" not in done.err
    assert "last_hidden_state" in done.out


def test_what_is_no_program_is_refused_without_the_log_of_torch(tmp_path, penstock):
    (tmp_path / "model.pt2").write_text("{}")
    done = penstock("compile", "--trust", tmp_path / "model.pt2", tmp_path / "model.penstock")
    assert done.status == 2
    assert done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--arena mappd", "there is no arena 'mappd': choose mapped, contiguous or paged"),
        ("--engine c", "there is no engine 'c': choose auto, native or python"),
        ("--device gpu", "there is no device 'gpu': choose 'cpu', 'cuda'"),
        ("--device sim:rtx", "there is no hardware 'rtx': give one of"),
    ],
)
def test_names_are_checked_before_an_artifact_is_opened(tmp_path, penstock, option, sentence):
    done = penstock("run", tmp_path / "none.penstock", "--budget", "50%", *option.split())
    assert done.status == 2
    assert done.err.startswith(f"penstock: {sentence}")


@pytest.mark.parametrize("look", ["is_dir", "exists", "is_file"])
def test_a_path_that_the_system_does_not_look_at_is_an_error_of_penstock(look, tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(5, "Input/output error", str(path))

    path = tmp_path / "out.pt2"
    check = partial(load_exported, trust=True) if look == "is_file" else partial(check_outputs, force=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, look, refuse)
        with pytest.raises(SourceError, match=r"out\.pt2 .*Input/output error"):
            check(path)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors") / "stack.penstock"
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    api.compile(torch.export.export(model, (torch.randn(2, 64),)), folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors") / "llama"
    models.llama(num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["x.safetensors", "pytorch_model.bin", "model.pt", "model.gguf"])
def test_weights_alone_are_no_program(penstock, tmp_path, name):
    torch.save({"weight": torch.ones(2)}, tmp_path / name)
    done = penstock("compile", tmp_path / name, tmp_path / "out.penstock")
    assert done.status == 2
    assert f"{name} holds weights, and no program to run them: give the folder of the model; or" in done.err
    assert "--trust" not in done.err


def test_an_artifact_is_not_compiled_again(penstock, artifact, tmp_path):
    done = penstock("compile", artifact, tmp_path / "out.penstock")
    assert f"is an artifact already: `penstock run {artifact} --budget 50%` runs it" in done.err


def test_a_missing_input_is_not_compiled_again(penstock, artifact):
    done = penstock("run", artifact, "--budget", "50%", "--input", "nofile")
    assert done.status == 2
    assert done.err == "penstock: nofile is not a file or folder that exists: correct the path\n"


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "run", "simulate"])
def test_a_models_folder_is_told_from_an_artifact(penstock, model, command):
    budget = ["--budget", "50%"] if command in ("plan", "run", "simulate") else []
    done = penstock(command, model, *budget)
    way = f"`penstock compile {model} llama.penstock` makes one of it, and `penstock generate {model}` runs"
    assert done.status == 2
    assert f"{model} is a model's folder and not an artifact: {way}" in done.err
    done = penstock(command, model / "model.safetensors", *budget)
    assert f"model.safetensors is a file of a model and not an artifact: {way}" in done.err


@pytest.mark.parametrize("command", ["plan", "run", "simulate"])
def test_no_budget_is_more_than_all(penstock, artifact, command):
    done = penstock(command, artifact, "--budget", "500%")
    assert done.status == 2
    assert "--budget '500%' is more than all weights, which 100% holds: write at most '100%'" in done.err
    with pytest.raises(api.BudgetError, match="budget '101%' is more than all weights"):
        api.open(artifact).plan("101%")
    assert api.open(artifact).plan("100%").streamed_bytes == 0


def test_a_cap_may_be_more_than_the_weights(model, tmp_path):
    """It holds activations as well."""
    loaded = load(model, "500%", cache=tmp_path)
    assert loaded(torch.arange(4)[None]).logits.shape[1] == 4
    loaded.penstock_applied.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_of_torch_save_are_converted_where_they_are(penstock, model, tmp_path, shards):
    folder, values = tmp_path / "old", load_file(model / "model.safetensors")
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    names = sorted(values)
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{k}.bin" for k in range(shards)]
    places = {name: files[k % shards] for k, name in enumerate(names)}
    for file in files:
        torch.save({name: values[name] for name in names if places[name] == file}, folder / file)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(api.SourceError, match=f"`penstock convert {folder}` writes one beside it"):
        load(folder, "100%")
    assert penstock("convert", folder).status == 0
    loaded, ids = load(folder, "100%", cache=tmp_path / "cache"), torch.arange(6)[None]
    before = load(model, "100%", cache=tmp_path / "cache")
    assert torch.equal(loaded(ids).logits, before(ids).logits)
    for one in (loaded, before):
        one.penstock_applied.close()


def test_a_pipelines_part_is_converted_to_the_name_that_its_library_reads(penstock, tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.bin")
    assert penstock("convert", tmp_path).status == 0
    assert load_file(tmp_path / "diffusion_pytorch_model.safetensors")["x"].tolist() == [1, 1]
    save_file({"y": torch.ones(1)}, tmp_path / "other.safetensors")
    assert penstock("convert", tmp_path / "diffusion_pytorch_model.bin").status == 2  # which exists
    done = penstock("convert", tmp_path, "--force")
    assert f"{tmp_path} is safetensors already: say with --output where to write it anew" in done.err

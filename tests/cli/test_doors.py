"""What commands say to somebody who gave them something else: it names what was typed, and what to type."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock as api
from penstock.integrations import load
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.integrations import models


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
    assert (done.status, done.err) == (2, "penstock: nofile is missing: name a file that is there\n")


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


def test_a_narrow_terminal_breaks_no_name_and_no_value(penstock, model, tmp_path, monkeypatch):
    assert penstock("compile", model, tmp_path / "llama.penstock").status == 0
    monkeypatch.setenv("COLUMNS", "60")
    lines = penstock("inspect", tmp_path / "llama.penstock").out.splitlines()
    assert max(map(len, lines)) <= 60
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight"):
        at = lines.index(name)
        assert lines[at + 1].split()[0] == "float32"
        assert lines[at + 1].split()[-2] == "streamable"

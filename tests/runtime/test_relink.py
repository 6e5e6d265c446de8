"""An identical copy of weight files in place is accepted by its bytes, and nothing else is."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock as library
from penstock.schedule.facts.errors import SourceError
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

X = torch.ones(2, 256)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


@pytest.fixture
def artifact(tmp_path, model):
    """One that refers to two files in the folder `first`."""
    (tmp_path / "first").mkdir()
    for layer in ("0", "1"):
        values = {name: value for name, value in model.state_dict().items() if name[0] == layer}
        save_file(values, tmp_path / "first" / f"{layer}.safetensors")
    exported = torch.export.export(model, (X,))
    files = sorted((tmp_path / "first").iterdir())
    return library.compile(exported, tmp_path / "a.penstock", weights=files, pack=False).path


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def runs(program, model, x=X):
    with program.load("100%") as module, torch.no_grad():
        return torch.equal(module(x), model(x))


def test_a_file_that_was_copied_over_itself_is_accepted(artifact, model, penstock):
    file = artifact.parent / "first" / "0.safetensors"
    shutil.copyfile(file, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)
    with pytest.raises(SourceError, match=rf"accepted by `penstock relink {artifact} 0\.safetensors`"):
        library.open(artifact)
    done = penstock("relink", artifact)
    assert (done.status, "is relinked to 2 files, and each byte of its " in done.out) == (0, True)
    paths = "".join(f"\n  {file.with_name(name)}" for name in ("0.safetensors", "1.safetensors"))
    assert done.out.endswith(f" of weights is as it was compiled:{paths}\n")
    assert runs(library.open(artifact), model)


@pytest.mark.parametrize("given", [["second"], ["second/1.safetensors", "second/0.safetensors"]])
def test_files_that_were_moved_are_accepted(artifact, model, penstock, given, monkeypatch):
    (artifact.parent / "first").rename(artifact.parent / "second")
    with pytest.raises(SourceError, match=r"is missing: .*`penstock relink"):
        library.open(artifact)
    monkeypatch.chdir(artifact.parent)
    assert penstock("relink", artifact, *given).status == 0
    program = library.open(artifact)
    assert {Path(file.path).parent.name for file in program.payload.files} == {"second"}
    assert runs(program, model)
    assert sorted(path.name for path in artifact.parent.iterdir()) == ["a.penstock", "second"]


def test_a_byte_that_no_sample_sees_is_refused_and_the_artifact_is_untouched(artifact, penstock):
    file = artifact.parent / "first" / "1.safetensors"
    before = contents(artifact)
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    done = penstock("relink", artifact)
    assert (done.status, done.out) == (2, "")
    assert "weight 1." in done.err
    assert "has changed since it was compiled" in done.err
    assert contents(artifact) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("elsewhere/other.safetensors", "other.safetensors is the name of no weight file of the artifact"),
        ("elsewhere/0.safetensors", "is not the file that was compiled: its size in bytes was"),
        ("elsewhere/1.safetensors", "there is no file or folder"),
    ],
)
def test_what_is_no_copy_is_refused(artifact, penstock, given, words):
    (artifact.parent / "elsewhere").mkdir()
    for name in ("0", "other"):
        save_file({"0.weight": torch.zeros(3)}, artifact.parent / "elsewhere" / f"{name}.safetensors")
    before = contents(artifact)
    done = penstock("relink", artifact, artifact.parent / given)
    assert done.status == 2
    assert words in done.err
    assert contents(artifact) == before


def test_packed_weights_are_not_relinked(tmp_path, model, penstock):
    packed = library.compile(torch.export.export(model, (X,)), tmp_path / "packed.penstock").path
    done = penstock("relink", packed)
    assert (done.status, "there is nothing to relink" in done.err) == (2, True)

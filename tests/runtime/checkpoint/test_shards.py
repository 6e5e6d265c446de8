"""Shards that do not belong together, or are not all there, are refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.schedule.facts.errors import SourceError


def shards(folder, *names):
    """A tensor of 12 bytes in each file."""
    paths = [folder / f"{name}.safetensors" for name in names]
    for number, path in enumerate(paths):
        save_file({f"t{number}": torch.ones(3)}, path)
    return paths


@pytest.mark.parametrize("several", [True, False])
def test_shards_of_two_checkpoints(tmp_path, several):
    paths = shards(tmp_path, "model-00001-of-00002", "model-00001-of-00003", "model-00002-of-00002")
    with pytest.raises(SourceError, match=r"1-of-00002\S+ and model-00001-of-00003\S+ are shards of"):
        open_checkpoint(paths if several else tmp_path)


@pytest.mark.parametrize("several", [True, False])
def test_shards_that_are_not_all_there(tmp_path, several):
    paths = shards(tmp_path, "model-00001-of-00004", "model-00003-of-00004")
    with pytest.raises(SourceError, match=r"1-of-00004\S+ is one of 4 .* not given: 2, 4; "):
        open_checkpoint(paths if several else tmp_path)
    assert set(open_checkpoint(paths, only="t1").tensors) == {"t1"}


@pytest.mark.parametrize("first", [0, 1])
def test_complete_shards_without_an_index(tmp_path, first):
    shards(tmp_path, *(f"model-0000{first + k}-of-00003" for k in range(3)), "adapter-1-of-1")
    assert len(open_checkpoint(tmp_path).tensors) == 4


def index(folder, total, name="model"):
    path = folder / f"{name}.safetensors.index.json"
    places = {"t0": "a.safetensors", "t1": "b.safetensors"}
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return path


@pytest.mark.parametrize("form", ["folder", "index"])
def test_an_index_whose_total_is_wrong_gets_a_note(tmp_path, said, form):
    shards(tmp_path, "a", "b")
    path = index(tmp_path, 24)
    source = tmp_path if form == "folder" else path
    assert len(open_checkpoint(source).tensors) == 2
    assert not said()
    index(tmp_path, 25)
    assert len(open_checkpoint(source).tensors) == 2
    assert "json gives total_size as 25 bytes and its files hold 24" in said()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_links_to_files_without_suffixes(tmp_path, name):
    """As the hub's cache has them: a checkpoint is what its names say, wherever they lead."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    model, x = torch.nn.Linear(8, 8), torch.ones(1, 8)
    for parameter in model.parameters():  # in place they lie off 16 bytes, where sums round differently
        torch.nn.init.constant_(parameter, 0.5)
    save = torch.save if name.endswith("bin") else save_file
    save(model.state_dict(), tmp_path / "blobs" / "0123abcd")
    link = tmp_path / "snapshot" / name
    link.symlink_to("../blobs/0123abcd")
    (tmp_path / "again.safetensors").symlink_to(tmp_path / "blobs" / "0123abcd")
    exported = torch.export.export(torch.nn.Linear(8, 8), (x,))
    with torch.no_grad():
        assert torch.equal(penstock.bind(exported, link).module()(x), model(x))
    if name.endswith("bin"):
        assert len(open_checkpoint(tmp_path / "snapshot").tensors) == 2
        return
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=link, pack=False)
    assert program.payload.files[0].path == str(link)
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(module(x), model(x))
    assert len(open_checkpoint([link, tmp_path / "again.safetensors"]).files) == 1


@pytest.mark.parametrize("text", ["{broken", "[]", '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_called_an_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SourceError, match=r"index\.json is not an index that can be trusted"):
        open_checkpoint(tmp_path)


def test_what_torch_saved_is_packed_and_not_used_in_place(tmp_path):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8), torch.ones(1, 8)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    exported = torch.export.export(model, (x,))
    with pytest.raises(SourceError, match=r"model\.pt is no safetensors file.*`penstock convert`"):
        penstock.compile(exported, tmp_path / "a.penstock", weights=tmp_path / "model.pt", pack=False)
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=tmp_path / "model.pt")
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(module(x), model(x))

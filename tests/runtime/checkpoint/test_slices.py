"""A part of a checkpoint: one rank's slices, or one submodule, and nothing else is read."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from penstock.runtime.checkpoint.convert import convert
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, region


class Mlp(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


X = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def whole(tmp_path):
    torch.manual_seed(0)
    model = Mlp()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


def slices(rank, world=4):
    return {"up.*": (0, rank, world), "down.weight": (-1, rank, world)}


def part(model, rank, world=4):
    own = Mlp(64 // world)
    state = model.state_dict()
    dims = {name: 1 if name == "down.weight" else 0 for name in state}
    own.load_state_dict({name: value.chunk(world, dims[name])[rank] for name, value in state.items()})
    return own


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_rank_gets_its_rows_and_columns(whole, tmp_path, rank, stored):
    model, path = whole
    model.to(stored).float()
    save_file({name: value.to(stored) for name, value in model.state_dict().items()}, path)
    expected = part(model, rank)
    exported = penstock.fake_export(lambda: Mlp(16), (X,))
    taken = {"slices": slices(rank), "cast": stored != torch.float32}
    bound = penstock.bind(exported, path, **taken)
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=path, **taken)
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(bound.module()(X), expected(X))
        assert torch.equal(module(X), expected(X))


def test_rows_stay_in_place_and_columns_are_packed(whole, tmp_path):
    model, path = whole
    exported = penstock.fake_export(lambda: Mlp(16), (X,))
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=path, pack=False, slices=slices(2))
    files = {
        w.fqn: program.payload.storages[w.parts[0].storage].extents[0].file for w in program.payload.weights
    }
    assert files == {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(module(X), part(model, 2)(X))


def test_only_the_slices_bytes_are_read(whole, monkeypatch):
    _, path = whole
    tensor = open_checkpoint(path).tensors["down.weight"]
    reading = Reading(tensor, region("down.weight", "down.weight", tensor, (1, 1, 4)))
    read, real = [], os.pread

    def counted(fd, nbytes, offset):
        read.append((offset - tensor.boxes[0].start, nbytes))
        return real(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    list(reading.chunks((path,)))
    assert read == [(row * 64 * 4 + 16 * 4, 16 * 4) for row in range(32)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nothing.*": (0, 0, 2)}, r"'nothing\.\*', which matches no weight"),
        ({"up.weight": (0, 0, 2), "up.*": (0, 0, 2)}, r"'up\.weight' and 'up\.\*' for weight up\.weight"),
        ({"up.*": 7}, r"slices= has 7 for 'up\.\*', expected \(dimension, rank, ranks\)"),
        ({"up.*": (0, 1)}, r"slices= has \(0, 1\) for 'up\.\*', expected"),
        ((0, 0, 2), r"slices= has \(0, 0, 2\) for '', expected"),
        ({"up.*": (2, 0, 2)}, r"weight up\.weight has the slice \(2, 0, 2\)"),
        ({"up.*": (0, 2, 2)}, r"has the slice \(0, 2, 2\)"),
        ({"up.*": (0, 0, 3)}, r"64 elements of F32 in dimension 0, which 3 ranks cannot share equally"),
        ({"up.*": (0, 0, 2)}, r"is float32 \[16.* and tensor 'up\.\w+' of .* is float32 \[32.*\] of \[64"),
    ],
)
def test_slices_that_cannot_be_are_refused_by_name(whole, wrong, message):
    exported = penstock.fake_export(lambda: Mlp(16), (X,))
    with pytest.raises(penstock.SourceError, match=message):
        penstock.bind(exported, whole[1], slices=wrong)


def test_slices_need_a_checkpoint(tmp_path):
    with pytest.raises(penstock.PassError, match="slices= divides"):
        penstock.compile(penstock.fake_export(Mlp, (X,)), tmp_path / "a.penstock", slices=slices(0))


def test_one_submodule_needs_its_own_shards_only(whole, tmp_path):
    model, _ = whole
    folder = tmp_path / "shards"
    folder.mkdir()
    up = {name: value for name, value in model.state_dict().items() if name.startswith("up.")}
    save_file(up, folder / "one.safetensors")
    places = dict.fromkeys(up, "one.safetensors") | {"down.weight": "absent.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    exported = penstock.fake_export(lambda: nn.Linear(32, 64), (X,))
    bound = penstock.bind(exported, folder, only="up.*", rename=lambda fqn: f"up.{fqn}")
    with torch.no_grad():
        assert torch.equal(bound.module()(X), model.up(X))
    convert(folder, tmp_path / "up.safetensors", only=["up.*"])
    assert load_file(tmp_path / "up.safetensors").keys() == up.keys()
    with pytest.raises(penstock.SourceError, match=r"'absent\.safetensors', which is missing"):
        penstock.bind(exported, folder, rename=lambda fqn: f"up.{fqn}")
    with pytest.raises(penstock.SourceError, match=r"is called 'down'"):
        penstock.bind(exported, folder, only="down")
    with pytest.raises(penstock.SourceError, match=r"is called 'middle\.\*'"):
        penstock.bind(exported, folder, only=["up.*", "middle.*"])

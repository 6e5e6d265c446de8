"""Values from files that do not quite fit the program, and checkpoints in shards, used in place."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export

import penstock
from penstock import LoadOptions


class Halves(nn.Module):
    """A parameter and a buffer that are two halves of one storage."""

    def __init__(self):
        super().__init__()
        both = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
        self.first = nn.Parameter(both[:64])
        self.register_buffer("second", both[64:])

    def forward(self, x):
        return x @ self.first + x @ self.second


X = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pack", [True, False])
def test_half_a_storage_in_the_files_is_not_enough(tmp_path, pack):
    model, files = Halves(), tmp_path / "half.safetensors"
    save_file({"first": model.first.detach().clone()}, files)
    with pytest.raises(penstock.SourceError, match=r"1 of the program's weights are not in .*: second"):
        penstock.compile(export(model, (X,)), tmp_path / "a.penstock", weights=files, pack=pack)


@pytest.fixture
def shards(tmp_path):
    """A model, and the index of its checkpoint in three shards."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    names = {}
    for number in range(3):
        shard = f"model-0000{number}-of-00003.safetensors"
        values = {
            k: v.clone() for k, v in model.state_dict().items() if int(k.partition(".")[0]) % 3 == number
        }
        save_file(values, folder / shard)
        names |= dict.fromkeys(values, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return model, index


@pytest.mark.parametrize("source", ["index", "folder"])
def test_shards_stream_in_place(shards, tmp_path, source):
    model, index = shards
    x = torch.randn(3, 256)
    weights = index if source == "index" else index.parent
    program = penstock.compile(export(model, (x,)), tmp_path / "s.penstock", weights=weights, pack=False)
    assert len(program.payload.files) == 3
    assert not (program.path / "weights.safetensors").exists()
    with torch.no_grad():
        for arena in program.arenas():
            floor = program.floor(arena=arena)
            with program.load(floor, options=LoadOptions(arena=arena, poison=True)) as module:
                for _ in range(2):
                    assert torch.equal(module(x), model(x))
                assert module.stats.peak_bytes <= floor
    program.verify()


def test_a_missing_shard_is_named(shards, tmp_path):
    model, index = shards
    exported = export(model, (torch.randn(3, 256),))
    program = penstock.compile(exported, tmp_path / "s.penstock", weights=index, pack=False)
    (index.parent / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(penstock.SourceError, match=r"model-00001-of-00003\.safetensors"):
        penstock.open(program.path)
    with pytest.raises(penstock.SourceError, match="model-00001-of-00003"):
        penstock.compile(exported, tmp_path / "t.penstock", weights=index)

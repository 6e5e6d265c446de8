"""What an earlier artifact has hashed in place is not hashed again, where its files are the same."""

import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.runtime import artifact

X = torch.ones(2, 8)


def test_unchanged_files_are_not_hashed_again(tmp_path, monkeypatch):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval().requires_grad_(False)
    state = module.state_dict()
    files = [tmp_path / f"{part}.safetensors" for part in range(2)]
    for part, file in enumerate(files):
        save_file({name: value for name, value in state.items() if name.startswith(f"{part}.")}, file)
    exported = torch.export.export(module, (X,))
    hashed = []
    original = artifact.hash_storage

    def counting(storage, *args, **options):
        hashed.append(storage.nbytes)
        return original(storage, *args, **options)

    monkeypatch.setattr(artifact, "hash_storage", counting)

    def compile(name, earlier):
        hashed.clear()
        return penstock.compile(exported, tmp_path / name, weights=files, pack=False, earlier=earlier)

    first = compile("first", None)
    assert len(hashed) == 4
    again = compile("again", first)
    assert hashed == []
    assert again.payload.storages == first.payload.storages

    module[1].weight.mul_(2)
    save_file({name: value for name, value in state.items() if name.startswith("1.")}, files[1])
    changed = compile("changed", first)
    assert sorted(hashed) == [8 * 4, 8 * 8 * 4]  # of the file that is another one
    assert changed.verify() == changed.weight_bytes
    with changed.load("100%") as streamed:
        assert torch.equal(streamed(X), module(X))

"""Weight files that several write at once, and a program that reads another file of the same layout."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.integrations import apply
from penstock.integrations.cached import artifact_key, same_layout, store, with_other_file
from penstock.integrations.kept import KeptWeights, digests_of
from penstock.runtime.cache import Cache, list_entries, prune
from penstock.schedule.facts.errors import SourceError

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def linear(seed: int, width: int = 8) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, width).eval().requires_grad_(False)


def test_the_values_are_those_of_the_other_file_and_are_verified(tmp_path):
    for number, module in enumerate((linear(1), linear(2), linear(3, width=9))):
        save_file(module.state_dict(), tmp_path / f"{number}.safetensors")
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    assert same_layout(first, second)
    assert not same_layout(first, third)
    exported = torch.export.export(linear(1), (X,))
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=first, pack=False)
    other = KeptWeights((second,), digests=digests_of(linear(2).state_dict()))
    changed = with_other_file(program, first, other)
    assert changed.verify() == program.verify()
    for one, reference in ((program, linear(1)), (changed, linear(2))):
        with one.load("100%") as module:
            assert torch.equal(module(X), reference(X))
    with pytest.raises(SourceError, match=r"1\.safetensors has other bytes than were written to it"):
        with_other_file(program, first, KeptWeights((second,), digests=digests_of(linear(1).state_dict())))
    inlined = tuple(replace(storage, kind="inlined") for storage in program.payload.storages)
    program.payload = replace(program.payload, storages=inlined)
    assert with_other_file(program, first, other) is None


def test_programs_over_weights_that_are_gone_have_no_name(tmp_path):
    with pytest.raises(SourceError, match=r"gone\.safetensors cannot be read .*No such file"):
        artifact_key(["a program"], [tmp_path / "gone.safetensors"], "eager")


def test_weights_that_several_write_at_once_are_written_once(tmp_path):
    tensors, found = {"weight": torch.ones(300, 300)}, []
    cache = Cache(tmp_path)
    threads = [threading.Thread(target=lambda: found.append(store(tensors, cache, "me"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    (files,) = {kept.files for kept in found}
    assert files[0].is_file()


def test_what_a_model_runs_on_is_in_use_until_it_is_restored(tmp_path, said):
    model, cache = nn.Sequential(linear(1)), Cache(tmp_path)
    expected = model(X)
    applied = apply(model, "1MB", example=X, cache=tmp_path)
    (weights,) = cache.weights.iterdir()
    assert f"writing 288 bytes of weights of Sequential to {weights}" in said()
    assert {one.made_for for one in list_entries(tmp_path) if one.kind != "call"} == {"Sequential"}
    applied.close()  # what is not loaded is needed too, as it is nowhere else
    assert [one.kind for one in prune(tmp_path, before=math.inf).in_use] == ["weights", "program"]
    assert torch.equal(model(X), expected)
    applied.restore()
    assert len(prune(tmp_path, before=math.inf).removed) == 2
    with apply(model, "1MB", example=X, cache=tmp_path):  # written again
        assert torch.equal(model(X), expected)


def test_the_limit_is_kept_when_weights_are_written(tmp_path, monkeypatch):
    first, second = nn.Sequential(linear(1, width=999)), nn.Sequential(linear(2, width=999))
    apply(first, "1MB", example=X, cache=tmp_path).restore()
    (old,) = Cache(tmp_path).weights.iterdir()
    total = sum(one.nbytes for one in list_entries(tmp_path))
    monkeypatch.setenv("PENSTOCK_CACHE_LIMIT", str(total + 10_000))
    with apply(second, "1MB", example=X, cache=tmp_path):
        assert not old.exists()
        assert sum(one.nbytes for one in list_entries(tmp_path)) <= total + 10_000
        assert [one.kind for one in list_entries(tmp_path)] == ["weights", "call", "program"]


def test_a_damaged_program_is_compiled_again(tmp_path, said):
    model = nn.Sequential(linear(1))
    expected = model(X)
    apply(model, "1MB", example=X, cache=tmp_path).restore()
    (folder,) = Cache(tmp_path).programs.iterdir()
    for name in ("payload.json", "payload.json.sha256"):
        file = folder / name
        file.write_bytes(file.read_bytes()[:40])
        said()
        with apply(model, "1MB", example=X, cache=tmp_path):
            assert f"{folder} was damaged, and is written again" in said()
            assert torch.equal(model(X), expected)

"""Weight files in the cache, which several may write at once."""

import math
import threading

import torch
from torch import nn

from penstock.integrations import apply
from penstock.integrations.weight_files import store
from penstock.runtime.cache import Cache, list_entries, prune

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def linear(seed, width=8):
    torch.manual_seed(seed)
    return nn.Linear(8, width).eval().requires_grad_(False)


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
    applied = apply(model, "1MB", cache=tmp_path)
    (weights,) = cache.weights.iterdir()
    assert f"writing 288 bytes of weights of Sequential to {weights}" in said()
    assert {one.made_for for one in list_entries(tmp_path)} == {"Sequential"}
    applied.close()  # what is not loaded is needed too, as it is nowhere else
    assert [one.kind for one in prune(tmp_path, before=math.inf).in_use] == ["weights"]
    assert torch.equal(model(X), expected)
    applied.restore()
    assert len(prune(tmp_path, before=math.inf).removed) == 1
    with apply(model, "1MB", cache=tmp_path):  # written again
        assert torch.equal(model(X), expected)

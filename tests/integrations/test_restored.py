"""What a model was before apply, it is again after restore; and two that write the same at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.integrations.hollow import store
from penstock.schedule.errors import SourceError
from tests.integrations import models


class Tied(nn.Module):
    """Two parameters in one storage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = nn.Parameter(self.first.weight.detach())

    def forward(self, x):
        return self.second(self.first(x))


def test_ties_training_and_grad_are_as_they_were(tmp_path):
    model = Tied()
    model.second.eval()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with apply(model, "1MB", cache=tmp_path):
        assert not model.training
        model(torch.ones(2, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(value.requires_grad for value in model.parameters())
    assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
    assert [one.training for one in (model, model.first, model.second)] == [True, True, False]


def test_weights_that_several_write_at_once_are_written_once(tmp_path):
    tensors, found = {"weight": torch.ones(300, 300)}, []
    threads = [threading.Thread(target=lambda: found.append(store(tensors, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].is_file()


def test_a_damaged_file_in_the_cache_is_refused_before_anything_is_given_back(tmp_path):
    model = models.frozen(Tied())
    apply(model, "1MB", cache=tmp_path).restore()
    (file,) = tmp_path.glob("weights/*/weights.safetensors")
    held = bytearray(file.read_bytes())
    where = held.find(model.first.weight.numpy().tobytes()[:16])
    held[where : where + 4] = bytes(4)
    for damaged in (held, held[:-8]):
        file.write_bytes(damaged)
        before = model.first.weight.clone()
        with pytest.raises(SourceError, match="is damaged: delete its folder"):
            apply(model, "1MB", cache=tmp_path)
        assert torch.equal(model.first.weight, before)

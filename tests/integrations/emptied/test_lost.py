"""Weights that are deleted from the cache while a model runs on them."""

import shutil

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import SourceError
from tests.integrations import models

X = torch.linspace(-1, 1, 64).reshape(2, 32)
GONE = (
    r"weights\.safetensors is gone, and it held the weights of Sequential.* put the file back; .* restore\(\)"
)


@pytest.fixture
def lost(tmp_path):
    """A model whose plan is loaded, what it returned, what `apply` returned, and a function that deletes."""
    torch.manual_seed(0)
    model = models.frozen(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    expected = model(X)
    applied = apply(model, "1MB", cache=tmp_path)
    for _ in range(2):
        assert torch.equal(model(X), expected)
    shutil.move(tmp_path / "weights", tmp_path / "elsewhere")

    def put_back():
        shutil.move(tmp_path / "elsewhere", tmp_path / "weights")

    yield model, expected, applied, put_back
    if (tmp_path / "elsewhere").exists():
        put_back()
    applied.restore()


def test_a_call_that_needs_another_plan_says_so_and_smaller_ones_run_on(lost):
    model, expected, _, _ = lost
    with pytest.raises(SourceError, match=GONE):
        model(X.repeat(1000, 1))
    assert torch.equal(model(X), expected)


def test_a_load_after_close_says_so_and_works_when_they_are_back(lost):
    model, expected, applied, put_back = lost
    applied.close()
    with pytest.raises(SourceError, match=GONE):
        model(X)
    put_back()
    assert torch.equal(model(X), expected)


def test_a_restore_says_so_and_leaves_what_is_loaded(lost):
    model, expected, applied, put_back = lost
    with pytest.raises(SourceError, match=GONE):
        applied.restore()
    with pytest.raises(SourceError, match="is missing"):
        model[0].weight.sum()
    assert torch.equal(model(X), expected)
    assert applied.freed_bytes
    put_back()
    applied.restore()
    assert not applied.freed_bytes
    assert torch.equal(model(X), expected)

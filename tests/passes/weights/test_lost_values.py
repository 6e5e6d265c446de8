"""Programs that torch.export.save emptied are told from those whose zeros are meant."""

import io

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._export.serde import serialize

import penstock
from penstock.passes.weights import lifted


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch):
    """Of fake inputs torch logs a warning that it cannot format."""
    monkeypatch.setattr(serialize.log, "disabled", True)


def saved_and_loaded(exported):
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    return torch.export.load(stored)


def two():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def square():
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.first.weight)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("newest", self.cache[0])

    def forward(self, x):
        return self.second(self.first(x)) + self.newest + self.cache.sum(0)


@pytest.mark.parametrize("build", [two, square, lambda: nn.Linear(8, 8, bias=False)])
def test_a_fake_program_that_was_saved_is_refused_wherever_it_is_given(build, tmp_path):
    loaded = saved_and_loaded(penstock.fake_export(build, (torch.zeros(1, 8),)))
    save_file(build().state_dict(), tmp_path / "model.safetensors")
    target, weights = tmp_path / "model.penstock", tmp_path / "model.safetensors"
    for use in (
        lambda: penstock.compile(loaded, target),
        lambda: penstock.compile(loaded, target, weights=weights),
        lambda: penstock.annotate(loaded),
        lambda: penstock.bind(loaded, weights),
    ):
        with pytest.raises(penstock.PassError, match=r"have no values: .* does not keep fake weights"):
            use()
    assert not target.exists()


def test_one_fake_input_among_others_tells_a_fake_program():
    class Scaled(nn.Linear):
        def forward(self, x, times):  # type: ignore[override]
            return super().forward(x) * times

    exported = penstock.fake_export(lambda: Scaled(8, 8, bias=False), (torch.zeros(1, 8), 3))
    with pytest.raises(penstock.PassError, match="have no values"):
        penstock.annotate(saved_and_loaded(exported))


def test_zeros_that_are_meant_are_weights():
    exported = torch.export.export(Tied(), (torch.zeros(1, 8),))
    assert len(penstock.annotate(exported).storages) == 2
    assert len(penstock.annotate(saved_and_loaded(exported)).storages) == 2


@pytest.mark.parametrize("place", [0, 31, 32, 99])
def test_one_byte_of_any_piece_is_a_value(monkeypatch, place):
    monkeypatch.setattr(lifted, "_PIECE", 32)
    value = torch.zeros(100, dtype=torch.uint8)
    assert lifted._is_zero(value)
    value[place] = 1
    assert not lifted._is_zero(value)


def test_a_bound_program_may_be_saved(tmp_path):
    save_file(two().state_dict(), tmp_path / "model.safetensors")
    exported = penstock.fake_export(two, (torch.zeros(1, 8),))
    bound = penstock.bind(exported, tmp_path / "model.safetensors")
    assert len(penstock.annotate(saved_and_loaded(bound)).storages) == 4

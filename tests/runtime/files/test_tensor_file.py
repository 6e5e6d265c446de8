"""Tensors are read into memory of their own: a file that changes meanwhile is named."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.runtime.files import tensor_file
from penstock.runtime.files.safetensors_file import TORCH_NAMES
from penstock.runtime.files.tensor_file import open_tensors
from penstock.schedule.facts.errors import SourceError
from tests.runtime.files.weight_files import header_bytes


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch):
    monkeypatch.setattr(tensor_file, "_PIECE", 64)


def bytes_in(value):
    return value.reshape(-1).view(torch.uint8)


def test_tensors_are_on_the_cpu_wherever_torch_makes_its_own(tmp_path):
    save_file({"w": torch.arange(100.0)}, path := tmp_path / "w.safetensors")
    with torch.device("meta"), open_tensors(path) as opened:
        assert opened.get_tensor("w").tolist() == list(range(100))


def test_tensors_are_those_of_the_library(tmp_path):
    torch.manual_seed(0)
    raw = torch.randint(0, 2, (960,), dtype=torch.uint8)  # bytes that are values of every dtype
    tensors = {name: raw.view(getattr(torch, torch_name)) for name, torch_name in TORCH_NAMES.items()}
    tensors = {name: value.view(4, -1).clone() for name, value in tensors.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7)}
    save_file(tensors, path := tmp_path / "all.safetensors", metadata={"of": "all"})
    with safe_open(path, framework="pt") as expected, open_tensors(path) as opened:
        assert opened.metadata == expected.metadata() == {"of": "all"}
        assert sorted(opened.entries) == sorted(expected.keys())
        for name, value in tensors.items():
            found = opened.get_tensor(name)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(bytes_in(found), bytes_in(expected.get_tensor(name)))


def test_bytes_are_compared_to_the_last_one(tmp_path):
    value = torch.arange(100.0)
    save_file({"w": value}, path := tmp_path / "w.safetensors")
    with open_tensors(path) as opened:
        assert opened.holds("w", bytes_in(value))
        assert not opened.holds("w", bytes_in(value)[:-4])
        assert not opened.holds("w", torch.cat((bytes_in(value), torch.zeros(1, dtype=torch.uint8))))
        for index in (0, 63, 64, 399):
            other = bytes_in(value).clone()
            other[index] ^= 1
            assert not opened.holds("w", other)


def test_a_file_that_becomes_shorter_is_named_and_not_read_as_zeros(tmp_path):
    save_file({"w": torch.ones(100)}, path := tmp_path / "w.safetensors")
    with open_tensors(path) as opened:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(SourceError, match=r"w\.safetensors ends at byte .* it has been truncated"):
            opened.get_tensor("w")
        with pytest.raises(SourceError, match="it has been truncated"):
            opened.holds("w", bytes_in(torch.ones(100)))


def test_what_torch_has_no_dtype_for_is_named(tmp_path):
    fields = {"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    (path := tmp_path / "w.safetensors").write_bytes(header_bytes(fields) + b"\0")
    with open_tensors(path) as opened, pytest.raises(SourceError, match="'w' in F4, which torch has no"):
        opened.get_tensor("w")

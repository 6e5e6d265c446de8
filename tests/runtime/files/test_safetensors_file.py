import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.runtime.files.safetensors_file import (
    HEADER_LIMIT,
    ITEM_BITS,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    index_files,
    read_header,
)
from penstock.schedule.facts.errors import SourceError
from tests.runtime.files.weight_files import header_bytes


def entry(start, stop, *, dtype="U8", shape=None):
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def test_reads_what_the_library_writes(tmp_path):
    tensors = {
        name: torch.zeros(3, 5, dtype=getattr(torch, torch_name)) for name, torch_name in TORCH_NAMES.items()
    }
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 7), "../parts/of/a/name": torch.ones(1)}
    path = tmp_path / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == {"format": "pt"}
    assert header.entries.keys() == tensors.keys()
    assert content.startswith(header.raw)
    assert header.data_start == 8 + int.from_bytes(content[:8], "little")
    for name, tensor in tensors.items():
        found = header.entries[name]
        assert TORCH_NAMES[found.dtype] == str(tensor.dtype).removeprefix("torch.")
        assert found.shape == tuple(tensor.shape)
        assert found.nbytes == tensor.nbytes
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        assert content[found.start : found.stop] == flat.numpy().tobytes()


def test_entries_are_in_file_order(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(header_bytes({"b": entry(4, 6), "none": entry(4, 4), "a": entry(0, 4)}) + bytes(6))
    assert list(read_header(path).entries) == ["a", "none", "b"]


def test_dtype_tables_agree():
    for name, torch_name in TORCH_NAMES.items():
        assert ITEM_BITS[name] == getattr(torch, torch_name).itemsize * 8
        assert SAFETENSORS_NAMES[torch_name] == name
    assert "complex128" not in SAFETENSORS_NAMES


def test_trailing_spaces_are_padding(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(header_bytes(json.dumps({"a": entry(0, 2)}) + "   ") + bytes(2))
    assert read_header(path).entries["a"].nbytes == 2


A = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
REFUSED = {
    "duplicate name": (f'{{"a":{A},"a":{A}}}', 4, "'a' occurs twice"),
    "duplicate field": ('{"a":' + A.replace("{", '{"dtype":"I8",', 1) + "}", 4, "'dtype' occurs twice"),
    "leading blank": (f' {{"a":{A}}}', 4, "begins with b' "),
    "not json": ('{"a":', 4, "JSON"),
    "text behind": (f'{{"a":{A}}}x', 4, "JSON"),
    "not an object": ("[1]", 0, "object was expected"),
    "no header": ("", 0, "object was expected"),
    "deep": ('{"a":' + "[" * 100_000, 0, "JSON"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "'b' .* overlaps"),
    "same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(5, 6)}, 6, "'b' .* hole"),
    "hole first": ({"a": entry(1, 4)}, 4, "hole"),
    "data too long": ({"a": entry(0, 4)}, 5, "incomplete"),
    "data too short": ({"a": entry(0, 4)}, 3, "incomplete"),
    "no tensors but data": ({}, 1, "incomplete"),
    "wrong size": (
        {"a": entry(0, 4, dtype="F32", shape=[2])},
        4,
        r"'a' of F32 \[2\] needs 8 bytes and is given 4",
    ),
    "half a byte": ({"a": entry(0, 1, dtype="F4", shape=[3])}, 1, "needs 1.5 bytes"),
    "product overflows": ({"a": entry(0, 0, dtype="F32", shape=[1 << 62, 4])}, 0, "needs"),
    "size overflows": ({"a": entry(0, 4, shape=[1 << 63])}, 4, "not a list of sizes"),
    "negative shape": ({"a": entry(0, 4, shape=[-2, -2])}, 4, "not a list of sizes"),
    "boolean shape": ({"a": entry(0, 1, shape=[True])}, 1, "not a list of sizes"),
    "fraction": ({"a": entry(0, 4, shape=[4.0])}, 4, "not a list of sizes"),
    "negative offset": ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, "begin and an end"),
    "offsets reversed": ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "begin and an end"),
    "one offset": ({"a": {**entry(0, 4), "data_offsets": [4]}}, 4, "begin and an end"),
    "unknown dtype": ({"a": entry(0, 4, dtype="U4")}, 4, "unknown dtype 'U4'"),
    "dtype no string": ({"a": {**entry(0, 4), "dtype": ["U8"]}}, 4, "unknown dtype"),
    "extra field": ({"a": {**entry(0, 4), "note": 1}}, 4, "exactly"),
    "missing field": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "exactly"),
    "entry no object": ({"a": 3}, 4, "exactly"),
    "no text": ({"\ud800": entry(0, 4)}, 4, "is no text"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, tmp_path):
    fields, data_nbytes, message = REFUSED[case]
    path = tmp_path / "w.safetensors"
    path.write_bytes(header_bytes(fields) + bytes(data_nbytes))
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\1\0\0", (5).to_bytes(8, "little") + b"{}", b"\xff" * 8 + b"{}"], ids=repr
)
def test_refuses_impossible_header_lengths(content, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="header"):
        read_header(path)


def test_refuses_huge_header_before_reading_it(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes((HEADER_LIMIT + 1).to_bytes(8, "little"))
    os.truncate(path, HEADER_LIMIT * 2)
    with pytest.raises(SourceError, match=f"at most {HEADER_LIMIT} are possible"):
        read_header(path)


def test_missing_and_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    with pytest.raises(SourceError, match="is missing"):
        read_header(path)

    path.touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match=r"cannot be opened \(Permission denied\)"):
        read_header(path)


@given(st.binary(max_size=60), st.integers(0, 70), st.integers(0, 255))
def test_never_fails_otherwise(tmp_path_factory, tail, at, byte):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    content = bytearray(header_bytes({"a": entry(0, 4)}) + bytes(4))
    content[at % len(content)] = byte
    path.write_bytes(content + tail)
    try:
        header = read_header(path)
    except SourceError:
        return
    assert sum(found.nbytes for found in header.entries.values()) == header.file_nbytes - header.data_start


def write_index(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_index_files(tmp_path):
    first, second = tmp_path / "m-1.safetensors", tmp_path / "m-2.safetensors"
    for path in (first, second):
        save_file({"a": torch.zeros(1)}, path)
    assert index_files(first) == (first,)
    assert index_files([second, first, second]) == (second, first)
    assert index_files(tmp_path) == (first, second)
    index = write_index(tmp_path, {"a": second.name, "b": first.name, "c": second.name})
    assert index_files(index) == (second, first)
    assert index_files(tmp_path) == (second, first)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "'gone.safetensors', which is missing"),
        ({"a": "../m.safetensors"}, "outside its folder"),
        ({"a": "/m.safetensors"}, "outside its folder"),
        ({"a": 3}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_index_refused(weight_map, message, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(SourceError, match=message):
        index_files(write_index(folder, weight_map))


def test_index_files_refused(tmp_path):
    with pytest.raises(SourceError, match=re.escape("holds no .safetensors file")):
        index_files(tmp_path)
    with pytest.raises(SourceError, match="not a file or folder"):
        index_files(tmp_path / "gone")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(SourceError, match="neither"):
        index_files(tmp_path / "weights.bin")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(SourceError, match="several checkpoints"):
        index_files(tmp_path)

"""Checkpoints written anew: every tensor is what it was, wherever it lies and whatever it becomes."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.runtime.checkpoint import stored_tensor
from penstock.runtime.checkpoint.convert import INDEX, convert
from penstock.runtime.files.safetensors_file import read_header
from penstock.schedule.facts.errors import SourceError
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.forked import run_forked


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(3, 5, generator=generator),
        "large": torch.randn(64, 1024, generator=generator),
        "half": torch.randn(100, generator=generator).to(torch.bfloat16),
        "numbers": torch.arange(7),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([True, False, True]),
    }


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def read(path):
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def test_torch_save_to_one_file_to_shards_and_back(tmp_path):
    torch.save(tensors(), tmp_path / "model.pt")
    done = convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    assert (done.tensors, len(done.files)) == (7, 1)
    assert same(read(tmp_path / "model.safetensors"), tensors())
    entries = read_header(tmp_path / "model.safetensors").entries
    assert entries["large"].start % 4096 == 0
    shards = convert(tmp_path / "model.safetensors", tmp_path / "shards", shard_size=200)
    assert len(shards.files) > 2
    places = json.loads((tmp_path / "shards" / INDEX).read_text())["weight_map"]
    assert set(places) == set(tensors())
    assert same(read(tmp_path / "shards"), tensors())
    convert(tmp_path / "shards", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_floating_point_tensors_become_what_torch_makes_of_them(tmp_path, dtype):
    save_file(tensors(), tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "new.safetensors", dtype=dtype)
    wanted = getattr(torch, dtype)
    expected = {n: v.to(wanted) if v.is_floating_point() else v for n, v in tensors().items()}
    assert same(read(tmp_path / "new.safetensors"), expected)


MEASURE = """
import sys
from penstock.runtime.checkpoint.convert import convert
from tests.resident import peak_above

small, new, big, other = sys.argv[1:]
convert(small, new, dtype="bfloat16")
print(peak_above(lambda: convert(big, other, dtype="bfloat16")))
"""


def test_memory_stays_bounded(tmp_path):
    """A tensor of 512 MiB, most of it a hole of the file."""
    nbytes = 512 << 20
    save_file(tensors(), tmp_path / "small.safetensors")
    header = json.dumps(
        {"big": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    files = [tmp_path / f"{name}.safetensors" for name in ("small", "new", "model", "converted")]
    done = run_forked(MEASURE, *files)
    assert files[3].stat().st_size > nbytes // 2
    assert int(done.out) < nbytes // 2  # 87 to 168 MiB, as pieces of the heap are used again or not


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "cannot be converted to 'int8'"),
        ({"dtype": "nonsense"}, "cannot be converted to 'nonsense'"),
        ({"shard_size": "1MB"}, "shards go to a folder"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path, options, message):
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        convert(tmp_path / "model.safetensors", tmp_path / "new.safetensors", **options)
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("new.bin", {}, r"new\.bin would be a file of torch\.save"),
        ("new.pt", {}, r"new\.pt would be a file of torch\.save"),
        ("new.safetensors", {"shard_size": "1MB"}, "shards go to a folder"),
        ("model.safetensors", {}, "exists; choose another output"),
        ("nowhere/new.safetensors", {}, "nowhere is no folder that can be written to"),
        ("new.safetensors", {"only": "zzz*"}, r"no tensor of \S+model\.safetensors is called 'zzz\*'"),
    ],
)
def test_a_target_is_refused_before_anything_is_said(tmp_path, said, target, options, message):
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        convert([tmp_path / "model.safetensors"], tmp_path / target, **options)
    assert said() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_full_disk_is_said_before_writing_without_the_advice_of_compile(tmp_path, said, monkeypatch):
    save_file(tensors(), tmp_path / "model.safetensors")
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 0, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(SourceError, match=r"is full: .* free some or choose another output$"):
        convert(tmp_path / "model.safetensors", tmp_path / "new")
    assert said() == ""


def test_what_exists_is_kept_unless_asked_otherwise(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "new.safetensors").write_text("precious")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("precious")
    with pytest.raises(SourceError, match="exists"):
        convert(tmp_path / "model.safetensors", tmp_path / "new.safetensors")
    with pytest.raises(SourceError):
        convert(tmp_path / "model.safetensors", tmp_path / "home", force=True)
    assert (tmp_path / "home" / "letter").read_text() == "precious"
    convert(tmp_path / "model.safetensors", tmp_path / "new.safetensors", force=True)
    assert same(read(tmp_path / "new.safetensors"), tensors())


def test_what_lies_beside_weights_is_not_removed(tmp_path):
    folder = tmp_path / "model"
    save_file(tensors(), tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", folder, shard_size="64KiB")
    (folder / "config.json").write_text("precious")
    with pytest.raises(SourceError, match=r"model holds config\.json beside weights"):
        convert(folder, folder, dtype="bfloat16", force=True)
    assert same(read(folder), tensors())
    (folder / "config.json").unlink()
    convert(folder, folder, dtype="bfloat16", force=True)
    assert read(folder)["large"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_elements_of_less_than_a_byte_are_not_written_as_something_else(tmp_path, dtype):
    header = json.dumps({"a": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SourceError, match=r"'a' of .* is F4, less than a byte"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype=dtype)


def test_the_command(tmp_path, penstock):
    torch.save(tensors(), tmp_path / "model.pt")
    output = tmp_path / "model"
    done = penstock("convert", tmp_path / "model.pt", "-o", output, "--shard-size", "64KiB", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["tensors"] == 7
    assert same(read(output), tensors())
    assert penstock("convert", tmp_path / "model.pt", "-o", output).status == 2


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch):
    source, other, target = (tmp_path / f"{name}.safetensors" for name in ("source", "other", "target"))
    save_file(tensors(), source)
    save_file({name: value.flip(0) if value.dim() else value for name, value in tensors().items()}, other)
    read = stored_tensor.read_exactly

    def meanwhile(*given):
        if other.exists():
            other.replace(source)
        return read(*given)

    monkeypatch.setattr(stored_tensor, "read_exactly", meanwhile)
    with pytest.raises(
        SourceError, match=r"source\.safetensors was written to or replaced while it was read"
    ):
        convert(source, target)
    assert [one.name for one in tmp_path.iterdir()] == [source.name]
    convert(source, target)
    assert same(load_file(target), load_file(source))

import errno
import hashlib
import os
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from penstock.passes.weights.lifted import storage_bytes
from penstock.runtime.files import pack as pack_module
from penstock.runtime.files.artifact_files import file_chunks
from penstock.runtime.files.pack import PAD_PREFIX, PackEntry, tensor_chunks, write_packed
from penstock.runtime.files.safetensors_file import TORCH_NAMES, read_header
from penstock.schedule.facts.errors import SourceError
from tests.runtime.files.weight_files import pattern


def tensor_entry(name, tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PackEntry(
        name, dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor_chunks(storage_bytes(tensor))
    )


def bytes_entry(name, data, *, nbytes=None):
    nbytes = len(data) if nbytes is None else nbytes
    return PackEntry(name, "uint8", (nbytes,), nbytes, lambda: iter([data]))


def test_every_dtype_loads_with_the_library(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for torch_name in (*TORCH_NAMES.values(), "complex128"):
        dtype = getattr(torch, torch_name)
        raw = torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[torch_name] = raw.view(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7), "large": torch.randn(200, 301)}
    path = tmp_path / "w.safetensors"
    placed = write_packed(path, [tensor_entry(name, tensor) for name, tensor in tensors.items()])
    with safe_open(path, "pt") as file:
        assert {n for n in file.keys() if not n.startswith(PAD_PREFIX)} == tensors.keys()  # noqa: SIM118
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            if name == "complex128":
                assert found.dtype == torch.uint8
                found = found.view(torch.complex128).view(3, 5)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert bytes(storage_bytes(found)) == bytes(storage_bytes(tensor))
    content, header = path.read_bytes(), read_header(path)
    for one, (name, tensor) in zip(placed, tensors.items(), strict=True):
        data = content[one.file_offset : one.file_offset + one.nbytes]
        assert (one.name, one.file_offset) == (name, header.entries[name].start)
        assert data == bytes(storage_bytes(tensor))
        assert one.sha256 == hashlib.sha256(data).hexdigest()


sizes = st.one_of(st.integers(0, 300), st.sampled_from([4096, 65535, 65536, 65537, 69632, 100_001]))


@given(st.lists(sizes, max_size=8))
def test_alignment(tmp_path_factory, nbytes):
    path = tmp_path_factory.getbasetemp() / "aligned.safetensors"
    data = {f"w{i}": pattern(size, seed=i + 1) for i, size in enumerate(nbytes)}
    placed = write_packed(path, [bytes_entry(name, value) for name, value in data.items()], force=True)
    header, content = read_header(path), path.read_bytes()
    assert header.data_start % 4096 == header.file_nbytes % 4096 == 0
    assert [one.name for one in placed] == list(data)
    assert sorted(one.file_offset for one in placed) == [one.file_offset for one in placed]
    starts = [one.file_offset for one in placed[1:]] + [len(content)]
    for one, following in zip(placed, starts, strict=False):
        stop = one.file_offset + one.nbytes
        assert content[one.file_offset : stop] == data[one.name]
        assert one.file_offset % (4096 if one.nbytes >= 65536 else 64) == 0
        if one.nbytes >= 65536:
            assert following >= -(-stop // 4096) * 4096
    for name, entry in header.entries.items():
        if name.startswith(PAD_PREFIX):
            assert not any(content[entry.start : entry.stop])
            assert 0 < entry.nbytes < 4096


def test_no_entries(tmp_path):
    assert write_packed(tmp_path / "w.safetensors", []) == ()
    assert read_header(tmp_path / "w.safetensors").entries == {}


def test_from_another_file_in_bounded_memory(tmp_path):
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(pattern(1 << 20))
        file.truncate(96 << 20)
    done = []
    entry = PackEntry("w", "int8", (96 << 20,), 96 << 20, lambda: file_chunks(source, 0, 96 << 20))
    tracemalloc.start()
    try:
        (placed,) = write_packed(tmp_path / "w.safetensors", [entry], progress=done.append)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    assert sum(done) == (tmp_path / "w.safetensors").stat().st_size
    assert max(done) <= 16 << 20
    assert placed.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_large_files_are_flushed_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_module, "_FLUSH_EVERY", 1 << 20)
    syncs, real = [], os.fsync

    def count(fd):
        syncs.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", count)
    data = bytes(1 << 19)
    entry = PackEntry("w", "uint8", (8 << 20,), 8 << 20, lambda: iter([data] * 16))
    write_packed(tmp_path / "w.safetensors", [entry])
    assert len(syncs) >= 8


def no_space():
    yield b"ab"
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted():
    yield b"ab"
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("chunks", "error"),
    [(no_space, SourceError), (interrupted, KeyboardInterrupt), (lambda: iter([b"ab"]), SourceError)],
    ids=["disk full", "interrupted", "too few bytes"],
)
def test_failure_leaves_what_was_there(tmp_path, chunks, error):
    assert callable(chunks)
    path = tmp_path / "w.safetensors"
    write_packed(path, [bytes_entry("w", b"old")])
    before = path.read_bytes()
    with pytest.raises(error):
        write_packed(path, [PackEntry("w", "uint8", (4,), 4, chunks)], force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_disk_full_is_seen_beforehand(tmp_path):
    huge = 1 << 60
    with pytest.raises(SourceError, match=rf"needs {huge + 4096} bytes and \d+ are available"):
        write_packed(tmp_path / "w.safetensors", [bytes_entry("w", b"", nbytes=huge)])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("existing", [True, False])
def test_disk_that_fills_up_while_writing(tmp_path, monkeypatch, code, *, existing):
    path, real, written = tmp_path / "w.safetensors", os.write, []
    if existing:
        write_packed(path, [bytes_entry("w", b"old")])
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    def fill_up(fd, data):
        if sum(written) >= 100_000:
            raise OSError(code, os.strerror(code))
        written.append(real(fd, data[:50_000]))
        return written[-1]

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(
        SourceError, match=rf"is full: packing needs {204_800 + 4096} bytes and \d+ were avail"
    ):
        write_packed(path, [bytes_entry("w", bytes(204_800))], force=True)
    assert sum(written) >= 100_000
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([bytes_entry("w", b"1"), bytes_entry("w", b"2")], "'w' cannot be packed: its name is taken"),
        ([bytes_entry("__metadata__", b"1")], "name is taken"),
        ([bytes_entry(f"{PAD_PREFIX}0", b"1")], "name is taken"),
        (
            [PackEntry("w", "float32", (3,), 8, lambda: iter([bytes(8)]))],
            r"'w' of float32 \[3\] cannot have 8",
        ),
        ([bytes_entry("w", b"123", nbytes=2)], "should have 2 bytes and its source gave 3"),
    ],
)
def test_contradictions_are_refused(entries, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        write_packed(tmp_path / "w.safetensors", entries)
    assert os.listdir(tmp_path) == []


def test_missing_source_file(tmp_path):
    entry = PackEntry("w", "uint8", (4,), 4, lambda: file_chunks(tmp_path / "gone", 0, 4))
    with pytest.raises(SourceError, match="gone is missing"):
        write_packed(tmp_path / "w.safetensors", [entry])


def test_storage_bytes_covers_the_whole_storage():
    base = torch.arange(10, dtype=torch.int16)
    assert bytes(storage_bytes(base[3:5])) == bytes(base.view(torch.uint8))
    assert b"".join(bytes(c) for c in tensor_chunks(storage_bytes(base.t()[::2]))) == bytes(
        base.view(torch.uint8)
    )

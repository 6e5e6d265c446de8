import dataclasses
import hashlib
import os
import shutil

import pytest

from penstock.runtime.files import artifact_files
from penstock.runtime.files.artifact_files import (
    SAMPLE_BYTES,
    check_open_file,
    file_chunks,
    hash_storage,
    locate,
    sample_offsets,
    stamp_file,
)
from penstock.runtime.files.safetensors_file import open_for_reading, read_header
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Storage
from tests.runtime.files.weight_files import pattern, write_tensor

NBYTES = 3 << 20


def check_stamp(file, folder, *, in_place):
    path = locate(file, folder)
    with open_for_reading(path) as fd:
        check_open_file(fd, path, file, in_place=in_place)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.safetensors"


@pytest.fixture
def file(path):
    return write_tensor(path, pattern(NBYTES))


def overwrite(path, offset, data, *, keep_time=False):
    status = path.stat()
    with path.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    shift = 0 if keep_time else 1_000_000_000
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + shift))


def test_stamp_describes_the_file(path, file):
    content, header = path.read_bytes(), read_header(path)
    samples = b"".join(content[offset : offset + SAMPLE_BYTES] for offset in sample_offsets(header))
    assert file.path == "w.safetensors"
    assert (file.nbytes, file.inode) == (len(content), path.stat().st_ino)
    assert file.header_sha256 == hashlib.sha256(content[: header.data_start]).hexdigest()
    assert file.sampled_sha256 == hashlib.sha256(samples).hexdigest()
    check_stamp(file, path.parent, in_place=True)


def test_samples_cover_ends_and_large_tensors(path, file):
    header = read_header(path)
    offsets = sample_offsets(header)
    assert offsets[0] == 0
    assert file.nbytes - offsets[-1] <= SAMPLE_BYTES
    assert len(set(offsets)) == len(offsets) <= 64 + 256
    assert any(offset <= header.entries["w"].start < offset + SAMPLE_BYTES for offset in offsets)


@pytest.mark.parametrize("brought", [0, SAMPLE_BYTES // 2, OSError(5, "Input/output error")])
def test_samples_that_do_not_come_whole_past_the_cache_come_through_it(path, file, brought, monkeypatch):
    real, asked = os.preadv, []

    def bring_less(fd, buffers, offset):
        asked.append(offset)
        if isinstance(brought, OSError):
            raise brought
        return real(fd, [memoryview(buffers[0])[:brought]], offset)

    monkeypatch.setattr(artifact_files, "open_uncached", lambda path, fd: os.dup(fd))
    monkeypatch.setattr(os, "preadv", bring_less)
    check_stamp(file, path.parent, in_place=True)
    assert asked == list(sample_offsets(read_header(path)))


def test_sampling_is_bounded(path, file):
    # Two thousand tensors of a gigabyte, of which only the header exists.
    header = read_header(path)
    large = {
        str(i): dataclasses.replace(header.entries["w"], start=i << 30, stop=(i + 1) << 30)
        for i in range(2000)
    }
    offsets = sample_offsets(dataclasses.replace(header, entries=large, file_nbytes=2000 << 30))
    assert 256 <= len(offsets) <= 320


@pytest.mark.parametrize("in_place", [True, False])
def test_other_weights_of_the_same_shapes(path, file, in_place):
    other = write_tensor(path, pattern(NBYTES, seed=3))
    assert other.header_sha256 == file.header_sha256
    same_time = dataclasses.replace(file, mtime_ns=other.mtime_ns, inode=other.inode)
    with pytest.raises(SourceError, match="sha256 of its sampled blocks"):
        check_stamp(same_time, path.parent, in_place=in_place)


def test_other_header(path, file):
    write_tensor(path, pattern(NBYTES), name="v")
    with pytest.raises(SourceError, match=r"w.safetensors .* sha256 of its header was .* compile again"):
        check_stamp(file, path.parent, in_place=False)


@pytest.mark.parametrize("nbytes", [0, 100, NBYTES])
def test_truncated(path, file, nbytes):
    os.truncate(path, nbytes)
    with pytest.raises(SourceError, match=f"size in bytes was {file.nbytes} and is {nbytes}"):
        check_stamp(file, path.parent, in_place=False)


def test_copies_count_only_where_files_are_packed(path, file):
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    check_stamp(file, path.parent, in_place=False)
    with pytest.raises(SourceError, match="modification time"):
        check_stamp(file, path.parent, in_place=True)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    with pytest.raises(SourceError, match="inode"):
        check_stamp(file, path.parent, in_place=True)


def test_what_only_full_hashes_catch(path, file):
    header = read_header(path)
    start = header.entries["w"].start
    gap = next(o + SAMPLE_BYTES for o in sample_offsets(header) if o > start)
    assert gap not in sample_offsets(header)
    storage = Storage(NBYTES, "streamable", (Extent(0, start, 0, NBYTES),))
    before = hash_storage(storage, [file], path.parent)
    overwrite(path, gap, b"edited", keep_time=True)
    check_stamp(file, path.parent, in_place=True)
    assert hash_storage(storage, [file], path.parent) != before


def test_hash_storage_goes_extent_after_extent(path, file):
    content = path.read_bytes()
    scattered = Storage(30, "streamable", (Extent(0, 500, 0, 10), Extent(0, 1000, 10, 20)))
    whole = Storage(file.nbytes, "streamable", (Extent(0, 0, 0, file.nbytes),))
    done = []
    found = [hash_storage(one, [file], path.parent, progress=done.append) for one in (scattered, whole)]
    assert found == [
        hashlib.sha256(content[500:510] + content[1000:1020]).hexdigest(),
        hashlib.sha256(content).hexdigest(),
    ]
    assert sum(done) == 30 + file.nbytes


def test_missing(path, file):
    path.unlink()
    with pytest.raises(SourceError, match=r"w.safetensors is missing: .* compile again"):
        list(file_chunks(path, 0, 1))
    with pytest.raises(SourceError, match=r"w.safetensors is missing: name a file that is there"):
        check_stamp(file, path.parent, in_place=False)


@pytest.mark.parametrize("recorded", ["../w.safetensors", "a/../../w.safetensors", "", "w\0"])
def test_paths_stay_inside_the_artifact(path, file, recorded):
    with pytest.raises(SourceError, match="not inside"):
        check_stamp(dataclasses.replace(file, path=recorded), path.parent, in_place=False)


def test_absolute_path(path):
    file = stamp_file(path, recorded_path=str(path)) if path.exists() else write_tensor(path, b"1234")
    check_stamp(dataclasses.replace(file, path=str(path)), path.parent / "elsewhere", in_place=True)

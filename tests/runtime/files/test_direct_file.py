import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.files.direct_file import memory_view
from penstock.runtime.files.source import Source
from penstock.runtime.machine import rates
from penstock.runtime.machine.rates import measure_read
from penstock.schedule.facts.errors import SourceError
from tests.runtime.files.weight_files import GUARD, NBYTES, Memory

edges = st.one_of(
    st.integers(0, NBYTES),
    st.builds(lambda block, shift: max(0, block * 512 + shift), st.integers(0, 80), st.integers(-2, 2)),
)


@given(first=edges, second=edges, shift=st.one_of(st.just(0), st.integers(0, 4096)), congruent=st.booleans())
def test_reads_like_a_slice(source, first, second, shift, congruent):
    content = source.path(0).read_bytes()
    start, stop = sorted(min(edge, len(content)) for edge in (first, second))
    memory = Memory(len(content) + 16384)
    at = 512 + (start % 4096 if congruent else shift)
    source.read_into(0, start, memory.base + at, stop - start)
    assert memory.read(at, at + stop - start) == content[start:stop]
    assert set(memory.read(0, at)) == {GUARD}
    assert set(memory.read(at + stop - start, at + stop - start + 512)) == {GUARD}


@pytest.fixture
def any_file_system():
    """Files open for direct reads even where that is not supported (the reads then are not direct)."""
    real, flag = os.open, os.O_DIRECT

    def without_flag(path, flags, mode=0o777):
        return real(path, flags & ~flag, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", without_flag)
        yield


@pytest.mark.usefixtures("any_file_system")
def test_whole_blocks_are_read_directly(file, monkeypatch):
    memory = Memory(NBYTES)
    real, calls = os.preadv, []

    def record(fd, buffers, offset, flags=0):
        calls.append((fd, offset, sum(map(len, buffers))))
        return real(fd, buffers, offset, flags)

    with Source([file[1]], file[0]) as source:
        assert (source.mode, source.note) == ("direct", "")
        monkeypatch.setattr(os, "preadv", record)
        source.read_into(0, 4000, memory.base + 4000, 9000)
        source.read_into(0, 4000, memory.base + 4001, 9000)
        direct, buffered = source.files[0].direct_fd, source.fd(0)
        block = source.block
    stop = 13000 // block * block
    first, last = 4000 // block * block, -(-13000 // block) * block
    assert calls == [
        (buffered, 4000, 96),
        (direct, 4096, stop - 4096),
        (buffered, stop, 13000 - stop),
        (direct, first, last - first),
    ]


@pytest.mark.usefixtures("any_file_system")
@pytest.mark.parametrize("got", ["less", "error"])
def test_what_a_direct_read_does_not_bring_comes_through_the_cache(file, monkeypatch, got):
    memory = Memory(NBYTES)
    real, fds = os.preadv, []

    def fail_directly(fd, buffers, offset):
        fds.append(fd)
        if fd == direct and got == "error":
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers[:1], offset)

    with Source([file[1]], file[0]) as source:
        direct, buffered = source.files[0].direct_fd, source.fd(0)
        monkeypatch.setattr(os, "preadv", fail_directly)
        source.read_into(0, 4000, memory.base + 4001, 9000)
    assert fds == [direct, buffered]
    assert memory.read(4001, 13001) == (file[0] / "w.safetensors").read_bytes()[4000:13000]


def mask_flag(monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")


def mask_open(monkeypatch):
    real = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def mask_read(monkeypatch):
    def refuse(fd, buffers, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("mask", [mask_flag, mask_open, mask_read])
def test_without_direct_reads(file, mask):
    assert callable(mask)
    memory = Memory(NBYTES)
    with pytest.MonkeyPatch.context() as patch:
        mask(patch)
        source = Source([file[1]], file[0])
    with source:
        assert (source.mode, source.block) == ("buffered", 1)
        assert "lacks O_DIRECT: buffered reads" in source.note
        source.read_into(0, 0, memory.base, NBYTES)
    assert memory.read(0, NBYTES) == (file[0] / "w.safetensors").read_bytes()[:NBYTES]


@pytest.mark.usefixtures("any_file_system")
def test_needs_larger_blocks(file):
    real = os.preadv

    def refuse_small(fd, buffers, offset):
        if len(buffers[0]) < 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", refuse_small)
        source = Source([file[1]], file[0])
    with source:
        assert (source.mode, source.block) == ("direct", 4096)


def test_buffered_when_asked(file):
    with Source([file[1]], file[0], mode="buffered") as source:
        assert (source.mode, source.note, source.block) == ("buffered", "", 1)


def test_short_and_interrupted_reads_go_on(source, file):
    memory, real = Memory(NBYTES), os.preadv

    def short(fd, buffers, offset):
        return real(fd, [buffers[0][: max(512, len(buffers[0]) // 2 // 512 * 512)]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        source.read_into(0, 0, memory.base, NBYTES)
    assert memory.read(0, NBYTES) == (file[0] / "w.safetensors").read_bytes()[:NBYTES]


def test_io_error_in_the_middle(source):
    memory, real = Memory(NBYTES), os.preadv

    def fail(fd, buffers, offset):
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, [buffers[0][:1024]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(SourceError, match=r"bytes 1024 to .* of .*w.safetensors failed \(Input/output"):
            source.read_into(0, 0, memory.base, 8192)
    source.read_into(0, 0, memory.base, 8192)


def test_memory_view_writes_raw_memory():
    memory = Memory(16)
    memory_view(memory.base + 4, 3)[:] = b"abc"
    assert memory.read(3, 8) == bytes([GUARD]) + b"abc" + bytes([GUARD])


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_measure_read(file, mode, monkeypatch):
    monkeypatch.setattr(rates, "_BLOCK", 4096)
    with Source([file[1], file[1]], file[0], mode="direct" if mode == "direct" else "buffered") as source:
        places = []
        read = source.read_into

        def record(file, offset, address, nbytes):
            places.append((file, offset, nbytes))
            read(file, offset, address, nbytes)

        monkeypatch.setattr(source, "read_into", record)
        assert measure_read(source, nbytes=32768).median > 0
        assert len(set(places)) == len(places) == 8
        assert {number for number, _, _ in places} == {0, 1}
        places.clear()
        assert measure_read(source, seconds=0, threads=2).median > 0
        assert 1 <= len(places) <= 2
    with Source([], file[0]) as empty, pytest.raises(SourceError, match="no weight file"):
        measure_read(empty)

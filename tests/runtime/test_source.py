from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import pattern, write_tensor

from penstock.runtime import page_cache
from penstock.runtime.direct_file import memory_view
from penstock.runtime.page_cache import cached_fraction
from penstock.runtime.source import Source, measure_read
from penstock.schedule.errors import SourceError
from penstock.schedule.model import Extent, Storage, WeightFile

NBYTES = 40_000
GUARD = 0xA5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightFile]:
    folder = tmp_path_factory.mktemp("source")
    return folder, write_tensor(folder / "w.safetensors", pattern(NBYTES))


@pytest.fixture
def own_file(tmp_path: Path) -> tuple[Path, WeightFile]:
    return tmp_path, write_tensor(tmp_path / "w.safetensors", pattern(NBYTES))


@pytest.fixture(scope="module", params=["direct", "buffered"])
def source(request: pytest.FixtureRequest, file: tuple[Path, WeightFile]) -> Iterator[Source]:
    with Source([file[1]], file[0], mode=request.param) as opened:
        yield opened


class Memory:
    """Guarded memory whose base lies at a multiple of 4096."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(nbytes + 4096)
        self.base = ctypes.addressof(self._buffer) + -ctypes.addressof(self._buffer) % 4096
        ctypes.memset(self._buffer, GUARD, nbytes + 4096)

    def read(self, start: int, stop: int) -> bytes:
        return ctypes.string_at(self.base + start, stop - start)


edges = st.one_of(
    st.integers(0, NBYTES),
    st.builds(lambda block, shift: max(0, block * 512 + shift), st.integers(0, 80), st.integers(-2, 2)),
)


@given(first=edges, second=edges, shift=st.one_of(st.just(0), st.integers(0, 4096)), congruent=st.booleans())
def test_reads_like_a_slice(source: Source, first: int, second: int, shift: int, congruent: bool) -> None:
    content = source.path(0).read_bytes()
    start, stop = sorted(min(edge, len(content)) for edge in (first, second))
    memory = Memory(len(content) + 16384)
    at = 512 + (start % 4096 if congruent else shift)
    source.read_into(0, start, memory.base + at, stop - start)
    assert memory.read(at, at + stop - start) == content[start:stop]
    assert set(memory.read(0, at)) == {GUARD}
    assert set(memory.read(at + stop - start, at + stop - start + 512)) == {GUARD}


@pytest.fixture
def any_file_system() -> Iterator[None]:
    """Files open for direct reads even where that is not supported (the reads then are not direct)."""
    real, flag = os.open, os.O_DIRECT

    def without_flag(path: str, flags: int, mode: int = 0o777) -> int:
        return real(path, flags & ~flag, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", without_flag)
        yield


@pytest.mark.usefixtures("any_file_system")
def test_whole_blocks_are_read_directly(
    file: tuple[Path, WeightFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(NBYTES)
    real, calls = os.preadv, []

    def record(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        calls.append((fd, offset, len(buffers[0])))
        return real(fd, buffers, offset, flags)

    with Source([file[1]], file[0]) as source:
        assert (source.mode, source.note) == ("direct", "")
        monkeypatch.setattr(os, "preadv", record)
        source.read_into(0, 4000, memory.base + 4000, 9000)
        source.read_into(0, 4000, memory.base + 4001, 9000)
        direct, buffered = source.files[0].direct_fd, source.fd(0)
        block = source.block
    stop = 13000 // block * block
    assert calls == [
        (buffered, 4000, 96),
        (direct, 4096, stop - 4096),
        (buffered, stop, 13000 - stop),
        (buffered, 4000, 9000),
    ]


def mask_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")


def mask_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def mask_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("mask", [mask_flag, mask_open, mask_read])
def test_without_direct_reads(file: tuple[Path, WeightFile], mask: object) -> None:
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
def test_needs_larger_blocks(file: tuple[Path, WeightFile]) -> None:
    real = os.preadv

    def refuse_small(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) < 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", refuse_small)
        source = Source([file[1]], file[0])
    with source:
        assert (source.mode, source.block) == ("direct", 4096)


def test_buffered_when_asked(file: tuple[Path, WeightFile]) -> None:
    with Source([file[1]], file[0], mode="buffered") as source:
        assert (source.mode, source.note, source.block) == ("buffered", "", 1)


def test_short_and_interrupted_reads_go_on(source: Source, file: tuple[Path, WeightFile]) -> None:
    memory, real = Memory(NBYTES), os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][: max(512, len(buffers[0]) // 2 // 512 * 512)]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        source.read_into(0, 0, memory.base, NBYTES)
    assert memory.read(0, NBYTES) == (file[0] / "w.safetensors").read_bytes()[:NBYTES]


def test_io_error_in_the_middle(source: Source) -> None:
    memory, real = Memory(NBYTES), os.preadv

    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, [buffers[0][:1024]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(SourceError, match=r"bytes 1024 to .* of .*w.safetensors failed \(Input/output"):
            source.read_into(0, 0, memory.base, 8192)
    source.read_into(0, 0, memory.base, 8192)


@pytest.mark.parametrize("nbytes", [0, 4096, 10_000, 20_480])
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_truncated_while_open(own_file: tuple[Path, WeightFile], nbytes: int, mode: str) -> None:
    folder, file = own_file
    memory = Memory(file.nbytes)
    with Source([file], folder, mode="direct" if mode == "direct" else "buffered") as source:
        source.check_size(0)
        os.truncate(folder / file.path, nbytes)
        message = f"truncated while in use: expected {file.nbytes} bytes, got {nbytes}"
        with pytest.raises(SourceError, match=message):
            source.read_into(0, 0, memory.base, file.nbytes)
        with pytest.raises(SourceError, match=message):
            source.check_size(0)


def test_refuses_ranges_outside_the_file(source: Source, file: tuple[Path, WeightFile]) -> None:
    memory = Memory(16)
    for offset, nbytes in ((file[1].nbytes - 8, 9), (-1, 4), (file[1].nbytes + 1, 0)):
        with pytest.raises(SourceError, match="does not belong to this file"):
            source.read_into(0, offset, memory.base, nbytes)


def test_stamps_are_checked(own_file: tuple[Path, WeightFile]) -> None:
    folder, file = own_file
    write_tensor(folder / file.path, pattern(NBYTES, seed=5))
    with pytest.raises(SourceError, match="sampled blocks"):
        Source([file], folder)
    with Source([file], folder, check=False) as source:
        assert source.path(0) == folder / file.path
    in_place = dataclasses.replace(file, path=str(folder / file.path))
    with pytest.raises(SourceError, match="modification time"):
        Source([in_place], folder / "elsewhere")


def test_unreadable(own_file: tuple[Path, WeightFile], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match=r"cannot be opened \(Permission denied\)"):
        Source([own_file[1]], own_file[0])


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_descriptors_are_closed(own_file: tuple[Path, WeightFile]) -> None:
    folder, file = own_file
    before = descriptors()
    with Source([file, file], folder) as source:
        assert len(descriptors()) > len(before)
    source.close()
    assert descriptors() == before
    for call in (lambda: source.read_into(0, 0, 0, 0), lambda: source.fd(0), lambda: source.check_size(0)):
        with pytest.raises(SourceError, match="closed"):
            call()
    missing = dataclasses.replace(file, path="gone.safetensors")
    with pytest.raises(SourceError, match="missing"):
        Source([file, missing], folder)
    assert descriptors() == before


def test_close_waits_for_reads(own_file: tuple[Path, WeightFile], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = own_file
    memory, real = Memory(NBYTES), os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(10)
        return real(fd, buffers, offset)

    source = Source([file], folder)
    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=source.read_into, args=(0, 0, memory.base, NBYTES))
    reader.start()
    assert reading.wait(10)
    closer = threading.Thread(target=source.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    reader.join(10)
    closer.join(10)
    assert not closer.is_alive()
    assert memory.read(0, NBYTES) == (folder / file.path).read_bytes()[:NBYTES]


def test_a_forked_child_may_close(own_file: tuple[Path, WeightFile], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source([own_file[1]], own_file[0])
    with source._in_flight():
        # What a child sees whose parent was reading: another process, and a read without end.
        monkeypatch.setattr(os, "getpid", lambda: -1)
        source.close()
    assert source.files == ()


def test_read_storage(own_file: tuple[Path, WeightFile]) -> None:
    folder, file = own_file
    other = write_tensor(folder / "other.safetensors", pattern(NBYTES, seed=9))
    storage = Storage(3000, "streamable", (Extent(1, 700, 0, 1000), Extent(0, 5000, 1500, 1500)))
    memory = Memory(4096)
    with Source([file, other], folder) as source:
        source.read_storage(storage, memory.base)
    assert memory.read(0, 1000) == (folder / other.path).read_bytes()[700:1700]
    assert set(memory.read(1000, 1500)) == {GUARD}
    assert memory.read(1500, 3000) == (folder / file.path).read_bytes()[5000:6500]


def test_memory_view_writes_raw_memory() -> None:
    memory = Memory(16)
    memory_view(memory.base + 4, 3)[:] = b"abc"
    assert memory.read(3, 8) == bytes([GUARD]) + b"abc" + bytes([GUARD])


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_measure_read(file: tuple[Path, WeightFile], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Source([file[1], file[1]], file[0], mode="direct" if mode == "direct" else "buffered") as source:
        places: list[tuple[int, int, int]] = []
        read = source.read_into

        def record(file: int, offset: int, address: int, nbytes: int) -> None:
            places.append((file, offset, nbytes))
            read(file, offset, address, nbytes)

        monkeypatch.setattr(source, "read_into", record)
        assert measure_read(source, nbytes=32768, block=4096) > 0
        assert len(set(places)) == len(places) == 8
        assert {number for number, _, _ in places} == {0, 1}
        places.clear()
        assert measure_read(source, block=4096, seconds=0, threads=2) > 0
        assert 1 <= len(places) <= 2
    with Source([], file[0]) as empty, pytest.raises(SourceError, match="no weight file"):
        measure_read(empty)


def test_cached_fraction(own_file: tuple[Path, WeightFile], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = own_file
    with Source([file], folder) as source:
        (folder / file.path).read_bytes()
        assert source.cached_fraction() == 1
        monkeypatch.setattr(page_cache, "_may_ask_mincore", lambda fd: False)
        assert source.cached_fraction() == 1
        monkeypatch.undo()
        os.fsync(source.fd(0))
        os.posix_fadvise(source.fd(0), 0, 0, os.POSIX_FADV_DONTNEED)
        assert source.cached_fraction() == 0
        assert cached_fraction(source.fd(0), 0) == 0

import dataclasses
import errno
import os
import threading
from datetime import datetime

import pytest

from penstock.runtime.files.direct_file import open_scratch
from penstock.runtime.files.source import Source
from penstock.runtime.system import memory as page_cache
from penstock.runtime.system.memory import cached_fraction
from penstock.schedule.facts.errors import SourceError
from tests.runtime.files.weight_files import NBYTES, Memory, pattern, write_tensor
from tests.soak.endurance import Interrupt


@pytest.fixture
def own_file(tmp_path):
    return tmp_path, write_tensor(tmp_path / "w.safetensors", pattern(NBYTES))


@pytest.mark.parametrize("nbytes", [0, 4096, 10_000, 20_480])
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_truncated_while_open(own_file, nbytes, mode):
    folder, file = own_file
    memory = Memory(file.nbytes)
    with Source([file], folder, mode="direct" if mode == "direct" else "buffered") as source:
        source.check_unchanged(0)
        os.truncate(folder / file.path, nbytes)
        message = f"truncated while in use: expected {file.nbytes} bytes, got {nbytes}"
        with pytest.raises(SourceError, match=message):
            source.read_into(0, 0, memory.base, file.nbytes)
        with pytest.raises(SourceError, match=message):
            source.check_unchanged(0)


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_written_in_place_while_open(own_file, mode):
    folder, file = own_file
    memory = Memory(file.nbytes)
    with Source([file], folder, mode="direct" if mode == "direct" else "buffered") as source:
        before = (folder / file.path).stat()
        with (folder / file.path).open("r+b") as opened:
            opened.seek(NBYTES // 2)
            opened.write(b"others")
        # Clocks of file systems are coarse: the write may come within the tick in which it was made.
        os.utime(folder / file.path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        seconds, rest = divmod(before.st_mtime_ns, 10**9)
        written = f"{datetime.fromtimestamp(seconds)}.{rest:09d}"
        again = "open the artifact again, or load the model again"
        message = f"changed while in use: expected {file.nbytes} bytes of {written}, got .* and {again}"
        with pytest.raises(SourceError, match=message):
            source.read_into(0, 0, memory.base, 100)
        with pytest.raises(SourceError, match=message):
            source.check_unchanged(0)
        with pytest.raises(SourceError, match=message):
            source.check_all_unchanged()
        os.utime(folder / file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with (folder / file.path).open("ab") as opened:
            opened.write(b"more")
        os.utime(folder / file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(SourceError, match=f"changed while in use: .* got {file.nbytes + 4} of"):
            source.read_into(0, 0, memory.base, 100)


def test_written_in_the_middle_of_a_read(own_file, monkeypatch):
    folder, file = own_file
    memory = Memory(NBYTES)
    real = os.preadv

    def write_after(fd, buffers, offset):
        got = real(fd, buffers, offset)
        os.utime(folder / file.path, ns=(0, 0))
        return got

    with Source([file], folder) as source:
        monkeypatch.setattr(os, "preadv", write_after)
        with pytest.raises(SourceError, match="changed while in use"):
            source.read_into(0, 0, memory.base, NBYTES)


def test_truncation_that_shows_as_an_invalid_read(own_file, monkeypatch):
    # Some file systems refuse a direct read that begins at an end within a block.
    folder, file = own_file
    memory = Memory(NBYTES)

    def refuse(fd, buffers, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    with Source([file], folder) as source:
        os.truncate(folder / file.path, 1000)
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(SourceError, match="truncated while in use"):
            source.read_into(0, 0, memory.base, NBYTES)


def test_refuses_ranges_outside_the_file(source, file):
    memory = Memory(16)
    for offset, nbytes in ((file[1].nbytes - 8, 9), (-1, 4), (file[1].nbytes + 1, 0)):
        with pytest.raises(SourceError, match="does not belong to this file"):
            source.read_into(0, offset, memory.base, nbytes)


def test_stamps_are_checked(own_file):
    folder, file = own_file
    write_tensor(folder / file.path, pattern(NBYTES, seed=5))
    with pytest.raises(SourceError, match="sampled blocks"):
        Source([file], folder)
    with Source([file], folder, check=False) as source:
        assert source.path(0) == folder / file.path
    in_place = dataclasses.replace(file, path=str(folder / file.path))
    with pytest.raises(SourceError, match="modification time"):
        Source([in_place], folder / "elsewhere")


def test_unreadable(own_file, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match=r"cannot be opened \(Permission denied\)"):
        Source([own_file[1]], own_file[0])


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_descriptors_are_closed(own_file):
    folder, file = own_file
    before = descriptors()
    with Source([file, file], folder) as source:
        assert len(descriptors()) > len(before)
    source.close()
    assert descriptors() == before
    for call in (
        lambda: source.read_into(0, 0, 0, 0),
        lambda: source.fd(0),
        lambda: source.check_unchanged(0),
    ):
        with pytest.raises(SourceError, match="closed"):
            call()
    missing = dataclasses.replace(file, path="gone.safetensors")
    with pytest.raises(SourceError, match="missing"):
        Source([file, missing], folder)
    assert descriptors() == before


def test_an_interrupt_of_a_close_leaves_nothing_that_another_does_not_close(own_file):
    folder, file = own_file
    before, happened = descriptors(), []
    for line in range(1, 80):
        source = Source([file, file], folder)
        source.spill = open_scratch(folder, 4096)
        with (one := Interrupt(line)).coming():
            source.close()
        happened.append(one.happened)
        source.close()
        assert descriptors() == before
    assert sum(happened) > 10
    assert not happened[-1]


def test_close_waits_for_reads(own_file, monkeypatch):
    folder, file = own_file
    memory, real = Memory(NBYTES), os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def slow(fd, buffers, offset):
        reading.set()
        assert go_on.wait(60)
        return real(fd, buffers, offset)

    source = Source([file], folder)
    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=source.read_into, args=(0, 0, memory.base, NBYTES))
    reader.start()
    assert reading.wait(60)
    closer = threading.Thread(target=source.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    reader.join(60)
    closer.join(60)
    assert not closer.is_alive()
    assert memory.read(0, NBYTES) == (folder / file.path).read_bytes()[:NBYTES]


def test_a_forked_child_may_close(own_file, monkeypatch):
    source = Source([own_file[1]], own_file[0])
    with source._in_flight():
        # What a child sees whose parent was reading: another process, and a read without end.
        monkeypatch.setattr(os, "getpid", lambda: -1)
        source.close()
    assert source.files == ()


def test_cached_fraction(own_file, monkeypatch):
    folder, file = own_file
    with Source([file], folder) as source:
        (folder / file.path).read_bytes()
        assert source.cached_fraction() == 1
        monkeypatch.setattr(page_cache, "may_ask_mincore", lambda fd: False)
        assert source.cached_fraction() == 1
        monkeypatch.undo()
        os.fsync(source.fd(0))
        os.posix_fadvise(source.fd(0), 0, 0, os.POSIX_FADV_DONTNEED)
        assert source.cached_fraction() == 0
        assert cached_fraction(source.fd(0), 0) == 0

"""What is read again and again is kept by the page cache, if that has room for it."""

import errno
import os

from penstock.runtime.files import source as sources
from penstock.runtime.files.source import Source
from tests.runtime.files.weight_files import NBYTES, Memory


class Watched:
    """A source open for direct reads on any file system, and which way it reads a pass."""

    def __init__(self, file, monkeypatch, repeated=None):
        self.room = 1 << 30
        self.cached = 0.0
        real_open, real_read, flag = os.open, os.preadv, os.O_DIRECT
        monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: real_open(path, flags & ~flag, mode))
        monkeypatch.setattr(sources, "available_bytes", lambda: self.room)
        monkeypatch.setattr(Source, "_cached_fraction", lambda source: self.cached)
        self.source = Source([file[1]], file[0], repeated=file[1].nbytes if repeated is None else repeated)
        self.fds = []

        def record(fd, buffers, offset):
            self.fds.append(fd)
            return real_read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", record)

    def read(self):
        nbytes = self.source.nbytes
        memory = Memory(nbytes + 64)
        self.fds.clear()
        for at in range(0, nbytes, 1 << 14):
            self.source.read_into(0, at, memory.base + at + 8, min(1 << 14, nbytes - at))
        assert memory.read(8, nbytes + 8) == self.source.path(0).read_bytes()
        return {self.source.files[0].direct_fd: "past", self.source.fd(0): "through"}[self.fds[1]]


def test_the_second_pass_goes_through_a_cache_with_room(file, monkeypatch):
    watched = Watched(file, monkeypatch)
    with watched.source:
        assert [watched.read() for _ in range(2)] == ["past", "through"]
        watched.cached = 1.0
        assert [watched.read() for _ in range(3)] == ["through"] * 3


def test_a_cache_without_room_is_left_alone(file, monkeypatch):
    watched = Watched(file, monkeypatch)
    watched.room = NBYTES // 2
    with watched.source:
        assert [watched.read() for _ in range(3)] == ["past"] * 3
        watched.cached = 0.75  # somebody else reads the files: the rest has room
        assert [watched.read() for _ in range(2)] == ["past", "through"]


def test_a_cache_that_loses_what_it_was_given_is_given_up(file, monkeypatch):
    watched = Watched(file, monkeypatch)
    watched.cached = 0.9
    with watched.source:
        assert [watched.read() for _ in range(6)] == ["past", "through", "through", "past", "past", "past"]


def test_a_source_that_is_not_to_keep_stays_past_the_cache(file, monkeypatch):
    watched = Watched(file, monkeypatch, 0)
    with watched.source:
        assert [watched.read() for _ in range(4)] == ["past"] * 4


def test_a_system_that_takes_no_advice_reads_all_the_same(file, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    watched = Watched(file, monkeypatch)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with watched.source:
        assert [watched.read() for _ in range(2)] == ["past", "through"]

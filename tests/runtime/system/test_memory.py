"""Virtual memory: what the kernel really maps, checked with its own page tables."""

import ctypes
import errno
import mmap
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.runtime.system import memory
from penstock.runtime.system.memory import (
    HUGE_PAGE,
    MADV_POPULATE_READ,
    PAGE,
    Reservation,
    advise,
    hint,
    may_ask_mincore,
    open_uncached,
    supports_populate,
)
from penstock.schedule.facts.errors import StreamError
from tests.runtime.system.page_tables import mapped_pages


def maps_between(start, stop):
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [(line, *(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return [line for line, low, high in ranges if low < stop and high > start]


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_a_reservation_is_aligned_guarded_and_gone_after_close(nbytes):
    reserved = Reservation(nbytes)
    start, stop = reserved.address - PAGE, reserved.address + reserved.nbytes + PAGE
    assert reserved.address % HUGE_PAGE == 0
    assert reserved.nbytes - PAGE < nbytes <= reserved.nbytes
    reserved.map_anonymous(0, reserved.nbytes)
    inside = [line.split()[1] for line in maps_between(reserved.address, stop - PAGE)]
    assert inside == ["rw-p"]
    assert maps_between(start, start + PAGE)[0].split()[1] == "---p"
    assert maps_between(stop - PAGE, stop)[0].split()[1] == "---p"
    reserved.close()
    reserved.close()
    assert not maps_between(start, stop)


def test_what_alignment_left_over_is_given_back():
    def address_space():
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    before = address_space()
    for _ in range(50):
        Reservation(PAGE).close()
    assert address_space() - before < 10 * HUGE_PAGE


def test_only_touched_pages_are_resident():
    with Reservation(HUGE_PAGE) as reserved:
        reserved.map_anonymous(0, reserved.nbytes)
        hint(reserved.address, reserved.nbytes, memory.MADV_NOHUGEPAGE)
        assert reserved.resident_bytes() == 0
        ctypes.memset(reserved.address + 5 * PAGE, 1, 2 * PAGE)
        assert reserved.resident_bytes() == 2 * PAGE
        found = mapped_pages(reserved.address, reserved.nbytes)
        assert [i for i, there in enumerate(found) if there] == [5, 6]
        advise(reserved.address + 5 * PAGE, PAGE, mmap.MADV_DONTNEED)
        assert reserved.resident_bytes() == PAGE


def test_a_page_in_the_page_cache_alone_is_not_resident(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * PAGE))
    with Reservation(4 * PAGE) as reserved, path.open("rb") as file:
        reserved.map_file(0, 3 * PAGE, file.fileno(), PAGE)
        assert reserved.resident_bytes() == 0
        advise(reserved.address, 3 * PAGE, MADV_POPULATE_READ)
        assert reserved.resident_bytes() == 3 * PAGE
        assert ctypes.string_at(reserved.address, 3 * PAGE) == path.read_bytes()[PAGE:]


def test_what_the_page_cache_holds_is_unknown_where_the_system_says_nothing(tmp_path, monkeypatch):
    def refuse(fd):
        raise OSError(5, "Input/output error")

    (path := tmp_path / "file").write_bytes(bytes(PAGE))
    with path.open("rb") as file, monkeypatch.context() as patch:
        fd, opened = file.fileno(), len(os.listdir("/proc/self/fd"))
        patch.setattr(os, "fstat", refuse)
        assert not may_ask_mincore(fd)
        assert open_uncached(path, fd) == -1
        assert len(os.listdir("/proc/self/fd")) == opened


def test_populating_past_the_end_of_a_file_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    with Reservation(2 * PAGE) as reserved, path.open("rb") as file:
        reserved.map_file(0, 2 * PAGE, file.fileno(), 0)
        with pytest.raises(OSError, match="Bad address") as caught:
            advise(reserved.address, 2 * PAGE, MADV_POPULATE_READ)
        assert caught.value.errno == errno.EFAULT


def test_an_unknown_hint_is_not_an_error():
    with Reservation(PAGE) as reserved:
        hint(reserved.address, PAGE, 9999)
        with pytest.raises(OSError, match="Invalid argument"):
            advise(reserved.address, PAGE, 9999)


def test_address_space_that_is_not_there_names_bytes_and_remedy():
    with pytest.raises(
        StreamError, match=rf"refused {(1 << 60) + HUGE_PAGE + 2 * PAGE} bytes.*lower the budget"
    ):
        Reservation(1 << 60)


def test_populate_is_found_by_asking_the_kernel():
    def old_kernel(address, nbytes, advice):
        assert (nbytes, advice) == (PAGE, MADV_POPULATE_READ)
        raise OSError(errno.EINVAL, "Invalid argument")

    assert supports_populate()
    assert not supports_populate(old_kernel)


def test_a_system_without_proc_says_so(monkeypatch):
    def missing(path, mode):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with Reservation(PAGE) as reserved:
        monkeypatch.setattr("builtins.open", missing)
        with pytest.raises(StreamError, match="/proc/self/smaps cannot be read"):
            reserved.resident_bytes()
        monkeypatch.undo()


def test_what_lies_behind_is_not_counted(monkeypatch):
    """The system counts a mapping when it is read, which takes milliseconds for all of a process."""
    read = []

    def smaps(name):
        for start in range(0x1000, 0x9000, 0x1000):
            read.append(start)
            yield f"{start:x}-{start + 0x1000:x} rw-p 00000000 00:00 0\n".encode()
            yield b"Size:    4 kB\n"
            yield b"Rss:     4 kB\n"

    monkeypatch.setattr(memory, "_proc", lambda name: nullcontext(smaps(name)))
    assert memory.resident_bytes(0x2800, 0x4000) == 2 * 4096
    assert read == [0x1000, 0x2000, 0x3000, 0x4000]


def test_an_interrupted_close_never_unmaps_twice(monkeypatch):
    """The second time, the addresses may be somebody else's."""
    calls = []

    class Interrupting:
        def munmap(self, address, _):
            calls.append(address)
            raise KeyboardInterrupt

    reservation = Reservation(PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_LIBC", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            reservation.close()
        reservation.close()
    assert len(calls) == 1

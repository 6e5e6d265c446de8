"""Which passes read through the page cache: both engines decide alike."""

import os

import pytest

from penstock.runtime.files import source as sources
from penstock.runtime.system.memory import cached_fraction
from tests.engines import ENGINES
from tests.runtime.stream.cases import one_case

PASSES = 6


def cool(case):
    assert case.folder
    for file in case.files:
        fd = os.open(case.folder / file.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fraction(case):
    """The share of the first file that the page cache holds."""
    assert case.folder
    fd = os.open(case.folder / case.files[0].path, os.O_RDONLY)
    try:
        return cached_fraction(fd, case.files[0].nbytes)
    finally:
        os.close(fd)


def ways(case, engine, room, *, loses):
    """How each pass read; where the cache `loses`, it has nothing of a pass when the next begins."""
    found = []
    with case.streamer(engine, room=room, readers=1) as streamer:
        for _ in range(PASSES):
            if loses or not any(way == "through" for way in found):
                cool(case)
            most = 0.0
            streamer.begin(0)
            for k in streamer.probed(0):
                streamer.acquire(0, k)
                most = max(most, fraction(case))
                streamer.release(0, k)
            streamer.end(0)
            found.append("through" if most > 0.3 else "past")
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "cache",
    [
        (1 << 30, False, ["past", *["through"] * 5]),
        (1 << 30, True, ["past", "through", "through", "through", "past", "past"]),
        (1000, False, ["past"] * 6),
    ],
    ids=["keeps", "loses", "small"],
)
def test_what_every_pass_reads_is_kept_by_a_cache_that_has_room_and_keeps_it(
    engine, cache, tmp_path, monkeypatch
):
    room, loses, expected = cache
    monkeypatch.setattr(sources, "available_bytes", lambda: room)
    case = one_case("contiguous", wrap="barrier", folder=tmp_path)
    assert ways(case, engine, room, loses=loses) == expected

"""The adaptive arena: mapped what the page cache keeps, read past it what the cache does not."""

import ctypes
import itertools
import mmap
import os
import random
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.system.memory import HUGE_PAGE, PAGE, is_cached
from penstock.schedule.facts.model import Range
from tests.runtime.arena.arena_weights import LARGE, SMALL, Weights, content
from tests.runtime.arena.native_arena import address_of

GRANULES = 3
SMALL_BASE = 6 * HUGE_PAGE

PATIENCE, TRIES = 32, 8
"""Reads past the cache before a granule is cached again, and how often one is taken out that stays there."""


def plan_for(weights):
    return replace(weights.plan("mapped"), arena_bytes=GRANULES * HUGE_PAGE)


@pytest.fixture
def weights(tmp_path):
    made = Weights(tmp_path, "native")
    yield made
    made.source.close()


@pytest.fixture
def arena(weights):
    yield from opened(weights)


@pytest.fixture
def crowded(weights):
    """An arena on a machine whose memory cannot cache the files."""
    yield from opened(weights, LARGE)


@pytest.fixture(params=[1 << 40])
def paged_cache(weights, request):
    """An arena on a machine with so much memory, whose page cache seems to hold everything page by page."""
    yield from opened(weights, request.param, small=10**18)


def opened(weights, room=1 << 40, small=0):
    """An arena on a machine with so much memory, and maps below `small` bytes a second taken for slow."""
    cool(weights)
    arena = weights.open_plan(plan_for(weights), room=room, small=small)
    yield arena
    arena.close()


def cool(weights):
    """Take the files out of the page cache, which keeps what is dirty or mapped."""
    for file in weights.source.files:
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def warm(weights):
    for path in weights.paths:
        path.read_bytes()


def bytes_at(arena, start, nbytes):
    return ctypes.string_at(address_of(arena) + start, nbytes)


def cached(weights, granule):
    """Whether the page cache holds a granule of the large file, by its first page."""
    return is_cached(weights.source.fd(0), granule * HUGE_PAGE, PAGE)


def is_private(arena, granule):
    """Whether no file is mapped where a granule lies."""
    address = address_of(arena) + granule * HUGE_PAGE
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[4] == "0"
    raise AssertionError("nothing is mapped there")


def is_right(arena, weights, granule):
    """Whether a granule holds every byte that belongs to a storage."""
    start, stop = granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE
    for place, storage in zip(weights.layout[:3], weights.storages[:3], strict=True):
        low, high = max(start, place), min(stop, place + storage.nbytes)
        if low < high and bytes_at(arena, low, high - low) != weights.content[0][low:high]:
            return False
    return True


def faults():
    """How often the system had to give this thread memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_cold_granule_is_brought_into_the_cache_once_and_then_read_past_it(arena, weights):
    """After PATIENCE reads it gets another chance, and after twice as many the next one."""
    caches = []
    for _ in range(3 * PATIENCE + 3):
        cool(weights)
        assert arena.fill(3 * HUGE_PAGE, 4 * HUGE_PAGE) == HUGE_PAGE
        assert is_right(arena, weights, 3)
        caches.append(cached(weights, 3))
        arena.drop(3 * HUGE_PAGE, 4 * HUGE_PAGE)
    assert [turn for turn, cached in enumerate(caches) if cached] == [0, PATIENCE + 1, 3 * PATIENCE + 2]


def test_a_cache_without_room_for_the_files_is_left_alone(crowded, weights):
    for granule in (2, 3, 4):  # whole blocks, of which none is read through the cache
        crowded.fill(granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE)
        assert is_right(crowded, weights, granule)
        assert not cached(weights, granule)
    assert crowded.held_bytes == crowded.mapped_bytes() == GRANULES * HUGE_PAGE


def test_what_is_cached_is_mapped_without_waiting_and_what_is_not_is_left(crowded, weights):
    assert crowded.fill_ready(0, 2 * HUGE_PAGE) is None
    assert crowded.held_bytes == 0
    warm(weights)
    assert crowded.fill_ready(0, 2 * HUGE_PAGE) == 2 * HUGE_PAGE
    assert is_right(crowded, weights, 0)
    assert is_right(crowded, weights, 1)


def test_granules_change_between_private_and_mapped(crowded, weights):
    """After each step the page tables have the granules that are held, and the spare ones: no more, no fewer.

    Granules are filled (+) and dropped (-) in orders in which spare ones leave their places for slots, return
    from there, and are given back there, more often than there are slots.
    """
    held = {}
    spare = 0
    for mapped in ("+0-0+1-1", "+0+1+2-0-1-2") * 2:
        for state, steps in ((cool, "+0+1+2-0-1-2"), (warm, mapped)):
            state(weights)
            for what, granule in zip(steps[::2], map(int, steps[1::2]), strict=True):
                ends = granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE
                if what == "-":
                    crowded.drop(*ends)
                    spare += held.pop(granule)
                else:
                    held[granule] = state is cool
                    crowded.fill(*ends)
                    assert is_private(crowded, granule) == held[granule]
                    assert is_right(crowded, weights, granule)
                    spare = max(0, spare - 1) if held[granule] else min(spare, GRANULES - len(held))
                assert crowded.held_bytes == len(held) * HUGE_PAGE
                assert crowded.mapped_bytes() == (len(held) + spare) * HUGE_PAGE


def test_a_private_granule_that_is_filled_again_stays_private(crowded, weights):
    """Also where the cache holds it by now. Its memory is spare once dropped, and serves the next one."""
    for _ in range(2 * GRANULES):
        cool(weights)
        crowded.fill(2 * HUGE_PAGE, 3 * HUGE_PAGE)
        warm(weights)
        crowded.fill(2 * HUGE_PAGE, 3 * HUGE_PAGE)
        assert is_private(crowded, 2)
        assert is_right(crowded, weights, 2)
        crowded.drop(2 * HUGE_PAGE, 3 * HUGE_PAGE)
        cool(weights)
        crowded.fill(3 * HUGE_PAGE, 4 * HUGE_PAGE)
        assert is_private(crowded, 3)
        assert is_right(crowded, weights, 3)
        crowded.drop(3 * HUGE_PAGE, 4 * HUGE_PAGE)


def test_memory_of_what_was_dropped_is_filled_again_though_everything_is_held(crowded, weights):
    """Fresh memory would be cleared by the system, in a fault or in 512, and direct reads wait for it."""
    turns = list(itertools.islice(itertools.cycle((1, 2, 3, 4)), 60))
    for granule in turns[:GRANULES]:
        crowded.fill(granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE)
    before = faults()
    for old, new in zip(turns, turns[GRANULES:], strict=False):
        crowded.drop(old * HUGE_PAGE, (old + 1) * HUGE_PAGE)
        crowded.fill(new * HUGE_PAGE, (new + 1) * HUGE_PAGE)
        assert is_private(crowded, new)
        assert crowded.mapped_bytes() == GRANULES * HUGE_PAGE
    assert faults() < before + 40
    assert all(is_right(crowded, weights, granule) for granule in turns[-GRANULES:])


def test_granules_that_a_segment_cuts_are_mapped(crowded, weights):
    cool(weights)
    crowded.fill(5 * HUGE_PAGE, LARGE)
    crowded.fill(SMALL_BASE, SMALL_BASE + SMALL)
    assert content(crowded, weights, 3) == weights.bytes_of(3)
    assert not is_private(crowded, 5)
    assert not is_private(crowded, 6)


def test_whole_granules_of_every_file_go_past_a_cache_without_room(weights):
    weights.segments = (Range(0, SMALL), Range(HUGE_PAGE, HUGE_PAGE + LARGE))
    weights.layout = (*(HUGE_PAGE + place for place in weights.layout[:3]), weights.layout[3] - SMALL_BASE)
    for arena in opened(weights, LARGE):
        arena.fill(3 * HUGE_PAGE, 4 * HUGE_PAGE)
        assert is_private(arena, 3)
        expected = weights.content[0][2 * HUGE_PAGE : 3 * HUGE_PAGE]
        assert bytes_at(arena, 3 * HUGE_PAGE, HUGE_PAGE) == expected


def test_threads_while_the_cache_comes_and_goes(arena, weights):
    wrong = []

    def work(granule):
        start = granule * HUGE_PAGE
        for _ in range(40):
            arena.fill(start, start + HUGE_PAGE)
            if not is_right(arena, weights, granule):
                wrong.append(granule)
            arena.drop(start, start + HUGE_PAGE)

    threads = [threading.Thread(target=work, args=(granule,)) for granule in range(GRANULES)]
    for thread in threads:
        thread.start()
    choices = random.Random(7)
    while any(thread.is_alive() for thread in threads):
        choices.choice((cool, warm))(weights)
        assert arena.mapped_bytes() <= GRANULES * HUGE_PAGE
    assert not wrong
    assert arena.held_bytes == 0


def read_by_pages(weights):
    """Have the page cache hold the large file page by page, as many small reads leave it."""
    cool(weights)
    fd = weights.source.fd(0)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for at in range(0, LARGE, PAGE):
        os.pread(fd, PAGE, at)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)


def disk_bytes():
    """What the disk has delivered to this process."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"])


def passes_over(arena, weights, granules, count):
    """Fills and drops granules `count` times; returns those cached ones that were left to a reader, in order.

    The system may take pages of the file out of its cache at any moment: those are nobody's decision.
    """
    left = []
    for _ in range(count):
        for granule in granules:
            ends = granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE
            held = cached(weights, granule)
            if arena.fill_ready(*ends) is None:
                left += [granule] if held else []
                assert arena.fill(*ends) == HUGE_PAGE
            assert is_right(arena, weights, granule)
            assert not (held and is_private(arena, granule))
            arena.drop(*ends)
    return left


def test_what_is_cached_page_by_page_is_read_again_once(paged_cache, weights):
    read_by_pages(weights)
    before = disk_bytes()
    left = []
    for _ in range(100):  # a slow disk is paid for by many mappings
        left += passes_over(paged_cache, weights, range(2, 5), 40)
        if len(left) >= 3:
            break
    left += passes_over(paged_cache, weights, range(2, 5), 40)
    assert sorted(left) == [2, 3, 4]
    assert disk_bytes() - before >= 3 * HUGE_PAGE


def test_what_is_mapped_fast_is_not_read_again(arena, weights):
    cool(weights)
    for granule in range(2, 5):  # the cache gets whole folios
        arena.fill(granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE)
        arena.drop(granule * HUGE_PAGE, (granule + 1) * HUGE_PAGE)
    # A page table of single pages takes longer; where a file system has no large folios each is read once.
    assert len(passes_over(arena, weights, range(2, 5), 50)) <= 3


def test_what_others_map_stays_and_is_given_up(paged_cache, weights):
    read_by_pages(weights)
    before = disk_bytes()
    with weights.paths[0].open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as other:
        pages = [other[at] for at in range(3 * HUGE_PAGE, 4 * HUGE_PAGE, PAGE)]
        left = []
        while len(left) < TRIES:
            left += passes_over(paged_cache, weights, range(3, 4), 40)
        assert passes_over(paged_cache, weights, range(3, 4), 40) == []
        assert bytes(pages) == weights.content[0][3 * HUGE_PAGE : 4 * HUGE_PAGE : PAGE]
    assert disk_bytes() - before < HUGE_PAGE


@pytest.mark.parametrize("paged_cache", [LARGE], indirect=True)
def test_nothing_is_read_again_where_the_cache_has_no_room(paged_cache, weights):
    read_by_pages(weights)
    assert passes_over(paged_cache, weights, range(2, 5), 20) == []

"""Arenas: the bytes they hold, and the memory they take by the kernel's page tables."""

import random
import threading
from pathlib import Path

import pytest
import torch

from penstock.runtime.arena import kinds
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.arena.mapping import MappedArena
from penstock.runtime.arena.reading import AnonymousArena, ContiguousArena
from penstock.runtime.system.memory import HUGE_PAGE, PAGE
from penstock.schedule.facts.errors import PlanError, StreamError
from penstock.schedule.facts.model import Part
from tests.runtime.arena.arena_weights import KINDS, LARGE, MIB, SMALL, content, over_engines, whole
from tests.runtime.arena.native_arena import address_of
from tests.runtime.system.page_tables import mapped_pages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", [False, True])
@over_engines
def test_every_storage_reads_back_after_a_fill_in_pieces(weights, kind, debug):
    also = {"debug": debug} if weights.engine == "python" else {}
    arena = weights.open(kind, poison=debug, **also)
    for segment in weights.segments:
        for start in range(segment.start, segment.stop, HUGE_PAGE):
            arena.fill(start, min(start + HUGE_PAGE, segment.stop))
    for storage in range(len(weights.storages)):
        assert content(arena, weights, storage) == weights.bytes_of(storage)
    arena.drop(HUGE_PAGE, 2 * HUGE_PAGE)
    arena.fill(HUGE_PAGE, 2 * HUGE_PAGE)
    assert content(arena, weights, 0) == weights.bytes_of(0)
    assert content(arena, weights, 2) == weights.bytes_of(2)
    arena.close()


@over_engines
@pytest.mark.parametrize("kind", KINDS)
def test_a_fill_across_segments_brings_both(weights, kind):
    arena = weights.open(kind)
    brought = arena.fill(0, weights.segments[1].stop)
    assert sum(s.nbytes for s in weights.storages) <= brought <= LARGE + SMALL
    assert all(content(arena, weights, s) == weights.bytes_of(s) for s in range(4))
    arena.close()


@over_engines
@pytest.mark.parametrize("kind", KINDS)
def test_threads_fill_disjoint_ranges(weights, kind):
    arena = weights.open(kind)
    ranges = [(i * 64 * 1024, min((i + 1) * 64 * 1024, LARGE)) for i in range(-(-LARGE // (64 * 1024)))]
    random.Random(1).shuffle(ranges)

    def fill(own):
        for start, stop in own:
            arena.fill(start, stop)

    threads = [threading.Thread(target=fill, args=(ranges[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.held_bytes == arena.peak_bytes == LARGE
    assert all(content(arena, weights, s) == weights.bytes_of(s) for s in range(3))
    arena.close()


@over_engines
@pytest.mark.parametrize("kind", ["mapped", "anonymous"])
def test_exactly_the_filled_huge_granules_are_mapped(weights, kind):
    arena = weights.open(kind)
    address = arena.view(whole(0, 1)).data_ptr() - 128
    held = set()
    for granule, keep in [
        (1, True),
        (3, True),
        (2, True),
        (1, False),
        (5, True),
        (4, True),
        (3, False),
        (5, False),
    ]:
        start, stop = granule * HUGE_PAGE, min((granule + 1) * HUGE_PAGE, LARGE)
        (arena.fill if keep else arena.drop)(start, stop)
        held ^= {granule}
        pages = [page for page, there in enumerate(mapped_pages(address, LARGE)) if there]
        assert {page * PAGE // HUGE_PAGE for page in pages} == held
        assert len(pages) * PAGE == arena.mapped_bytes() <= arena.held_bytes
        # Bytes between storages are read from no file and may take no memory.
        assert kind == "anonymous" or arena.mapped_bytes() == arena.held_bytes
    arena.close()


@pytest.mark.parametrize(("granule", "pages"), [(HUGE_PAGE, "hg"), (64 << 10, "nh")])
@pytest.mark.parametrize("kind", ["mapped", "anonymous"])
def test_pages_are_of_the_granules_size_and_none_is_read_before_it_is_filled(weights, kind, granule, pages):
    arena = weights.open_plan(weights.plan(kind, granule=granule), debug=True)
    start = f"{address_of(arena):x}-"
    mappings = iter(Path("/proc/self/smaps").read_text().splitlines())
    permissions = next(line.split()[1] for line in mappings if line.startswith(start))
    flags = next(line.split()[1:] for line in mappings if line.startswith("VmFlags:"))
    assert permissions[:3] == "---"
    assert pages in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    arena.close()


@over_engines
def test_small_granules_are_mapped_and_dropped_exactly(weights):
    granule = 64 * 1024
    arena = weights.open_plan(weights.plan("mapped", granule=granule))
    address = arena.view(whole(0, 1)).data_ptr() - 128
    arena.fill(0, LARGE)
    for start in range(0, LARGE, 2 * granule):
        arena.drop(start, min(start + granule, LARGE))
    there = mapped_pages(address, LARGE)
    assert all(there[page] == bool(page * PAGE // granule % 2) for page in range(LARGE // PAGE))
    assert arena.held_bytes == arena.mapped_bytes() == sum(there) * PAGE
    arena.close()


@over_engines
def test_a_contiguous_arena_has_its_memory_from_the_start(weights):
    arena = weights.open("contiguous")
    plan = weights.plan("contiguous")
    assert plan.arena_bytes <= arena.mapped_bytes() < plan.arena_bytes + PAGE
    assert arena.held_bytes == 0
    arena.close()
    assert arena.mapped_bytes() == 0


@over_engines
def test_accounting_counts_what_is_held_and_the_most_ever(weights):
    arena = weights.open("mapped")
    arena.fill(0, 2 * HUGE_PAGE)
    arena.fill(HUGE_PAGE, 3 * HUGE_PAGE)
    assert arena.held_bytes == 3 * HUGE_PAGE
    arena.drop(0, 6 * HUGE_PAGE)
    assert (arena.held_bytes, arena.peak_bytes, arena.mapped_bytes()) == (0, 3 * HUGE_PAGE, 0)
    arena.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", [False, True])
def test_nothing_stays_mapped_after_close(weights, kind, debug):
    arena = weights.open(kind, debug=debug)
    address = arena.view(whole(0, 1)).data_ptr()
    arena.fill(0, 2 * HUGE_PAGE)
    arena.close()
    arena.close()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    assert not any(low <= address < high for low, high in ranges)
    assert not any(str(path) in line for line in lines for path in weights.paths)
    uses = [lambda: arena.fill(0, PAGE), lambda: arena.drop(0, PAGE), lambda: arena.view(whole(0, 1))]
    for use in uses:
        with pytest.raises(StreamError, match="has been closed"):
            use()


@over_engines
def test_poison_covers_what_no_storage_holds_and_nothing_else(weights):
    # Storage 1 shares its bytes with the first of storage 0, so the two are never held at once.
    addresses = (0, 0, 3 * MIB, 10 * MIB)
    plan = weights.plan("contiguous", addresses=addresses)
    arena = weights.open_plan(plan, poison=True)
    assert set(content(arena, weights, 2)) == {0xFF}
    first, second = ((a, a + s.nbytes) for a, s in zip(weights.layout[:2], weights.storages[:2], strict=True))
    arena.fill(*first)
    assert content(arena, weights, 0) == weights.bytes_of(0)
    arena.drop(*first)
    assert torch.isnan(arena.view(Part("", "bfloat16", (MIB,), (1,), 0, 0)).float()).all()
    arena.fill(*second)
    arena.drop(*first)  # not held: its bytes are another's now
    assert content(arena, weights, 1) == weights.bytes_of(1)
    assert set(content(arena, weights, 0)[1000:]) == {0xFF}
    arena.close()


def test_a_mapped_plan_runs_where_populate_is_missing(weights, monkeypatch):
    with_it = weights.open("mapped")
    monkeypatch.setattr(kinds, "supports_populate", lambda: False)
    without = weights.open("mapped")
    assert isinstance(with_it, MappedArena)
    assert isinstance(without, AnonymousArena)
    assert isinstance(weights.open("contiguous"), ContiguousArena)
    without.fill(0, HUGE_PAGE)
    assert without.mapped_bytes() == without.held_bytes == HUGE_PAGE
    assert content(without, weights, 0)[: HUGE_PAGE - 128] == weights.bytes_of(0)[: HUGE_PAGE - 128]
    with_it.close()
    without.close()


@over_engines
@pytest.mark.parametrize("kind", ["mapped", "anonymous"])
def test_addresses_agree_with_file_offsets_for_direct_reads(weights, kind):
    arena = weights.open(kind)
    for index, storage in enumerate(weights.storages):
        extent = storage.extents[0]
        assert (arena.view(whole(index, 1)).data_ptr() - extent.file_offset) % PAGE == 0
    arena.close()


def test_storages_outside_a_contiguous_arena_are_left_alone(weights):
    plan = weights.plan("contiguous", addresses=(0, -1, -1, -1))
    arena = open_arena(plan, weights.storages, weights.source)
    assert arena.fill(0, weights.segments[1].stop) == weights.storages[0].nbytes
    with pytest.raises(PlanError, match="at byte -1 of the arena"):
        arena.view(whole(1, 1))
    arena.close()


@over_engines
@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_of_nothing_opens_and_closes(weights, kind):
    weights.storages, weights.layout, weights.segments = (), (), ()
    arena = weights.open(kind)
    arena.drop(0, PAGE)
    assert (arena.held_bytes, arena.fill(0, 0)) == (0, 0)
    arena.close()

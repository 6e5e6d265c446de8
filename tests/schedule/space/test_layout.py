"""Where bytes lie before anything is planned: literal layouts, packed and in files."""

from dataclasses import replace

from hypothesis import given

from penstock.schedule.facts.model import Extent, Range, Step, Storage, Trace, WeightFile
from penstock.schedule.facts.problem import first_uses
from penstock.schedule.space.layout import mapped_arena, packed_arena
from tests.schedule.traces import problems


def trace(*reads):
    steps = tuple(Step(f"s{k}", one, 0, 0) for k, one in enumerate(reads))
    return Trace("forward", 0, "", steps, 0, 0, "modelled")


def in_file(nbytes, *extents):
    return Storage(nbytes, "streamable", extents)


FILES = (WeightFile("a", 10_000, 0, 0, "", ""), WeightFile("b", 5_000, 0, 0, "", ""))


def test_packing_follows_first_use_and_aligns():
    storages = (Storage(100, "streamable"), Storage(7, "mutable"), Storage(65, "streamable"))
    arena = packed_arena(storages, (trace((2,), (0, 2)),), kind="paged", granule=4096, alignment=64)
    assert arena.layout == (128, -1, 0)
    assert arena.segments == (Range(0, 228),)


def test_what_is_empty_or_never_read_has_no_place():
    storages = (Storage(0, "streamable"), Storage(9, "streamable"), Storage(9, "streamable"))
    arena = packed_arena(storages, (trace((0,), (2,)),), kind="contiguous", granule=64, alignment=64)
    assert arena.layout == (-1, -1, 0)
    assert packed_arena((), (trace(),), kind="paged", granule=64, alignment=64).segments == ()


def test_a_mapped_layout_is_the_files_one_after_the_other():
    storages = (in_file(100, Extent(0, 4160, 0, 100)), in_file(64, Extent(1, 128, 0, 64)))
    arena = mapped_arena(storages, FILES, granule=8192)
    assert arena is not None
    assert arena.layout == (4160, 16384 + 128)
    assert arena.segments == (Range(4096, 8192), Range(16384, 16384 + 4096))


def test_extents_that_continue_each_other_are_one_run():
    storage = in_file(96, Extent(0, 64, 0, 32), Extent(0, 96, 32, 64))
    arena = mapped_arena((storage,), FILES, granule=4096)
    assert arena is not None
    assert arena.layout == (64,)


def test_storages_lie_at_their_phases():
    at_8, at_24 = Storage(100, "streamable", phase=8), Storage(100, "streamable", phase=24)
    arena = packed_arena((at_8, at_24), (trace((0, 1)),), kind="contiguous", granule=64, alignment=64)
    assert arena.layout == (8, 128 + 24)
    mapped = mapped_arena((replace(at_8, extents=(Extent(0, 136, 0, 100),)),), FILES, granule=4096)
    assert mapped is not None
    assert mapped.layout == (136,)


def test_nothing_is_mapped_where_one_storage_cannot_be():
    fine = in_file(64, Extent(0, 64, 0, 64))
    misaligned = in_file(64, Extent(0, 136, 0, 64))
    torn = in_file(96, Extent(0, 64, 0, 32), Extent(0, 128, 32, 64))
    past_the_end = in_file(64, Extent(1, 4992, 0, 64))
    for wrong in (misaligned, torn, past_the_end, in_file(64)):
        assert mapped_arena((fine, wrong), FILES, granule=4096) is None
        assert mapped_arena((fine, wrong), FILES, granule=4096, traces=(trace((0,)),)) is not None


@given(problems())
def test_layouts_hold_every_read_storage_in_one_segment(problem):
    for s in first_uses(problem.storages, problem.traces):
        place = Range(problem.arena.layout[s], problem.arena.layout[s] + problem.storages[s].nbytes)
        assert any(g.start <= place.start and place.stop <= g.stop for g in problem.arena.segments)
        assert place.start % 64 == problem.storages[s].phase

"""Spans and what is kept over gaps: literal cases, then invariants on random traces."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule.bound.gaps import Residency, gaps_of, needed_bytes
from penstock.schedule.facts.model import Range, Step, Storage, Trace
from penstock.schedule.facts.problem import Demand
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces, merged
from tests.schedule.traces import problems


def trace_of(*reads, read_ns=10):
    steps = tuple(Step(f"s{k}", one, 0, read_ns) for k, one in enumerate(reads))
    return Trace("forward", 0, "", steps, 0, 0, "modelled")


def residency_of(storages, trace):
    arena = packed_arena(storages, (trace,), kind="paged", granule=64, alignment=64)
    groups = Pieces(Demand(storages, (trace,), arena)).groups
    gaps = gaps_of(groups, trace)
    return Residency(groups, gaps, needed_bytes(groups, len(trace.steps)))


def test_a_granule_that_two_storages_touch_is_read_with_either():
    storages = (Storage(96, "streamable"), Storage(96, "streamable"))
    arena = packed_arena(storages, (trace_of((0,), (1,)),), kind="paged", granule=64, alignment=32)
    runs = Pieces(Demand(storages, (trace_of((0,), (1,)),), arena)).runs
    assert [(r.range, r.reads) for r in runs] == [
        (Range(0, 64), ((0,),)),
        (Range(64, 128), ((0, 1),)),
        (Range(128, 192), ((1,),)),
    ]


def test_neighbours_read_alike_are_one_run_unless_one_is_kept():
    storages = (Storage(64, "streamable"),) * 2
    trace = trace_of((0, 1), (0, 1))
    arena = packed_arena(storages, (trace,), kind="paged", granule=64, alignment=64)
    assert [r.range for r in Pieces(Demand(storages, (trace,), arena)).runs] == [Range(0, 128)]
    assert [r.kept for r in Pieces(Demand(storages, (trace,), arena, frozenset({1}))).runs] == [False, True]


def test_large_runs_are_cut_into_spans_of_whole_granules():
    storages = (Storage(64 * 100_000, "streamable"), Storage(10, "streamable"))
    trace = trace_of((0,), (1,))
    arena = packed_arena(storages, (trace,), kind="paged", granule=64, alignment=64)
    large, small = Pieces(Demand(storages, (trace,), arena)).groups
    assert len(large.spans) <= 30_001
    assert merged(large.spans) == (Range(0, 6_400_000),)
    assert small.spans == (Range(6_400_000, 6_400_010),)


def test_merging_stops_at_breaks():
    assert merged([Range(4, 8), Range(0, 4), Range(8, 9)], breaks={8}) == (Range(0, 8), Range(8, 9))


def test_reads_in_a_row_are_one_visit():
    """No step lies between the reads of storage 0, so keeping it there costs nothing."""
    residency = residency_of((Storage(64, "streamable"),) * 3, trace_of((0, 1), (0, 2), (2,)))
    counts = residency.rounded([0.0] * len(residency.gaps))
    assert [gap.inside for gap, count in zip(residency.gaps, counts, strict=True) if count] == [0, 0]
    assert (residency.held(counts) == residency.needed).all()


@given(problems("paged"), st.floats(0, 1), st.floats(0, 1))
def test_what_is_trimmed_holds_no_more_than_the_limit_or_what_a_step_needs(p, share, wanted):
    trace = p.traces[0]
    groups = Pieces(p).groups
    gaps = gaps_of(groups, trace)
    residency = Residency(groups, gaps, needed_bytes(groups, len(trace.steps)))
    limit = int(share * sum(group.nbytes for group in groups))
    kept = [wanted * groups[gap.group].nbytes for gap in gaps]
    counts = residency.trim(residency.rounded(kept), kept, limit)
    for held, needed in zip(residency.held(counts).tolist(), residency.needed.tolist(), strict=True):
        assert needed <= held <= max(limit, needed)


@given(problems("paged"))
def test_spans_cover_every_read_byte_once(problem):
    arena = problem.arena
    groups = Pieces(problem).groups
    spans = [span for group in groups for span in group.spans]
    covered = merged(spans)
    assert sum(span.nbytes for span in spans) == sum(r.nbytes for r in covered)
    for step in problem.traces[0].steps:
        for s in step.reads:
            place = Range(arena.layout[s], arena.layout[s] + problem.storages[s].nbytes)
            assert any(r.start <= place.start and place.stop <= r.stop for r in covered)

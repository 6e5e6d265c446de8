"""Places in a pool, the smallest pool, and how a budget is divided: literal cases."""

from dataclasses import replace

import pytest

from penstock.schedule.facts.model import (
    Arena,
    Extent,
    Hardware,
    Part,
    Pool,
    Range,
    SparseRead,
    Step,
    Storage,
    Trace,
)
from penstock.schedule.facts.problem import Problem
from penstock.schedule.sparse.pool import (
    LEAST,
    divide,
    missed,
    pass_counts,
    smallest_pool,
    tables_of,
    timed_pool,
    units_layout,
    without_units,
)

MIB = 1 << 20
HARDWARE = Hardware("toy", 1e12, 1e10, 1e9, 4_000)


def rows(storage, count, width, *, asked=4, route=0, offset=0):
    """Reads of rows of `width` items of four bytes."""
    view = Part("", "float32", (count, width), (width, 1), storage, offset)
    return SparseRead(view, "aten.embedding.default", route, asked)


def trace(*steps, graph=0):
    made = tuple(Step(f"s{k}", reads, 0, 100, sparse=sparse) for k, (reads, sparse) in enumerate(steps))
    return Trace(f"m{graph}", graph, "", made, 0, 0, "modelled")


TABLE = rows(0, 1024, 1024)  # 4 MiB
STORAGES = (Storage(4 * MIB, "streamable"), Storage(4 * MIB, "streamable"), Storage(LEAST - 4, "streamable"))


def test_only_what_is_worth_it_has_a_place():
    small = rows(2, (LEAST - 4) // 4, 1)
    steps = (((0,), (TABLE,)), ((1,), (rows(1, 1024, 1024),)), ((2,), (small,)))
    assert units_layout(STORAGES, [trace(*steps)], granule=4096) == (0, 4 * MIB, -1)
    assert units_layout(STORAGES, [trace(*steps)], granule=4096, keep={0}) == (-1, 0, -1)
    assert units_layout(STORAGES, [trace(*steps)], granule=4096, keep={0, 1}) is None
    returned = (replace(STORAGES[0], kind="returned"), *STORAGES[1:])
    assert units_layout(returned, [trace(*steps)], granule=4096) == (-1, 0, -1)
    assert units_layout(STORAGES, [trace(((0, 1, 2), ()))], granule=4096) is None


def test_a_storage_of_which_methods_read_different_units_has_no_place():
    one, other = trace(((0,), (TABLE,))), trace(((0,), (rows(0, 512, 2048),)), graph=1)
    assert units_layout(STORAGES, [one], granule=4096) == (0, -1, -1)
    assert units_layout(STORAGES, [one, other], granule=4096) is None
    same = trace(((0,), (replace(TABLE, route=5, asked=9),)), graph=1)
    assert units_layout(STORAGES, [one, same], granule=4096) == (0, -1, -1)


@pytest.mark.parametrize(
    ("file_offset", "phase", "place"),
    [(8192, 0, 0), (8192 + 192, 0, 192), (8192 + 200, 8, 200), (8192 + 200, 0, 0), (70, 40, 40)],
)
def test_a_place_is_at_the_phase_and_agrees_with_the_file_where_it_can(file_offset, phase, place):
    storage = Storage(4 * MIB, "streamable", (Extent(0, file_offset, 0, 4 * MIB),), phase=phase)
    assert units_layout((storage,), [trace(((0,), (TABLE,)))], granule=4096) == (place,)


def test_places_are_apart():
    storages = tuple(Storage(MIB + 1, "streamable", phase=8) for _ in range(3))
    reads = tuple(((s,), (rows(s, 256, 1024),)) for s in range(3))
    assert units_layout(storages, [trace(*reads)], granule=4096) == (8, 2 * MIB + 8, 4 * MIB + 8)


def test_what_the_pool_serves_is_not_read_from_the_arena():
    both = trace(((0, 1), (TABLE,)), ((0,), ()), ((1,), (rows(1, 1024, 1024),)))
    reduced = without_units(both, Pool(4096, 4096, (0, -1, -1)))
    assert [step.reads for step in reduced.steps] == [
        (1,),
        (0,),
        (1,),
    ]  # the head still reads the table whole
    assert [step.sparse for step in reduced.steps] == [step.sparse for step in both.steps]


@pytest.mark.parametrize(
    ("read", "place", "nbytes"),
    [
        (rows(0, 8, 1024), 0, 4096),  # whole granules
        (rows(0, 8, 1024), 64, 8192),  # every row over an edge
        (rows(0, 1000, 16), 0, 4096),  # many in a granule
        (rows(0, 1000, 16), 32, 8192),  # of which one is over an edge
        (rows(0, 4, 1020), 0, 8192),  # the second over an edge
        (rows(0, 2, 1000, offset=100), 0, 8192),
        (rows(0, 1, 1000, offset=96), 0, 4096),  # the only one in one granule
        (rows(0, 3, 1024 + 512), 0, 8192),  # 6,144 bytes: two granules, however they lie
    ],
)
def test_the_smallest_pool_holds_the_widest_unit(read, place, nbytes):
    pool = smallest_pool([trace(((0,), (read,)))], (place,), 4096)
    assert pool == Pool(nbytes, 4096, (place,))
    widths = [b - a for a, b in (pool.granules(read, k) for k in range(read.count))]
    assert nbytes == max(widths) * 4096


def test_tables_are_counted_once_however_often_a_pass_reads_them():
    pool = Pool(MIB, 4096, (0, 4 * MIB, -1))
    some = trace(
        ((0,), (TABLE,)), ((1,), (rows(1, 1024, 1024, asked=64),)), ((0,), (replace(TABLE, route=2),))
    )
    first, second = tables_of(some, pool)
    assert (first.asked, second.asked, second.count) == (64, 8, 1024)
    assert second.missed(0) == 8
    assert second.missed(second.nbytes // 2) == pytest.approx(4)
    assert second.missed(1 << 40) == 0
    # In a pool that holds two rows, no read fits, and its rounds leave nothing for the next one.
    assert [one.missed(1 << 40) for one in tables_of(some, replace(pool, nbytes=8192))] == [64, 8]


def test_dense_reads_and_tiles_are_served_only_where_the_pool_says_so():
    all_rows = replace(TABLE, asked=1024)
    tiles = replace(all_rows, tiles=True)
    pool = Pool(4096, 4096, (0, -1, -1))
    assert (all_rows.dense, tiles.dense, TABLE.dense) == (True, False, False)
    assert [pool.has(one) for one in (TABLE, all_rows, tiles)] == [True, True, False]
    some = replace(pool, dense=False, tiles=True)
    assert [some.has(one) for one in (TABLE, all_rows, tiles)] == [True, False, True]
    both = [trace(((0,), (all_rows,))), trace(((0,), (TABLE,)), graph=1)]
    assert units_layout(STORAGES, both[:1], granule=4096, dense=False) is None
    assert units_layout(STORAGES, both, granule=4096, dense=False) == (0, -1, -1)
    reduced = [without_units(one, some) for one in both]
    assert [one.steps[0].reads for one in reduced] == [(0,), ()]


def test_waiting_falls_with_the_pool_and_is_worst_without_one():
    some = trace(((0,), (TABLE,)))
    times = [missed(some, Pool(n * MIB, 4096, (0, -1, -1))).ns(HARDWARE) for n in range(6)]
    assert times == sorted(times, reverse=True)
    assert times[0] == round(4 * 4096 / 1e9 * 1e9 + 4 * 4_000 / 4)
    assert times[-1] == 0
    pool = timed_pool(Pool(2 * MIB, 4096, (0, -1, -1)), [some, trace(((1,), ()), graph=1)], HARDWARE)
    assert pool.worst_ns == (times[0], 0)
    assert pool.expected_ns == (times[2], 0)
    assert all(a <= b for a, b in zip(pool.expected_ns, pool.worst_ns, strict=True))


def problem(whole_ns, asked):
    read = replace(TABLE, asked=asked)
    some = without_units(trace(((0,), (read,)), ((1,), ())), Pool(4096, 4096, (0, -1, -1)))
    some = replace(some, steps=(replace(some.steps[0], read_ns=whole_ns), some.steps[1]))
    arena = Arena("paged", "anonymous", 4096, (-1, 0, -1), (Range(0, 4 * MIB),))
    pool = smallest_pool([some], (0, -1, -1), 4096)
    return Problem(STORAGES, (some,), arena, pool=pool, hardware=HARDWARE)


def divided(given, nbytes, least):
    ns, pool, missing = max(divide(given, nbytes, least), key=lambda one: one.pool.nbytes if one.pool else 0)
    assert pool is not None
    return ns, pool, missing


def test_a_budget_is_divided_by_what_saves_most():
    # Copies hide behind compute: as much as that takes less time is for units.
    ns, pool, _ = divided(problem(10_000_000, 512), 4 * MIB, MIB)
    assert 2 * MIB < pool.nbytes < 3 * MIB  # and the rest saves bytes, for nearly no time
    assert ns == 10_000_100 + pool.expected_ns[0]
    largest = replace(pool, nbytes=3 * MIB)
    best = 10_000_100 + missed(problem(10_000_000, 512).traces[0], largest).ns(HARDWARE)
    assert best < ns <= 1.05 * best
    # Copies take all the time, and units are seldom asked for: the pool is the smallest.
    ns, pool, _ = divided(problem(0, 1), 4 * MIB, MIB)
    assert pool.nbytes == 4096
    assert pool.worst_ns[0] >= pool.expected_ns[0] > 0


def test_a_pool_is_never_larger_than_what_it_serves_nor_smaller_than_a_unit():
    _, pool, _ = divided(problem(10_000_000, 512), 1 << 30, MIB)
    assert 4 * MIB <= pool.nbytes <= 4 * MIB + 4096
    assert pool.nbytes % pool.granule == 0
    assert divided(problem(0, 512), 4096, MIB)[1].nbytes == 4096


def test_methods_that_ask_for_fewest_units_count_most():
    prompt, token = trace(((0,), (rows(0, 1024, 1024, asked=512),))), trace(((0,), (TABLE,)), graph=1)
    image = trace(((1,), ()), graph=2)
    assert pass_counts([prompt, token, image]) == [1, 32, 1]
    assert pass_counts([token, replace(token, graph=3), prompt]) == [32, 32, 1]
    assert pass_counts([token, token]) == [1, 1]
    assert pass_counts([token, image]) == [1, 1]
    assert pass_counts([image]) == [1]


def test_a_pool_is_for_tokens_where_prompts_would_rather_have_an_arena():
    """A prompt copies for longer than it computes; a token copies nothing, as all that it reads stays."""
    prompt = replace(trace(((0,), (replace(TABLE, asked=1024),)), ((1,), ())), gap_ns=1_000_000)
    token = replace(trace(((0,), (replace(TABLE, asked=64),)), graph=1), gap_ns=1_000)
    pool = Pool(4096, 4096, (0, -1, -1))
    arena = Arena("paged", "anonymous", 4096, (-1, 0, -1), (Range(0, 4 * MIB),))
    traces = (without_units(prompt, pool), without_units(token, pool))
    traces = (
        replace(traces[0], steps=(traces[0].steps[0], replace(traces[0].steps[1], reads=(1,)))),
        traces[1],
    )
    given = Problem(STORAGES, traces, arena, pool=smallest_pool(traces, (0, -1, -1), 4096), hardware=HARDWARE)
    assert divided(given, 4 * MIB, MIB)[1].nbytes == 3 * MIB
    alone = replace(given, traces=traces[:1])
    assert divided(alone, 4 * MIB, MIB)[1].nbytes < 3 * MIB

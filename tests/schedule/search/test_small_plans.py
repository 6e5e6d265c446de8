"""Plans of small and of drawn problems: none is slower than the best that there is, or than before."""

import itertools
from dataclasses import replace
from functools import partial
from random import Random

import numpy
import pytest

from benchmarks.corpus import draw_problem
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import in_sizes
from penstock.schedule.facts.model import Range, Schedule
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.search.draft import Occupancy, Task
from penstock.schedule.search.paged import OneTrace
from penstock.schedule.space.addresses import Addressing
from penstock.schedule.space.spans import Pieces
from penstock.schedule.verify.proof import verify_plan
from tests.schedule.search.small_problems import GRANULE, one_each, problem_of
from tests.schedule.traces import machine


def drawn(seed):
    """The problem of a seed, and the bytes that it is planned in.

    Every second one is contiguous, every third one has two methods, and every fifth one produces a value.
    """
    dice = Random(seed)
    count = dice.randint(4, 9)
    sizes = [dice.choice((1, 1, 2, 3, 8)) for _ in range(count)]
    methods = []
    for _ in range(2 if seed % 3 == 2 else 1):
        order = [dice.randrange(count) for _ in range(dice.randint(0, 4))] + [*range(count)]
        if dice.random() < 0.5:
            dice.shuffle(order)
        methods.append(
            [tuple(sorted({one, dice.randrange(count)})) if dice.random() < 0.2 else (one,) for one in order]
        )
    made = (0,) if seed % 5 == 4 else ()
    if made:
        others = [(s,) for s in range(1, count)]
        methods = [[(0,), *others, (0,)]]
    hardware = machine(
        dice.choice((1e9, 3e9, 8e9, 2e10)),
        latency_ns=dice.choice((0, 0, 7)),
        in_flight=dice.choice((0, 0, 150)),
    )
    problem = problem_of(
        sizes,
        *methods,
        made=made,
        keep=(count - 1,) if dice.random() < 0.2 else (),
        kind=("paged", "contiguous")[seed % 2],
        wrap=dice.choice(("overlap", "overlap", "barrier")),
        hardware=hardware,
    )
    if seed % 6 == 0 and not made:  # as a weight file's, the segment begins inside of a granule
        arena = problem.arena
        layout = tuple(place + 24 if place >= 0 else place for place in arena.layout)
        segments = tuple(Range(one.start + 24, one.stop + 24) for one in arena.segments)
        problem = replace(problem, arena=replace(arena, layout=layout, segments=segments))
    least, total = floor(problem).upper_bytes, sum(one.nbytes for one in problem.storages)
    return problem, least + int(dice.choice((0.0, 0.2, 0.4, 0.7)) * max(0, total - least))


def found(seed):
    """What the plan of a seed comes to: its periods, its copies, and the bytes in, out and of its arena."""
    problem, budget = drawn(seed)
    plan = make_plan(problem, budget)
    verify_plan(problem.storages, problem.traces, plan)
    periods = tuple(one.predicted_ns for one in plan.schedules)
    count = sum(len(one.transfers) for one in plan.schedules)
    return periods, count, plan.streamed_bytes, plan.written_bytes, plan.arena_bytes


PLANS = [
    ((142,), 8, 1000, 0, 984),
    ((80,), 4, 256, 0, 832),
    ((238, 205), 13, 832, 0, 128),
    ((336,), 5, 832, 0, 1280),
    ((696,), 6, 576, 64, 256),
    ((98, 94), 12, 768, 0, 1024),
    ((315,), 6, 728, 0, 808),
    ((1708,), 10, 1152, 0, 576),
    ((462, 448), 12, 896, 0, 256),
    ((297,), 4, 256, 0, 896),
    ((100,), 4, 512, 0, 1216),
    ((598, 568), 12, 1024, 0, 1728),
    ((115,), 5, 320, 0, 1024),
    ((284,), 4, 256, 0, 256),
    ((69,), 3, 384, 0, 1024),
    ((90,), 3, 192, 0, 640),
    ((138,), 8, 960, 0, 384),
    ((126, 167), 25, 2176, 0, 832),
    ((80,), 7, 552, 0, 320),
    ((647,), 8, 640, 0, 1728),
]
"""By seed, what `found` gives. A change that is to change plans takes over what the failing test prints.

`python -m benchmarks.corpus --against` first shows that plans are no worse, and the commit says why.
"""


@pytest.mark.parametrize("seed", range(len(PLANS)))
def test_plans_are_as_fast_and_move_as_much_as_they_did(seed):
    assert found(seed) == PLANS[seed]


@pytest.mark.parametrize(("seed", "most"), [(1070, 1.05), (1090, 1.12), (1284, 1.01), (34, 1.29), (23, 1.05)])
def test_storages_share_bytes_in_every_way(seed, most):
    """A ring under the largest, or between two, pairs, columns; climbs from other numbers of copies."""
    one = draw_problem(seed, "contiguous")
    plan = make_plan(one.problem, one.budget)
    verify_plan(one.problem.storages, one.problem.traces, plan)
    assert plan.ratio < most


@pytest.mark.parametrize(
    ("sizes", "reads", "granules", "latency", "wrap"),
    [
        ((1, 1, 1, 1), one_each(4), 2, 0, "overlap"),
        ((1, 1, 1, 1), one_each(4), 2, 60, "barrier"),
        ((1,) * 6, one_each(6), 3, 0, "overlap"),
        ((1,) * 6, one_each(6), 4, 100, "overlap"),
        ((1, 1, 1), [(0,), (1,), (2,), (1,), (0, 2), (1,)], 2, 20, "overlap"),
        ((2, 1, 2, 1), one_each(4), 4, 30, "overlap"),
        ((2, 1, 2, 1), one_each(4), 3, 30, "barrier"),
    ],
)
def test_no_choice_of_rows_is_faster_than_the_plan(sizes, reads, granules, latency, wrap):
    """Of all choices, with single copies and with those joined up to some sizes."""
    problem = problem_of(sizes, reads, wrap=wrap, hardware=machine(2e9, latency_ns=latency))
    search = OneTrace(Task(problem, Pieces(problem), granules * GRANULE, (None,), 1.0))
    plan = make_plan(problem, granules * GRANULE)
    last, best, fitting = len(reads) - 1, plan.predicted_ns, 0
    for chosen in itertools.product((True, False), repeat=len(search.loads.step)):
        rows = numpy.array(chosen)
        kept = numpy.bincount(
            search.loads.gap[~rows], weights=search.loads.nbytes[~rows], minlength=len(search.gaps)
        )
        if search.residency.held_bytes(kept.tolist()).max() > granules * GRANULE:
            continue
        fitting += 1
        for early, most in itertools.product({last, 0 if wrap == "barrier" else last}, (0, 64, 128, 1 << 20)):
            streaming = search.loads.stream(
                rows,
                search.loads.never_in(rows),
                cap=granules * GRANULE,
                early=early,
                join=partial(in_sizes, most=most, breaks=()),
            )
            schedule = Schedule(0, streaming.transfers, (), 0)
            best = min(best, steady_period_ns(problem.traces[0], schedule, problem.hardware, wrap))
    assert fitting > 3
    assert best == plan.predicted_ns


@pytest.mark.parametrize(
    ("sizes", "reads", "granules", "latency"),
    [
        ((1, 1, 1, 1), one_each(4), 2, 0),
        ((1, 1, 1, 1), one_each(4), 3, 100),
        ((2, 1, 2, 1), one_each(4), 4, 0),
        ((1, 2, 3), one_each(3), 4, 50),
        ((1, 1, 2), [(0,), (1,), (0, 2), (1,)], 3, 0),
        ((1, 1, 1, 1), [(0,), (1,), (2,), (3,), (2,), (1,)], 2, 20),
        ((3, 1, 1, 3), one_each(4), 5, 0),
    ],
)
def test_no_placement_of_a_few_blocks_is_faster_than_the_plan(sizes, reads, granules, latency):
    problem = problem_of(sizes, reads, kind="contiguous", hardware=machine(2e9, latency_ns=latency))
    plan = make_plan(problem, granules * GRANULE)
    blocks = Pieces(problem).blocks
    best = plan.predicted_ns
    tried = 0
    for places in itertools.product(*(range(granules - size + 1) for size in sizes)):
        apart = all(
            places[a] + sizes[a] <= places[b] or places[b] + sizes[b] <= places[a]
            for some in reads
            for a, b in itertools.combinations(some, 2)
        )
        if apart:
            tried += 1
            placement = Addressing(tuple(GRANULE * place for place in places), granules * GRANULE)
            for least in (0, 1 << 20):
                draft = Occupancy(problem, blocks, placement).decide(len(reads) - 1, least)
                best = min(best, *draft.periods_ns(problem))
    assert tried > 5
    assert best == plan.predicted_ns


@pytest.mark.parametrize(("rows", "expected"), [(128, (1328, 8, 6784)), (129, (1340, 7, 7360))])
def test_a_problem_of_more_than_128_rows_is_searched_for_longer(rows, expected):
    problem = problem_of((1,) * rows, one_each(rows), hardware=machine(8e9, latency_ns=60))
    plan = make_plan(problem, 51 * GRANULE)
    assert (plan.predicted_ns, len(plan.schedules[0].transfers), plan.streamed_bytes) == expected

"""Which rows are copied: memory counted step by step, runs followed by hand, and every neighbour."""

import itertools
from random import Random

import numpy
import pytest

from penstock.schedule.bound.gaps import Residency, gaps_of, needed_bytes
from penstock.schedule.clock.transfers import Loads
from penstock.schedule.search.paged import Runs, _shuffled_pairs
from penstock.schedule.space.spans import Pieces
from tests.schedule.search.small_problems import GRANULE, one_each, problem_of

SHARED = problem_of((1, 1, 2, 1, 1), [(0,), (1,), (0, 2), (3,), (4, 1), (2,)])
"""Eight rows, and nine granules of them."""


class Counted(Runs):
    """Notes how much each attempt wants to copy."""

    def __init__(self, problem, granules, kept=None):
        groups, (trace,) = Pieces(problem).groups, problem.traces
        gaps = gaps_of(groups, trace)
        steps = len(trace.steps)
        self.loads = Loads(groups, gaps, steps, breaks=())
        residency = Residency(groups, gaps, needed_bytes(groups, steps))
        self.cap = int(granules * GRANULE)
        super().__init__(self.loads, residency, kept or [0.0] * len(gaps), self.cap)
        self.copied = []
        self.fixed = None

    def _spread(self, copied, run, ahead):
        self.copied.append(copied)
        return super()._spread(copied, run, ahead) if self.fixed is None else self.fixed


def fullest(problem, loads, rows):
    """The bytes of the fullest step, when what no row copies stays."""
    steps = problem.traces[0].steps
    held = [sum(problem.storages[s].nbytes for s in step.reads) for step in steps]
    for row, chosen in enumerate(rows):
        gap = loads.gaps[loads.gap[row]]
        for k in range(gap.opens + 1, gap.closes):
            held[k % len(steps)] += 0 if chosen else int(loads.nbytes[row])
    return max(held)


def mask(text):
    return [one == "x" for one in text]


def test_memory_is_counted_at_the_fullest_step():
    runs = Counted(SHARED, 4)
    dice = Random(0)
    sizes = set()
    for _ in range(50):
        rows = [dice.random() < 0.5 for _ in runs.loads.step]
        sizes.add(fullest(SHARED, runs.loads, rows))
        assert runs._short(numpy.array(rows)) == fullest(SHARED, runs.loads, rows) - 4 * GRANULE
    assert len(sizes) > 3
    assert runs._excess == 6 * GRANULE - 4 * GRANULE


def test_a_short_gap_is_copied_over_only_where_the_relaxation_does():
    """Storage 0 is read at steps 0, 1, 3 and 7 of 8, storage 1 at step 2 and 2 at step 5."""
    problem = problem_of((1, 1, 1), [(0,), (0,), (1,), (0,), (1,), (2,), (2,), (0,)])
    runs = Counted(problem, 2, kept=[float(GRANULE)] * 8)
    inside = [runs.loads.gaps[gap].inside for gap in runs.loads.gap]
    assert inside == [0, 0, 5, 1, 1, 6, 0, 3]
    assert runs._may.tolist() == [False, False, True, False, False, True, False, False]
    copied = Counted(problem, 2, kept=[float(GRANULE - 1)] * 8)
    assert copied._may.tolist() == [one > 0 for one in inside]


@pytest.mark.parametrize(
    ("kept", "copied", "wanted"),
    [
        ((0, 32, 64, 64), 48, (0.5, 0.25, 0, 0)),
        ((0, 32, 64, 64), 96, (1, 0.5, 0, 0)),
        ((0, 32, 64, 64), 176, (1, 0.75, 0.5, 0.5)),
        ((0, 32, 64, 64), 10**6, (1, 1, 1, 1)),
        ((0, 32, 64, 64), -5, (0, 0, 0, 0)),
        ((64, 64, 64, 64), 0, (0, 0, 0, 0)),
        ((64, 64, 64, 64), 64, (0.25, 0.25, 0.25, 0.25)),
        ((70, 64, 64, 64), 64, (0.25, 0.25, 0.25, 0.25)),  # no share is below 0, whatever the solver says
        ((0, 0, 0, 0), 300, (1, 1, 1, 1)),
        ((-1, 0, 0, 0), 128, (0.5, 0.5, 0.5, 0.5)),
    ],
)
def test_shares_of_rows_follow_the_relaxation(kept, copied, wanted):
    runs = Counted(problem_of((1,) * 4, one_each(4)), 2, kept=kept)
    assert runs._wanted(copied).tolist() == list(wanted)


@pytest.mark.parametrize(
    ("copied", "run", "ahead", "expected"),
    [
        (256, 64, 0.0, "xx--xx--"),  # 32 bytes are owed at each row, a half of a run
        (256, 64, 0.5, "xxx--xx-"),
        (128, 64, 0.0, "-xx-----"),
        (128, 0, 0.0, "x--x---x"),
        (512, 64, 0.0, "xxxxxxxx"),
        (256, 130, 0.0, "--xxxxxx"),
        (0, 64, 0.0, "--------"),
    ],
)
def test_runs_begin_when_half_is_owed_and_end_half_in_advance(copied, run, ahead, expected):
    runs = Counted(problem_of((1,) * 8, one_each(8)), 4)
    assert runs._spread(copied, run, ahead).tolist() == mask(expected)


def test_rows_that_may_not_be_copied_owe_nothing():
    """The second of two reads in turn is never copied for."""
    runs = Counted(problem_of((1,) * 4, [(0,), (0,), (1,), (1,), (2,), (3,)]), 2)
    inside = [runs.loads.gaps[gap].inside for gap in runs.loads.gap]
    assert inside == [4, 0, 4, 0, 5, 5]
    assert runs._spread(128, 64, 0.0).tolist() == mask("x-x---")


def test_a_choice_copies_what_does_not_fit_and_more_until_it_does():
    runs = Counted(SHARED, 4)
    found = runs.choose(GRANULE, GRANULE, 0.0)
    assert found is not None
    assert fullest(SHARED, runs.loads, found.tolist()) <= 4 * GRANULE
    first, *more = runs.copied
    assert first == 2 * GRANULE + GRANULE
    assert more == sorted(more)
    tight = Counted(SHARED, 4)
    tight.fixed = numpy.zeros(len(tight.loads.step), dtype=bool)
    assert tight.choose(5, 1, 0.0) is None
    assert tight.copied == [2 * GRANULE * (n + 1) + 5 for n in range(5)]
    exact = Counted(SHARED, 6)
    assert exact.choose(0, 1, 0.0) is not None
    assert exact.copied == [0]


def test_runs_of_all_lengths_are_tried_and_those_that_fit_are_given():
    asked = []

    class Noted(Counted):
        def choose(self, shared, run, ahead):
            asked.append((shared, run, ahead))
            return numpy.array([len(asked)]) if len(asked) % 2 else None

    found = [int(rows[0]) for rows in Noted(SHARED, 4).choices(1000.0)]
    assert asked == [
        (shared, int(shared / parts), ahead)
        for shared in (500, 700, 850, 1000, 1200, 1400, 1700, 2000, 2800)
        for parts in (1, 1.5, 2, 3)
        for ahead in (0.0, 0.5)
    ]
    assert found == list(range(1, 73, 2))


def test_neighbours_move_one_end_then_two_and_then_change_any_two_rows():
    problem = problem_of((1,) * 8, one_each(8))
    runs = Counted(problem, 8)
    rows = mask("xx--xx--")
    assert next(runs.neighbours(numpy.array(mask("--------")), any_two=False), None) is None
    found = [one.tolist() for one in runs.neighbours(numpy.array(rows), any_two=True)]
    ends = [0, 7, 2, 1, 4, 3, 6, 5]

    def changed(*places):
        return [one ^ (place in places) for place, one in enumerate(rows)]

    pairs = [changed(a, b) for a, b in itertools.combinations(range(8), 2)]
    assert found[:8] == [changed(end) for end in ends]
    assert sorted(found[8:36]) == sorted(pairs)
    assert sorted(found[36:]) == sorted(pairs)
    assert found[8:36] != [changed(a, b) for a, b in itertools.combinations(ends, 2)]
    assert found == [one.tolist() for one in runs.neighbours(numpy.array(rows), any_two=True)]
    assert found[:36] == [one.tolist() for one in runs.neighbours(numpy.array(rows), any_two=False)]
    tight = Counted(problem, 5)
    fitting = [one for one in found if fullest(problem, tight.loads, one) <= 5 * GRANULE]
    assert 0 < len(fitting) < len(found)
    assert [one.tolist() for one in tight.neighbours(numpy.array(rows), any_two=True)] == fitting


def test_neighbours_leave_rows_alone_that_may_not_be_copied():
    problem = problem_of((1,) * 4, [(0,), (0,), (1,), (1,), (2,), (3,)])
    runs = Counted(problem, 4)
    rows = mask("x-x---")
    found = [one.tolist() for one in runs.neighbours(numpy.array(rows), any_two=True)]
    assert {index for one in found for index, (a, b) in enumerate(zip(one, rows, strict=True)) if a != b} == {
        0,
        2,
        4,
        5,
    }


def test_pairs_are_shuffled_in_the_same_way_every_time():
    pairs = _shuffled_pairs(range(9))
    assert pairs == _shuffled_pairs(range(9)) != sorted(pairs)
    assert sorted(pairs) == list(itertools.combinations(range(9), 2))

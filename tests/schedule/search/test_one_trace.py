"""The search for one trace: what is tried in which order, when it ends, and which candidate wins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import in_sizes
from penstock.schedule.facts.model import Schedule, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import make_plan
from penstock.schedule.search import paged
from penstock.schedule.search.draft import Task
from penstock.schedule.search.paged import OneTrace, Runs, _Candidate
from penstock.schedule.space.spans import Pieces
from tests.schedule.search.small_problems import GRANULE, one_each, problem_of
from tests.schedule.traces import machine

ROWS = numpy.array([True])


def search_of(
    problem: Problem, granules: float, effort: float = 1.0, kind: Callable[[Task], OneTrace] = OneTrace
) -> Any:
    return kind(Task(problem, Pieces(problem), int(granules * GRANULE), (None,), effort))


def candidate(period: int, busy: int = 0, rows: numpy.ndarray = ROWS) -> _Candidate:
    return _Candidate(period, busy, SimpleNamespace(transfers=()), rows)  # type: ignore[arg-type]


def relaxation(bound: float, *, kept: Sequence[float] = (), shared: float = 0.0) -> Relaxation:
    return Relaxation(bound, tuple(kept), (), (), shared)  # type: ignore[arg-type]


# What a search begins with.


def test_memory_that_is_spare_and_bytes_in_flight() -> None:
    problem = problem_of((1, 2, 4), one_each(3), hardware=machine(1e9, in_flight=50))
    search = search_of(problem, 6)
    assert (search.spare, search.in_flight, search.largest_span) == (2 * GRANULE, 50, GRANULE)
    narrow = search_of(replace(problem, hardware=machine(1e9, in_flight=10**6)), 6)
    assert narrow.in_flight == GRANULE


@pytest.mark.parametrize(("rows", "effort"), [(128, 1_000), (129, 20_000)])
def test_a_small_problem_is_searched_less(rows: int, effort: int) -> None:
    assert search_of(problem_of((1,) * rows, one_each(rows)), 9, effort=0.5).effort == effort


@pytest.mark.parametrize(
    ("sizes", "reads", "made", "granules", "kept"),
    [
        ((1, 1, 2), one_each(3), (), 3, (32, 32, 64)),  # two granules beside the third storage, room for one
        ((1, 1, 2), one_each(3), (), 3.5, (48, 48, 96)),
        ((1, 1, 2), one_each(3), (), 8, (64, 64, 128)),
        # At the steps that use the produced storage there is no room beside it for all, and later there is.
        ((1, 1, 4), [(2,), (2,), (0, 1), (0,), (1,)], (2,), 5, (32, 32, 32, 32, 128)),
    ],
)
def test_without_a_relaxation_every_gap_keeps_the_same_share(
    sizes: Sequence[int], reads: Any, made: Sequence[int], granules: float, kept: Sequence[float]
) -> None:
    search = search_of(problem_of(sizes, reads, made=made), granules)
    even = search._even_relaxation()
    assert sorted(even.kept) == sorted(float(one) for one in kept)
    assert (even.bound_ns, even.gaps, even.groups) == (0, search.gaps, search.groups)
    assert even.shared_bytes == pytest.approx(0.1 * search.spare)


# The stages.


class Staged(OneTrace):
    """Says which stages run; `rounded` is the period that rounding gives."""

    rounded = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.said: list[Any] = []

    def _round(self, relaxed: Relaxation) -> None:
        self.said.append(("round", relaxed.bound_ns, relaxed.kept))
        self.ranked = [candidate(self.rounded + k, rows=numpy.array([k])) for k in range(6)]
        self.loads.never_in = lambda rows: numpy.array([rows.tolist() == [0], False])  # type: ignore[method-assign]

    def _time_joined(self, rows: numpy.ndarray) -> None:
        self.said.append(rows.tolist())

    def _improve(self, runs: Runs, bound_ns: int) -> None:
        self.said.append(("improve", bound_ns))

    def _coarsen(self, runs: Runs) -> None:
        self.said.append("coarsen")


@pytest.mark.parametrize(
    ("rounded", "said"),
    [
        (10_101, [[7], [8], [0], [1], [2], [3], ("improve", 10_000)]),
        (10_100, []),
        (10_002, []),
        (10_001, ["coarsen"]),
        (10_000, ["coarsen"]),
    ],
)
def test_stages_end_near_the_bound(monkeypatch: Any, rounded: int, said: list[Any]) -> None:
    given = []

    def choices(self: Runs, shared: float) -> Iterator[numpy.ndarray]:
        given.append(shared)
        return iter([numpy.array([7]), numpy.array([8])])

    monkeypatch.setattr(Runs, "choices", choices)
    monkeypatch.setattr(Staged, "rounded", rounded)
    problem = problem_of((1, 1, 1), one_each(3), hardware=machine(1e9, in_flight=20))
    search = search_of(problem, 2, kind=Staged)
    streaming, stays = search.best(relaxation(10_000, kept=[0.0] * 3, shared=100.0))
    assert search.said == [("round", 10_000, (0.0,) * 3), *said]
    assert given == ([120.0] if len(said) > 1 else [])
    assert (streaming, stays) == (search.ranked[0].streaming, [True, False])


def test_without_a_relaxation_the_even_one_is_rounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(Runs, "choices", lambda *_: iter(()))
    search = search_of(problem_of((1, 1, 2), one_each(3)), 3, kind=Staged)
    search.best(None)
    assert search.said[0] == ("round", 0, (32.0, 32.0, 64.0))


# Rounding.


class Rounding(OneTrace):
    """Notes every way to round, which gives the period that `periods` has for it, or the last."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.said: list[tuple[int, int, int]] = []
        self.periods: dict[int, int] = {}

    def _time_rounded(self, kept: Sequence[float], margin: int, *, quantum: int, most: int) -> None:
        self.said.append((margin, quantum, most))
        if margin in self.periods:
            self.ranked = [candidate(self.periods[margin])]


def rounding(rows: int = 4, spare: int = 3000) -> Rounding:
    search = search_of(problem_of((1,) * 4, one_each(4)), 2, kind=Rounding)
    search.largest_span, search.spare, search.in_flight = 64, spare, 200
    search.loads = SimpleNamespace(step=range(rows))
    assert isinstance(search, Rounding)
    return search


MARGINS = [0, 30, 64, 100, 120, 128, 200, 256, 400, 480, 500, 512, 1000, 1500, 2000]


def quanta(best: int) -> list[tuple[int, int, int]]:
    """What is tried with the best amount: other sizes of copies, then rounding in units."""
    found = [(best, 0, 0), (best, 250, 500), (best, 500, 500), (best, 500, 1000)]
    for quantum in (125, 250, 500, 1000):
        some = {best, 0, quantum // 2, quantum, 2 * quantum}
        found += [(margin, quantum, 500) for margin in sorted(some)]
    return found


@pytest.mark.parametrize(
    ("periods", "best"),
    [
        ({}, 0),
        ({0: 900, 128: 800, 500: 700, 512: 700, 2000: 701}, 500),  # the first of those that are alike
        ({0: 900}, 0),
        ({30: 900}, 30),
    ],
)
def test_the_best_amount_of_free_memory_is_found_first(periods: dict[int, int], best: int) -> None:
    search = rounding()
    search.periods = periods
    search._round(relaxation(100, shared=1000.9))
    assert search.said == [*((margin, 0, 500) for margin in MARGINS), *quanta(best)]


def test_no_more_is_left_free_than_there_is() -> None:
    search = rounding(spare=500)
    search._round(relaxation(100, shared=1000.0))
    tried = sorted(
        {*(margin for margin in MARGINS if margin <= 500 and margin not in (30, 120, 480)), 5, 20, 80}
    )
    assert search.said == [*((margin, 0, 500) for margin in tried), *quanta(0)]


def test_of_a_large_problem_every_third_amount_is_tried() -> None:
    search = rounding(rows=8001)
    search._round(relaxation(100, shared=1000.0))
    assert search.said[:5] == [(margin, 0, 500) for margin in MARGINS[1::3]]
    assert search.said[5:] == quanta(0)
    search = rounding(rows=8000)
    search._round(relaxation(100, shared=1000.0))
    assert search.said[:15] == [(margin, 0, 500) for margin in MARGINS]


@pytest.mark.parametrize(("period", "ends"), [(10_001, True), (10_002, False)])
def test_rounding_ends_at_the_bound(period: int, ends: bool) -> None:
    search = rounding()
    search.periods = {64: period}
    search._round(relaxation(10_000, shared=1000.0))
    assert search.said[:3] == [(0, 0, 500), (30, 0, 500), (64, 0, 500)]
    assert (len(search.said) == 3) == ends


class Timed(OneTrace):
    """Notes what is timed, and how copies are joined."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.said: list[tuple[list[bool], Any]] = []

    def _time(self, rows: numpy.ndarray, join: Any = None) -> None:
        assert join is None or (join.func is in_sizes and join.keywords["breaks"] == self.breaks)
        self.said.append((rows.tolist(), join and join.keywords["most"]))


@pytest.mark.parametrize(
    ("granules", "margin", "quantum", "copied"),
    [
        (16, 0, 0, "xx" * 4),  # two granules of four are kept over each gap, six beside those of a step
        (16, 192, 0, "xxx" * 4),  # three of these six are left free
        (16, 384, 0, "xxxx" * 4),
        (16, 10**6, 0, "xxxx" * 4),
        (9, 0, 0, "xx" * 4 + "xx"),  # there is room for five
        (12, 0, 256, "xxxx" * 2),  # whole storages, and a half of them
    ],
)
def test_rounding_leaves_memory_free(granules: int, margin: int, quantum: int, copied: str) -> None:
    problem = problem_of((4,) * 4, one_each(4))
    search = search_of(problem, granules, kind=Timed)
    search._time_rounded([2.0 * GRANULE] * 4, margin, quantum=quantum, most=77)
    ((rows, most),) = search.said
    assert most == 77
    assert sum(rows) == len(copied)
    kept = [4 - sum(rows[4 * k : 4 * k + 4]) for k in range(4)]
    assert all(rows[4 * k : 4 * k + 4] == [n >= kept[k] for n in range(4)] for k in range(4))
    assert 4 + sum(kept) - min(kept) <= granules
    search._time_rounded([0.0] * 4, 5, quantum=0, most=0)
    assert search.said[1] == ([True] * 16, None)


def test_a_plan_as_long_as_its_bound_is_tried_with_larger_copies() -> None:
    search = search_of(problem_of((1,) * 4, one_each(4)), 3, kind=Timed)
    search.spare = 6400
    asked = []

    def choose(shared: int, run: int, ahead: float) -> numpy.ndarray | None:
        asked.append((shared, run, ahead))
        return None if run == 200 else numpy.array([run])

    search._coarsen(SimpleNamespace(choose=choose))
    assert asked == [(2 * copy, copy, 0.0) for copy in (100, 200, 400, 800, 1600)]
    assert search.said == [([copy], copy) for copy in (100, 400, 800, 1600)]


# Improving.


class Improved(OneTrace):
    """Rows have the periods that `periods` gives, and take 10 of the effort."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.said: list[int] = []
        self.periods: dict[int, int] = {}
        self.ranked = [candidate(1000, rows=numpy.array([0]))]
        self.effort = 1000

    def _time_joined(self, rows: numpy.ndarray) -> None:
        (number,) = rows.tolist()
        self.said.append(number)
        self.effort -= 10
        self.ranked.append(candidate(self.periods.get(number, 5000), rows=rows))
        self.ranked.sort(key=lambda one: one.period_ns)


class Neighbours:
    """Ten neighbours of every choice: those of n are 10 n + 1 to 10 n + 10."""

    def __init__(self) -> None:
        self.any_two: set[bool] = set()

    def neighbours(self, rows: numpy.ndarray, *, any_two: bool) -> Iterator[numpy.ndarray]:
        self.any_two.add(any_two)
        return (numpy.array([10 * int(rows[0]) + n]) for n in range(1, 11))


@pytest.mark.parametrize(
    ("periods", "bound", "effort", "said"),
    [
        ({}, 1, 1000, [*range(1, 11)]),
        ({3: 900, 4: 1, 31: 800}, 1, 1000, [1, 2, 3, 31, *range(311, 321)]),
        ({3: 1000}, 1, 1000, [*range(1, 11)]),  # no faster
        ({3: 900}, 1, 50, [1, 2, 3, 31, 32]),
        ({3: 909}, 900, 1000, [1, 2, 3]),  # near the bound
        ({3: 910}, 900, 1000, [1, 2, 3, *range(31, 41)]),
        ({}, 1, 11, [1, 2]),
        ({}, 1, 1, [1]),
        ({}, 1, 0, []),
    ],
)
def test_the_first_neighbour_that_is_faster_takes_the_place_of_the_best(
    periods: dict[int, int], bound: int, effort: int, said: list[int]
) -> None:
    search = search_of(problem_of((1,) * 4, one_each(4)), 2, kind=Improved)
    search.periods, search.effort = periods, effort
    neighbours = Neighbours()
    search._improve(neighbours, bound)
    assert search.said == said
    assert neighbours.any_two == ({True} if said else set())


@pytest.mark.parametrize(("rows", "any_two"), [(128, True), (129, False)])
def test_any_two_rows_are_changed_in_a_small_problem(rows: int, any_two: bool) -> None:
    search = search_of(problem_of((1,) * rows, one_each(rows)), 9, kind=Improved)
    neighbours = Neighbours()
    search._improve(neighbours, 1)
    assert neighbours.any_two == {any_two}


# Timing.


def test_a_choice_is_joined_once_and_pays_for_its_copies() -> None:
    search = search_of(problem_of((1,) * 4, one_each(4)), 2, kind=Timed)
    rows = numpy.array([True, False, True, False])
    said: list[Any] = search.said
    search._time = lambda rows, join: said.append((rows.tolist(), join))
    search._time_joined(rows)
    search._time_joined(rows.copy())
    search._time_joined(~rows)
    assert said == [(rows.tolist(), search._join), ((~rows).tolist(), search._join)]
    search.effort = 5
    search.joiner = SimpleNamespace(fastest=lambda pieces: list(pieces)[:1])
    pieces = [Transfer(0, 64, 0, -1), Transfer(64, 128, 1, 0)]
    assert search._join(pieces) == pieces[:1]
    assert search.effort == 3
    search.effort = 0
    search._time_joined(numpy.array([True] * 4))
    assert len(said) == 2
    search.effort = 1
    search._time_joined(numpy.array([True] * 4))
    assert len(said) == 3


def test_what_is_produced_may_wait_to_be_copied_out() -> None:
    problem = problem_of((1, 1, 1), [(0,), (1,), (2,), (0,)], made=(0,))
    search = search_of(problem, 2)
    search.spare = 1600
    produced = search.loads.produced
    assert produced.any()
    assert not produced.all()
    assert list(search._put_off(produced)) == [0, 100, 400, 800, 1600]
    assert list(search._put_off(~produced)) == [0]
    search.spare = 20
    assert list(search._put_off(produced)) == [0, 1, 5, 10, 20]
    search.spare = 2
    assert list(search._put_off(produced)) == [0, 1, 2]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Schedule]]:
    """Gives the schedules that are timed the periods of a list, and returns the list of the schedules."""

    def script(periods: list[int], enoughs: list[float] | None = None) -> list[Schedule]:
        seen: list[Schedule] = []
        enoughs = [] if enoughs is None else enoughs

        def period(trace: object, schedule: Schedule, *_: object, enough: float, launched: object) -> int:
            enoughs.append(enough)
            seen.append(schedule)
            return periods[len(seen) - 1]

        monkeypatch.setattr(paged, "steady_period_ns", period)
        return seen

    return script


def test_the_fastest_eight_are_ranked_then_by_the_time_of_the_link(scripted: Any) -> None:
    search = search_of(problem_of((1,) * 4, one_each(4), hardware=machine(1e9, latency_ns=1)), 2)
    enoughs: list[float] = []
    scripted([500, 300, 400, 300, 700, 600, 900, 800, 650, 20_000], enoughs)
    choices = ["xxxx", "xxx-", "-xxx", "-x-x", *["xxxx"] * 6]
    assert (search.period_ns, search._worst_ns()) == (float("inf"), float("inf"))
    for n, text in enumerate(choices):
        search._time(numpy.array([one == "x" for one in text]))
        assert (search._worst_ns() < float("inf")) == (n >= 7)
    assert [(one.period_ns, one.busy_ns) for one in search.ranked] == [
        (300, 130),
        (300, 195),
        (400, 195),
        *((period, 260) for period in (500, 600, 650, 700, 800)),
    ]
    assert search.ranked[0].rows.tolist() == [False, True, False, True]
    assert (search.period_ns, search._worst_ns()) == (300, 800)
    assert enoughs == [float("inf")] * 8 + [900, 800]  # a longer period need not be known


@pytest.mark.parametrize(("worst", "timed"), [(260, 0), (261, 1)])
def test_what_keeps_the_link_for_longer_than_the_worst_is_not_timed(
    scripted: Any, worst: int, timed: int
) -> None:
    search = search_of(problem_of((1,) * 4, one_each(4), hardware=machine(1e9, latency_ns=1)), 2)
    search.ranked = [candidate(worst)] * 8
    seen = scripted([10])
    search._time(numpy.array([True] * 4))
    assert len(seen) == timed


@pytest.mark.parametrize(
    ("wrap", "granules", "starts"),
    [
        ("overlap", 2, [[-2, -1, 0, 1]]),
        ("overlap", 4, [[-4, -3, -2, -1]]),
        ("barrier", 2, [[-2, -1, 0, 1], [-2, 0, 1]]),
        ("barrier", 4, [[-4, -3, -2, -1], [-4, 0]]),
    ],
)
def test_with_a_barrier_copies_for_the_first_step_alone_may_be_early_too(
    scripted: Any, wrap: Any, granules: int, starts: list[list[int]]
) -> None:
    search = search_of(problem_of((1,) * 4, one_each(4), wrap=wrap), granules)
    seen = scripted([10, 20])
    search._time(numpy.array([True] * 4), partial(in_sizes, most=0, breaks=()))
    assert [[t.after for t in one.transfers] for one in seen] == starts
    assert {(one.graph, one.drops) for one in seen} == {(0, ())}


def test_a_copy_that_finds_no_memory_is_no_candidate(scripted: Any) -> None:
    problem = problem_of((1, 1, 1), [(0,), (0,), (1,), (2,), (0,)], made=(0,))
    search = search_of(problem, 1)
    search.spare = 10 * GRANULE  # puts off more than there is room for
    seen = scripted(list(range(100, 109)))
    search._time(numpy.array([True] * len(search.loads.step)))
    assert 1 <= len(seen) == len(search.ranked) < 5


# The best that there is.


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
def test_no_choice_of_rows_is_faster_than_the_plan(
    sizes: Sequence[int], reads: Any, granules: int, latency: int, wrap: Any
) -> None:
    """Of all choices, with single copies and with those joined up to some sizes."""
    problem = problem_of(sizes, reads, wrap=wrap, hardware=machine(2e9, latency_ns=latency))
    search = search_of(problem, granules)
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

"""The search for a paged arena: one method, several methods that share it, and runs that take turns."""

from dataclasses import replace

import numpy
import pytest

from penstock.schedule.bound.gaps import gaps_of
from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Holding, Loads, Streaming
from penstock.schedule.facts.model import Arena, Drop, Range, Schedule, Transfer
from penstock.schedule.search import paged
from penstock.schedule.search.draft import Draft, Task
from penstock.schedule.search.paged import _clipped, _draft, _search_runs, _share_for_all
from penstock.schedule.space.spans import Block, Pieces
from tests.schedule.search.small_problems import GRANULE, one_each, problem_of
from tests.schedule.traces import machine

EMPTY = Draft(0, (), (), (), ())


def task_of(problem, granules, bounds=(None,)):
    relaxed = tuple(None if one is None else Relaxation(one, (), (), (), 0.0) for one in bounds)
    return Task(problem, Pieces(problem), int(granules * GRANULE), relaxed)


# One draft of several searches.


class Lasting(Draft):
    """A draft with periods that a test gives."""

    def __init__(self, *periods):
        super().__init__(0, (), (), (), ())
        object.__setattr__(self, "given", list(periods))

    def periods_ns(self, problem):
        found = self.given  # type: ignore[attr-defined]
        return found


@pytest.mark.parametrize(
    ("bounds", "period", "other", "wins"),
    [
        ((10_000,), 10_100, 1, False),  # near the bound nothing else is tried
        ((10_000,), 10_101, 10_100, True),
        ((10_000,), 10_101, 10_101, False),
        ((10_000,), 10_101, None, False),
        ((None,), 10_000, 9_999, True),
        ((None,), 10_000, 10_000, False),
    ],
)
def test_one_method_is_also_searched_as_runs_where_it_is_not_near_its_bound(
    monkeypatch, bounds, period, other, wins
):
    first, second = Lasting(period), None if other is None else Lasting(other)
    monkeypatch.setattr(
        paged, "OneTrace", lambda task: type("One", (), {"best": lambda *_: ("one", "stays")})()
    )
    monkeypatch.setattr(
        paged, "_draft", lambda pieces, streams, stays: first if streams == ("one",) else None
    )
    monkeypatch.setattr(paged, "_search_runs", lambda task: second)
    assert paged.search(task_of(problem_of((1, 1), one_each(2)), 1, bounds)) is (second if wins else first)


@pytest.mark.parametrize(
    ("bounds", "wins"),
    [((9_000, 1_000), False), ((9_000, 900), True), ((9_000, None), True), ((10_000, 0), False)],
)
def test_bounds_of_all_methods_are_summed(monkeypatch, bounds, wins):
    first, second = Lasting(3_000, 7_100), Lasting(2_000, 8_000)
    monkeypatch.setattr(paged, "_share_for_all", lambda problem, pieces, cap: ("streams", cap))
    monkeypatch.setattr(paged, "_draft", lambda pieces, *given: first if given == ("streams", 64) else None)
    monkeypatch.setattr(paged, "_search_runs", lambda task: second)
    problem = problem_of((1, 1), one_each(2), one_each(1))
    assert paged.search(task_of(problem, 1, bounds)) is (second if wins else first)


def test_a_draft_has_what_stays_and_what_moves():
    problem = problem_of((2, 1, 1, 1), [(0,), (1,), (2,), (3,)])
    transfers = (Transfer(192, 256, 2, -1), Transfer(256, 320, 3, 2))
    drops = (Drop(192, 256, 2), Drop(256, 320, 3))
    held = Holding(drops, (Range(192, 256),), 999)
    stays = [True, True, True, False, False]
    one = _draft(Pieces(problem), [Streaming(transfers, lambda: held)], stays)
    resident = (Range(0, 192),)
    assert one == Draft(999, (), resident, (*resident, Range(192, 256)), ((transfers, drops),))
    idle = Streaming((), lambda: Holding((), (), 1000))
    two = _draft(Pieces(problem), [Streaming(transfers, lambda: held), idle], stays)
    moved = ((transfers, drops), ((), ()))
    assert two == Draft(1000, (), resident, resident, moved, ((*resident, Range(192, 256)), resident))


def test_what_stays_is_not_joined_over_the_begin_of_a_segment():
    problem = problem_of((1, 1), one_each(2))
    segments = (Range(0, 64), Range(64, 128))
    apart = replace(problem, arena=replace(problem.arena, segments=segments))
    found = _draft(Pieces(apart), [Streaming((), lambda: Holding((), (), 0))], [True, True])
    assert found.resident == (Range(0, 64), Range(64, 128))


# Several methods.


def held_at_most(problem, number, stays):
    """The most bytes at a step of a method: what it reads or keeps, and so many granules of all others."""
    return max(
        sum(
            storage.nbytes if s in step.reads or s in problem.keep else GRANULE * stays[s]
            for s, storage in enumerate(problem.storages)
        )
        for step in problem.traces[number].steps
    )


@pytest.mark.parametrize(
    ("sizes", "methods", "granules", "keep", "share"),
    [
        ((64, 64, 64), [one_each(3), [(0,), (2,)]], 128, (), 32),
        ((64, 64, 64), [one_each(3), [(0,), (2,)]], 127, (), 31),
        ((64, 64, 64), [one_each(3), [(2,)]], 64, (), 0),
        ((64, 64, 64, 16), [one_each(2), [(2,), (0,)], [(3,)]], 150, (3,), 35),
        ((64, 64, 64, 16), [one_each(2), [(2,), (0,)]], 150, (), 43),
        ((32, 16), [one_each(2), one_each(2)], 41, (), 39),
        ((64, 64, 64), [[(0,), (0,), (1,)], [(2,), (0,)]], 128, (), 32),
    ],
)
def test_the_largest_share_that_fits_beside_every_step_of_every_method_is_tried_first(
    sizes, methods, granules, keep, share
):
    """Here copies take as long as nothing else, so that the largest share is the fastest."""
    problem = problem_of(sizes, *methods, keep=keep, hardware=machine(1e8))
    streams, stays = _share_for_all(problem, Pieces(problem), granules * GRANULE)

    def count(given, s):
        return sizes[s] if s in keep else sizes[s] * given // 64

    def fits(given):
        counts = [count(given, s) if _is_read(problem, s) else 0 for s in range(len(sizes))]
        return all(held_at_most(problem, w, counts) <= granules * GRANULE for w in range(len(methods)))

    assert max(given for given in range(65) if fits(given)) == share
    spans = [span for group in Pieces(problem).groups for span in group.spans]
    kept = {span.start // GRANULE for span, stay in zip(spans, stays, strict=True) if stay}
    expected = {
        problem.arena.layout[s] // GRANULE + n
        for s in range(len(sizes))
        if _is_read(problem, s)
        for n in range(count(share, s))
    }
    assert kept == expected
    for number, one in enumerate(streams):
        copied = {t.start // GRANULE + n for t in one.transfers for n in range((t.stop - t.start) // GRANULE)}
        used = {s for step in problem.traces[number].steps for s in step.reads}
        assert copied == {
            problem.arena.layout[s] // GRANULE + n for s in used for n in range(count(share, s), sizes[s])
        }


def _is_read(problem, s):
    return any(s in step.reads for trace in problem.traces for step in trace.steps)


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_of_all_shares_the_fastest_is_taken(wrap):
    """Where compute hides copies, memory is better left to copies that are on their way."""
    problem = problem_of((64, 64, 64), one_each(3), [(1,), (2,)], wrap=wrap, hardware=machine(3e12))
    slow = replace(problem, traces=tuple(_slower(trace, 3_000) for trace in problem.traces))
    slow = replace(slow, hardware=machine(1e9))
    pieces = Pieces(slow)
    streams, stays = _share_for_all(slow, pieces, 120 * GRANULE)
    times = {}
    for share in range(29):
        assert (held_at_most(slow, 0, [share] * 3) <= 120 * GRANULE) == (share < 29)
        times[share] = sum(_period_ns(slow, number, share) for number in range(2))
    assert held_at_most(slow, 0, [29] * 3) > 120 * GRANULE
    best = min(times.values())
    chosen = max(share for share, ns in times.items() if ns == best)
    assert 0 < chosen < 28
    assert sum(stays) == 3 * chosen
    assert best == sum(
        steady_period_ns(trace, Schedule(number, one.transfers, (), 0), slow.hardware, wrap)
        for number, (trace, one) in enumerate(zip(slow.traces, streams, strict=True))
    )


def _period_ns(problem, number, share):
    """The period of a method when so many of the 64 granules of each storage stay."""
    groups, trace = Pieces(problem).groups, problem.traces[number]
    gaps = gaps_of(groups, trace, number=number)
    loads = Loads(groups, gaps, len(trace.steps), breaks=(), number=number)
    resident = numpy.array([n < share for _ in groups for n in range(64)])
    early = len(trace.steps) - 1 if problem.wrap == "overlap" else 0
    one = loads.stream(loads.after_first([share] * len(gaps)), resident, cap=120 * GRANULE, early=early)
    assert one is not None
    return steady_period_ns(trace, Schedule(number, one.transfers, (), 0), problem.hardware, problem.wrap)


def _slower(trace, ns):
    return replace(trace, steps=tuple(replace(step, lead_ns=0, read_ns=ns) for step in trace.steps))


def test_what_is_produced_never_stays():
    problem = problem_of(
        (32, 64, 32), [(1,), (0,), (2,), (1,)], [(0,), (2,)], made=(1,), hardware=machine(1e8)
    )
    streams, stays = _share_for_all(problem, Pieces(problem), 104 * GRANULE)
    spans = [span for group in Pieces(problem).groups for span in group.spans]
    kept = {span.start // GRANULE for span, stay in zip(spans, stays, strict=True) if stay}
    first = problem.arena.layout[1] // GRANULE
    assert kept
    assert not kept & set(range(first, first + 64))
    assert any(t.direction == "out" for t in streams[0].transfers)


# Runs that take turns.


def segmented():
    """Two files, the second of which begins inside of a granule of the layout."""
    problem = problem_of((1, 1, 1), one_each(3), keep=(1,))
    segments = (Range(0, 128), Range(200, 264))
    arena = Arena("paged", "anonymous", GRANULE, (0, 64, 200), segments)
    return replace(problem, arena=arena)


def test_runs_are_blocks_of_whole_granules(monkeypatch):
    given = []

    def record(task, blocks):
        given.extend(blocks)

    monkeypatch.setattr(paged, "search_blocks", record)
    assert _search_runs(task_of(segmented(), 3)) is None
    assert given == [
        Block(0, Range(0, 64), 0, 64, ((0,),), False),
        Block(1, Range(64, 128), 0, 64, ((1,),), True),
        Block(2, Range(192, 264), 0, 128, ((2,),), False),
    ]
    produced = problem_of((1, 1), [(0,), (1,), (0,)], made=(0,))
    given.clear()
    _search_runs(task_of(produced, 2))
    assert [(one.produced, one.reads) for one in given] == [(False, ((1,),)), (True, ((0, 1, 2),))]


def test_a_draft_is_cut_to_segments():
    found = Draft(
        5,
        (),
        (Range(192, 264), Range(0, 64)),
        (Range(192, 256),),
        (((Transfer(192, 264, 2, 0), Transfer(64, 128, 1, 0)), (Drop(192, 264, 2), Drop(128, 192, 0))),),
        ((Range(192, 200), Range(256, 264)),),
    )
    assert _clipped(found, segmented().arena) == Draft(
        5,
        (),
        (Range(200, 264), Range(0, 64)),
        (Range(200, 256),),
        (((Transfer(200, 264, 2, 0), Transfer(64, 128, 1, 0)), (Drop(200, 264, 2), Drop(128, 192, 0))),),
        ((Range(200, 200), Range(256, 264)),),
    )


def test_a_draft_of_runs_is_cut(monkeypatch):
    found = replace(EMPTY, resident=(Range(192, 264),))
    monkeypatch.setattr(paged, "search_blocks", lambda *_: found)
    cut = _search_runs(task_of(segmented(), 3))
    assert cut == replace(EMPTY, resident=(Range(200, 264),))

"""The search for a paged arena that several methods share."""

from dataclasses import replace

import numpy
import pytest

from penstock.schedule.bound.gaps import gaps_of
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Loads
from penstock.schedule.facts.model import Schedule
from penstock.schedule.search.paged import _share_for_all
from penstock.schedule.space.spans import Pieces
from tests.schedule.search.small_problems import GRANULE, one_each, problem_of
from tests.schedule.traces import machine


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

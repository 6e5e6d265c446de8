"""Which neighbours are copied together, and what that brings."""

import itertools
from dataclasses import replace
from random import Random
from statistics import mean

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.transfers import Joiner, in_sizes
from penstock.schedule.facts.model import Schedule, Step, Trace, Transfer
from tests.schedule.traces import machine


def joined(pieces, most, breaks=None):
    return [(t.start, t.stop, t.after) for t in in_sizes(pieces, most, breaks or set())]


def test_neighbours_wait_for_the_room_of_the_last_up_to_a_size():
    pieces = [Transfer(0, 10, 3, 0), Transfer(10, 20, 3, 1), Transfer(20, 30, 4, 2)]
    assert joined(pieces, 20) == [(0, 20, 1), (20, 30, 2)]
    assert joined(pieces, 30) == [(0, 30, 2)]


def test_a_piece_that_may_start_too_late_for_the_first_stays_apart():
    assert len(joined([Transfer(0, 10, 2, 0), Transfer(10, 20, 3, 2)], 100)) == 2


def test_pieces_that_do_not_touch_or_begin_a_segment_stay_apart():
    pieces = [Transfer(0, 10, 2, 0), Transfer(10, 20, 2, 0), Transfer(30, 40, 2, 0)]
    assert joined(pieces, 100) == [(0, 20, 0), (30, 40, 0)]
    assert joined(pieces, 100, {10}) == [(0, 10, 0), (10, 20, 0), (30, 40, 0)]


def random_pieces(dice):
    """One piece for each of a few steps; memory for a few of them at a time."""
    n, slots = dice.randint(3, 7), dice.randint(1, 3)
    steps = tuple(Step(f"s{k}", (k,), dice.randint(0, 9), dice.randint(1, 30)) for k in range(n))
    trace = Trace("f", 0, "", steps, dice.randint(0, 9), 0, "modelled")
    sizes = [dice.randint(1, 40) for _ in range(n)]
    edges = list(itertools.accumulate(sizes, initial=0))
    pieces = [
        Transfer(start, stop, k, max(k - slots, k - n))
        for k, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    return trace, replace(machine(1e9), link_latency_ns=dice.randint(0, 40)), pieces


def every_way(pieces):
    """All ways to join neighbours that can work."""
    ways = []
    for cuts in itertools.product((False, True), repeat=len(pieces) - 1):
        joined = [pieces[0]]
        for piece, cut in zip(pieces[1:], cuts, strict=True):
            if cut:
                joined.append(piece)
            else:
                joined[-1] = replace(joined[-1], stop=piece.stop, after=piece.after)
        if all(t.after < t.step for t in joined):
            ways.append(joined)
    return ways


def test_the_fastest_way_is_near_the_best_of_all():
    """Never slower than not to join at all, and in the mean within 1 % of the best that there is."""
    times = []
    for seed in range(300):
        trace, hardware, pieces = random_pieces(Random(seed))

        def period(transfers, trace=trace, hardware=hardware):
            return steady_period_ns(trace, Schedule(0, tuple(transfers), (), 0), hardware, "overlap")

        found = Joiner(trace, hardware, {0}).fastest(pieces)
        assert period(found) <= period(pieces)
        assert sum(t.stop - t.start for t in found) == sum(t.stop - t.start for t in pieces)
        times.append(period(found) / min(period(way) for way in every_way(pieces)))
    assert mean(times) <= 1.01


def test_nothing_to_copy_is_nothing_to_join():
    trace, hardware, _ = random_pieces(Random(0))
    assert Joiner(trace, hardware, {0}).fastest([]) == []

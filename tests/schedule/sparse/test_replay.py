"""Replays of routes: small cases by hand, the optimum against a search of all choices, and growing pools."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.sparse.replay import Moved, ladder_of, replay
from tests.hunt import scaled
from tests.schedule.sparse.recordings import PAGE, recording, recordings

ONE = [(8, PAGE, 0)]
"""One table of 8 units of a page."""


def pages(profile, count):
    """The pages that are missed by penstock, LRU, LFU and Belady in a pool of so many."""
    done = replay(profile, profile.pool(count * PAGE))
    assert done.pool_bytes == count * PAGE
    moved = (done.penstock.nbytes, done.lru.nbytes, done.lfu.nbytes, done.least_bytes)
    return tuple(one // PAGE for one in moved)  # type: ignore[return-value]


def test_a_pool_of_one_unit_moves_the_distinct_units_of_each_turn():
    tables = [(8, PAGE, 0), (8, 2 * PAGE, 1)]
    profile = recording(tables, [[(0, [1, 2, 5]), (1, [3])], [(0, []), (1, [0, 7])], [(0, [1]), (1, [7])]])
    done = replay(profile, profile.pool(1))
    assert done.pool_bytes == 2 * PAGE
    assert done.asked == Moved(8, (3 + 2 + 4 + 1 + 2) * PAGE)
    assert done.penstock == done.lru == done.lfu == done.asked
    assert done.cut == 2  # 3 pages of the first read, and twice two of the fourth


def test_a_pool_for_all_moves_each_unit_once():
    profile = recording(ONE, [[(0, [1, 2])], [(0, [2, 3])], [(0, [1])]])
    assert pages(profile, 8) == (3, 3, 3, 3)


def test_a_cycle_that_is_too_long_hits_nothing_with_lru():
    profile = recording(ONE, [[(0, [unit])] for unit in (0, 1, 2, 0, 1, 2, 0, 1, 2)])
    own, lru, lfu, least = pages(profile, 2)
    # Belady: 0 1 2(drops 1) hit-0 1(drops 0) hit-2 0(drops 2) hit-1 2: 3 hits of 9.
    assert (lru, least) == (9, 6)
    assert least <= own <= 9
    assert least <= lfu <= 9


def test_what_is_asked_for_often_stays():
    asked = [0, 0, 0, 1, 2, 0, 3, 4, 0]
    profile = recording(ONE, [[(0, [unit])] for unit in asked])
    # A page for 0, and one through which the others go; LRU drops 0 twice, before it is asked for again.
    assert pages(profile, 2) == (5, 7, 5, 5)


def test_units_of_one_read_are_needed_at_once():
    profile = recording(ONE, [[(0, [0])], [(0, [1, 2])], [(0, [0])]])
    assert pages(profile, 2) == (4, 4, 4, 4)  # 0 cannot stay beside 1 and 2
    assert pages(profile, 3) == (3, 3, 3, 3)


def test_the_second_table_of_a_turn_is_brought_ahead_and_counted_once():
    profile = recording([(8, PAGE, 0), (8, PAGE, 0)], [[(0, [1, 2]), (1, [1, 2])]] * 3)
    assert pages(profile, 4) == (4, 4, 4, 4)
    assert pages(profile, 2) == (12, 12, 12, 12)
    own, _, _, least = pages(profile, 3)
    assert (own, least) == (8, 8)  # one of four stays over each of two calls in either table


def test_rows_that_share_a_page_are_read_with_it_and_bounded_by_pages():
    profile = recording([(4096, 1024, 0)], [[(0, [0, 1])], [(0, [2])], [(0, [8])], [(0, [3])]])
    done = replay(profile, profile.pool(PAGE))
    assert (done.penstock.nbytes, done.asked.nbytes) == (3 * PAGE, 4 * PAGE)  # a row is read with its page
    assert (done.least_bytes, done.exact) == (3 * PAGE, False)  # 2 lies in the page of 0 and 1


def test_routes_without_a_unit_and_pools_of_other_tables_are_refused():
    with pytest.raises(PayloadError, match="none of the 1 calls of these routes asks for a unit"):
        recording(ONE, [[(0, [])]])
    profile = recording(ONE, [[(0, [1])]])
    other = recording([*ONE, *ONE], [[(0, [1])]])
    with pytest.raises(PayloadError, match="recorded of other tables"):
        replay(profile, other.pool(PAGE))


@pytest.mark.random
@settings(max_examples=scaled(25))
@given(recordings())
def test_the_optimum_is_what_a_search_of_all_choices_finds(profile):
    asked = [(ask.read, unit) for call in profile.routes.calls for ask in call for unit in ask.units]
    reads = [ask for call in profile.routes.calls[:6] for ask in call][:8]
    few = recording(
        [(8 * 2, PAGE, t) for t in range(len(profile.routes.reads))], [[(a.read, a.units) for a in reads]]
    )
    assert asked
    largest = max(len(ask.units) for ask in reads)
    for room in range(largest, largest + 3):
        done = replay(few, few.pool(room * PAGE))
        assert done.exact
        assert done.least_bytes == PAGE * _searched(
            [frozenset((a.read, u) for u in a.units) for a in reads], room
        )


def _searched(reads, room):
    """The fewest units that come, over all choices of what stays after each read."""

    @cache
    def missed(k, held):
        if k == len(reads):
            return 0
        stays = held - reads[k]
        free = room - len(reads[k])
        later = (missed(k + 1, reads[k] | some) for some in _choices(stays, free))
        return len(reads[k] - held) + min(later)

    return missed(0, frozenset())


def _choices(units, free):
    return (frozenset(some) for some in combinations(sorted(units), min(free, len(units))))


def turn_pages(profile):
    """The most pages that one turn asks for: all reads of a call whose operand is the same."""
    most = 0
    reads = profile.reads()
    for call in profile.routes.calls:
        turns = {}
        for ask in call:
            taken = len(ask.units) * reads[ask.read].unit_nbytes // PAGE
            turns[reads[ask.read].route] = turns.get(reads[ask.read].route, 0) + taken
        most = max(most, *turns.values())
    return most


@pytest.mark.random
@settings(max_examples=scaled(10))
@given(st.one_of(recordings(), recordings(pages=(1, 1))))
def test_hits_never_fall_as_the_pool_grows(profile):
    """For units of one size, and pools that hold what each turn asks for."""
    least = turn_pages(profile)
    before = (1 << 60,) * 4
    for count in range(least, least + 14):
        now = pages(profile, count)
        assert all(one <= other for one, other in zip(now, before, strict=True))
        assert now[3] <= min(now)
        before = now


@pytest.mark.random
@settings(max_examples=scaled(10))
@given(recordings(pages=(2, 1)))
def test_hits_never_fall_where_what_is_asked_together_has_one_size(profile):
    """Of LFU that is not true: it drops halves. It is true of LRU and of the bound for any sizes."""
    least = turn_pages(profile)
    before = (1 << 60,) * 3
    for count in range(least, least + 14):
        own, lru, lfu, bound = pages(profile, count)
        now = (own, lru, bound)
        assert all(one <= other for one, other in zip(now, before, strict=True))
        assert bound <= min(own, lru, lfu)
        before = now


@pytest.mark.random
@settings(max_examples=scaled(10))
@given(recordings(pages=(3, 1)))
def test_the_ladder_ends_where_each_unit_comes_once(profile):
    first, *_, last = (replay(profile, pool) for pool in ladder_of(profile))
    assert not first.cut
    assert not last.exact
    assert last.penstock.nbytes == last.lru.nbytes == last.lfu.nbytes == last.least_bytes

"""The search over addresses: which blocks may stream, in how much memory, what is tried, and what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from penstock.schedule.bound.gaps import gaps_of
from penstock.schedule.bound.relaxation import Relaxation
from penstock.schedule.facts.model import Transfer, Wrap
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import make_plan
from penstock.schedule.search import contiguous
from penstock.schedule.search.contiguous import _Candidate, _Family, _Search
from penstock.schedule.search.draft import Draft, Occupancy, Task
from penstock.schedule.space.addresses import Addressing
from penstock.schedule.space.spans import Pieces
from tests.schedule.search.small_problems import GRANULE, Reads, one_each, problem_of
from tests.schedule.traces import machine

contiguous_of = partial(problem_of, kind="contiguous")


def search_of(problem: Problem, granules: float = 1, effort: float = 1.0) -> _Search:
    pieces = Pieces(problem)
    return _Search(Task(problem, pieces, int(granules * GRANULE), (), effort), pieces.blocks)


def test_a_search_begins_with_whole_granules_and_its_effort() -> None:
    problem = contiguous_of((1, 2), [(0,), (1,)], [(0,)])
    search = search_of(problem, 2.5, effort=0.5)
    assert (search.cap, search.effort, search.compute_ns) == (2 * GRANULE, 30_000, 30)


# Which blocks may stream.


def test_families_are_ranges_of_sizes_and_all_beside_two_much_larger_ones() -> None:
    search = search_of(contiguous_of((1, 1, 2, 8, 16, 4), one_each(6), keep=(5,)))
    found = [(set(one.able), one.read, one.ends) for one in search._families([1.0] * 6)]
    assert found == [
        ({0, 1}, GRANULE, ()),
        ({0, 1, 2}, 2 * GRANULE, ()),
        ({0, 1, 2, 3}, 8 * GRANULE, ()),
        ({3}, 8 * GRANULE, ()),
        ({0, 1, 2, 3, 4}, 16 * GRANULE, ()),
        ({2, 3, 4}, 16 * GRANULE, ()),
        ({3, 4}, 16 * GRANULE, ()),
        ({0, 1, 2}, 2 * GRANULE, (3, 4)),
    ]


@pytest.mark.parametrize(
    ("sizes", "reads", "ends"),
    [
        ((1, 2, 4, 4), one_each(4), [(0, 1), (2, 3)]),
        ((1, 2, 3, 4), one_each(4), []),  # 3 is not twice 2
        ((2, 4), one_each(2), []),  # nothing would stream between them
        ((1, 2, 4, 4), [(0, 2), (1,), (3,)], [(1,), (2, 3)]),  # 0 is read with 2
        ((1, 2, 4, 4), [(0,), (0, 1, 3), (2,)], [(), (2, 3)]),
    ],
)
def test_what_may_stream_between_two_large_blocks(
    sizes: Sequence[int], reads: Reads, ends: list[tuple[int, ...]]
) -> None:
    *_, last = search_of(contiguous_of(sizes, reads))._families([1.0] * len(sizes))
    assert ([tuple(sorted(last.able)), last.ends] if last.ends else []) == ends


@pytest.mark.parametrize("count", [20, 21])
def test_of_many_sizes_some_eight_and_the_largest_are_tried(count: int) -> None:
    sizes = range(1, count + 1)
    found = search_of(contiguous_of(sizes, one_each(count)))._families([1.0] * count)
    expected = [
        frozenset(s for s, size in enumerate(sizes) if share * largest <= size <= largest)
        for largest in (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, count)
        for share in (0, 0.1, 0.5)
    ]
    assert [one.able for one in found] == list(dict.fromkeys(expected))


def test_what_a_step_reads_at_most_and_with_what() -> None:
    search = search_of(contiguous_of((1, 2, 4, 8), [(0, 1), (1, 2)], [(2, 3), (0,)]))
    assert search._most_read({0, 1, 2, 3}) == 12 * GRANULE
    assert search._most_read({0, 1, 2}) == 6 * GRANULE
    assert search._most_read({0, 1}) == 3 * GRANULE
    assert search._most_read(()) == 0
    assert search._read_with([0]) == {0, 1}
    assert search._read_with([2]) == {1, 2, 3}
    assert search._read_with([0, 3]) == {0, 1, 2, 3}


def test_memory_that_streaming_blocks_may_share() -> None:
    family = _Family(frozenset({0}), 100, (1.0,))
    rooms = (1.0, 1.06, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
    for in_flight, more in ((0, ()), (1000, (600, 1100, 1600, 2100, 3100))):
        hardware = machine(1e9, in_flight=in_flight)
        search = search_of(contiguous_of((2,), [(0,)], hardware=hardware))
        expected = {-(-int(nbytes) // GRANULE) * GRANULE for nbytes in (*(100 * r for r in rooms), *more)}
        assert search._rings(family) == expected


def test_a_block_is_wanted_as_much_as_the_relaxation_copies_of_it_at_most() -> None:
    """Blocks 0 and 1 are one group; block 2 has two gaps."""
    problem = contiguous_of((1, 2, 4), [(0, 1), (2,), (2,)])
    search, groups = search_of(problem), Pieces(problem).copied
    gaps = gaps_of(groups, problem.traces[0])
    assert [(gap.group, gap.opens, gap.closes) for gap in gaps] == [(0, 0, 3), (1, 1, 2), (1, 2, 4)]
    one = Relaxation(0, (96.0, 256.0, 64.0), gaps, groups, 0.0)
    other = Relaxation(0, (192.0, 16.0, 256.0), gaps, groups, 0.0)
    assert search._copied([one]) == [32.0, 64.0, 192.0]
    assert search._copied([one, other]) == [32.0, 64.0, 240.0]


# Which of them do stream.


@pytest.mark.parametrize(
    ("sizes", "wanted", "able", "room", "resident"),
    [
        ((1,) * 6, (1,) * 6, range(6), 4, {0, 2, 3, 5}),  # a third of each is owed
        ((1,) * 4, (1,) * 4, range(4), 2, {1, 3}),  # exactly half, and at once
        ((1,) * 4, (0, 1, 1, 0), range(4), 2, {0, 3}),
        ((1,) * 4, (1,) * 4, (2, 3), 2, {0, 1}),
        ((1,) * 4, (1,) * 4, (2, 3), 3, {0, 1, 3}),
        ((1,) * 4, (1,) * 4, (2, 3), 1, None),
        ((1,) * 4, (1,) * 4, (), 4, {0, 1, 2, 3}),
        ((1, 1, 1), (0, 0, 0), range(3), 1.5, {2}),  # rounding leaves too few: from the first on
        ((1, 2, 4), (0, 0, 0), range(3), 3.9, {0, 1}),  # and what then has room stays, the largest first
        ((1, 2, 4), (0, 0, 0), range(3), 2.5, {1}),
        ((1, 2, 4), (0, 0, 0), range(3), 6, {1, 2}),
        ((3, 1, 1), (1, 0, 0), range(3), 3, {1, 2}),
        ((2, 1, 4), (1, 1, 1), range(3), 5, {1, 2}),
        ((1, 1, 1), (1, 1, 1), range(3), 4, {0, 1, 2}),
    ],
)
def test_streaming_blocks_are_spread_over_the_trace(
    sizes: Sequence[int], wanted: Sequence[float], able: Sequence[int], room: float, resident: set[int] | None
) -> None:
    search = search_of(contiguous_of(sizes, one_each(len(sizes))))
    given = [GRANULE * one for one in wanted]
    assert search._spread(frozenset(able), given, int(room * GRANULE)) == resident


def test_they_are_spread_in_the_order_of_their_first_use() -> None:
    search = search_of(contiguous_of((1,) * 6, [(5,), (4,), (3,), (2,), (1,), (0,), (5,)]))
    assert search._spread(frozenset(range(6)), [1.0] * 6, 4 * GRANULE) == {5, 3, 2, 0}


LATENT = machine(1e9, latency_ns=5)


def test_a_candidate_takes_at_least_its_copies_and_their_latencies() -> None:
    problem = contiguous_of((1,) * 6, one_each(6), hardware=LATENT)
    family = _Family(frozenset(range(6)), GRANULE, (1.0,) * 6)
    found = search_of(problem, 5)._candidate(family, 2 * GRANULE)
    assert found == _Candidate(frozenset({1, 3, 5}), None, 3 * GRANULE + 3 * 5)
    fast = replace(problem, hardware=replace(LATENT, link_bytes_per_s=1e12))
    quick = search_of(fast, 5)._candidate(family, 2 * GRANULE)
    assert quick == _Candidate(frozenset({1, 3, 5}), None, 60)  # the steps themselves
    assert search_of(problem, 5)._candidate(replace(family, able=frozenset({0, 1})), 2 * GRANULE) is None


def test_what_a_step_writes_need_not_be_copied() -> None:
    problem = contiguous_of((1, 1, 1), [(0,), (1,), (2,), (1,)], made=(1,), hardware=LATENT)
    family = _Family(frozenset(range(3)), GRANULE, (0.0, 1.0, 1.0))
    found = search_of(problem, 2)._candidate(family, GRANULE)
    assert found == _Candidate(frozenset({0}), None, GRANULE + 5)


@pytest.mark.parametrize(
    ("granules", "kept", "ring", "expected"),
    [
        # Of the 16 granules at the ends, the ring covers some, which are copied for each end and for others.
        (12, 0, 1, _Candidate(frozenset(), 4 * GRANULE, (19 - 8) * GRANULE + 5 * 5)),  # at least 16 - 12
        (12, 0, 5, _Candidate(frozenset({1}), 5 * GRANULE, (18 - 6) * GRANULE + 4 * 5)),
        (15, 0, 2, _Candidate(frozenset({1}), 2 * GRANULE, (18 - 12) * GRANULE + 4 * 5)),
        (17, 0, 2, _Candidate(frozenset({0, 1, 2}), 2 * GRANULE, (16 - 12) * GRANULE + 2 * 5)),
        (12, 2, 1, _Candidate(frozenset({5}), 6 * GRANULE, (19 - 4) * GRANULE + 5 * 5)),
        (12, 0, 20, _Candidate(frozenset({0, 1, 2}), 20 * GRANULE, 16 * GRANULE + 2 * 5)),  # is not placed
    ],
)
def test_two_blocks_at_the_ends_keep_what_no_other_covers(
    granules: int, kept: int, ring: int, expected: _Candidate
) -> None:
    sizes = (1, 1, 1, 8, 8, *([kept] if kept else []))
    problem = contiguous_of(sizes, one_each(len(sizes)), keep=(5,) if kept else (), hardware=LATENT)
    family = _Family(frozenset({0, 1, 2}), GRANULE, (1.0,) * len(sizes), (3, 4))
    assert search_of(problem, granules)._candidate(family, ring * GRANULE) == expected


# What is tried, and what of it is kept.


@dataclass
class Script:
    """An occupancy whose drafts have periods and copied bytes that a test gives, in order."""

    results: list[tuple[int, int]]
    asked: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)

    def __call__(self, problem: Problem, blocks: object, placement: Addressing) -> Any:
        @dataclass(frozen=True)
        class Scripted(Draft):
            period: int = 0

            def periods_ns(self, problem: Problem) -> list[int]:
                return [self.period]

        def decide(early: int, least: int) -> Draft:
            self.asked.append((placement.addresses, early, least))
            period, copied = self.results.pop(0) if self.results else (1 << 40, 0)
            streams = (((Transfer(7, 7 + copied, 0, -1),), ()),)
            return Scripted(0, placement.addresses, (), (), streams, (), period)

        return type("Occupied", (), {"decide": staticmethod(decide)})()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def script(*results: tuple[int, int]) -> Script:
        made = Script(list(results))
        monkeypatch.setattr(contiguous, "Occupancy", made)
        return made

    return script


def test_the_shortest_period_wins_then_the_fewest_bytes_then_the_first(scripted: Any) -> None:
    script = scripted((90, 5), (90, 4), (90, 4), (80, 9), (80, 9), (81, 0))
    search = search_of(contiguous_of((1, 1), one_each(2), hardware=LATENT), 2)
    kept = []
    for at in range(6):
        search._decide(Addressing((at, 0), 128), 3)
        assert search.found is not None
        assert search.best is not None
        kept.append((search.found.addresses[0], search.best.addresses[0], search.period, search.copied))
    assert kept == [(0, 0, 90, 5), *[(1, 1, 90, 4)] * 2, *[(3, 3, 80, 9)] * 3]
    assert script.asked == [((at, 0), 1, 15) for at in range(6)]  # 3 latencies are 15 bytes


@pytest.mark.parametrize(("wrap", "early"), [("overlap", [2]), ("barrier", [2, 0])])
def test_where_no_copy_may_cross_the_end_those_of_the_first_step_alone_are_tried_too(
    scripted: Any, wrap: Wrap, early: list[int]
) -> None:
    script = scripted()
    search = search_of(contiguous_of((1, 1), [(0,)], [(0,), (1,), (0,)], wrap=wrap), 2)
    search._decide(Addressing((0, 64), 128), 0)
    assert [one for _, one, _ in script.asked] == early


def test_a_placement_is_timed_once_and_if_it_fits(scripted: Any) -> None:
    script = scripted()
    search = search_of(contiguous_of((1, 1), one_each(2), hardware=LATENT), 2)
    for placement in (
        Addressing((0, 0), 64),
        Addressing((0, 0), 64),
        Addressing((0, 128), 192),
        Addressing((64, 0), 128),
    ):
        search._time(placement)
    assert script.asked == [((0, 0), 1, 80), ((64, 0), 1, 80)]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[frozenset[int], int | None]]:
    """What the searches of a test have placed: the resident blocks, and the ring."""
    seen: list[tuple[frozenset[int], int | None]] = []
    place = contiguous.place_oldest

    def record(blocks: Any, resident: Any, *, cap: int, ring: int | None) -> Addressing | None:
        seen.append((resident, ring))
        return place(blocks, resident, cap=cap, ring=ring)

    monkeypatch.setattr(contiguous, "place_oldest", record)
    return seen


def candidates_of(search: _Search, wanted: Sequence[Sequence[float]]) -> list[_Candidate]:
    families = [family for one in wanted for family in search._families(one)]
    some = [search._candidate(family, ring) for family in families for ring in search._rings(family)]
    return sorted((one for one in some if one), key=lambda one: one.least_ns)


def test_candidates_are_placed_in_the_order_of_their_least_times(placed: list[Any], scripted: Any) -> None:
    """All of them where nothing is good enough; then the tight placement, and the best one in other parts."""
    problem = contiguous_of((1, 2, 1, 3, 1, 2), one_each(6), hardware=LATENT)
    groups = Pieces(problem).copied
    gaps = gaps_of(groups, problem.traces[0])
    relaxed = Relaxation(10, tuple(64.0 * (g % 2) for g in range(len(gaps))), gaps, groups, 0.0)
    script = scripted(*[(10**6 - k, 0) for k in range(3)])
    search = search_of(problem, 6)
    wanted = [[float(block.size) for block in search.blocks], search._copied([relaxed])]
    expected = candidates_of(search, wanted)
    found = search.run([relaxed])
    assert placed == [(one.resident, one.ring) for one in expected]
    assert {one.least_ns for one in expected} != {expected[0].least_ns}
    assert search.effort == 60_000 - 6 * len(expected)
    *timed, a, b, c, d = script.asked
    assert {least for _, _, least in timed} == {80}
    assert [least for _, _, least in (a, b, c, d)] == [0, 20, 320, 5 << 20]
    assert {addresses for addresses, _, _ in (a, b, c, d)} == {timed[2][0]}
    assert found is not None
    assert (found.addresses, search.period) == (timed[2][0], 10**6 - 2)
    assert len(timed) == len({addresses for addresses, _, _ in timed}) > 3

    placed.clear()
    other = search_of(problem, 6)
    other.run([None])  # without a relaxation blocks are wanted by their sizes alone
    assert placed == [(one.resident, one.ring) for one in candidates_of(other, wanted[:1])]


@pytest.mark.parametrize(
    ("bound", "effort", "tried"),
    [
        (10, 1.0, "what takes less"),
        (10_000, 1.0, "one"),
        (9_999, 1.0, "all"),
        (10, 0, "one"),
        (10, 0.00021, "two"),  # 12 addresses, of which a placement chooses 6
        (10, 0.00022, "three"),
    ],
)
def test_the_search_ends_when_nothing_can_gain(
    placed: list[Any], scripted: Any, bound: int, effort: float, tried: str
) -> None:
    problem = contiguous_of((1, 2, 1, 3, 1, 2), one_each(6), hardware=LATENT)
    groups = Pieces(problem).copied
    gaps = gaps_of(groups, problem.traces[0])
    relaxed = Relaxation(bound, (0.0,) * len(gaps), gaps, groups, 0.0)
    search = search_of(problem, 6, effort)
    every = candidates_of(search, [[float(block.size) for block in search.blocks]] * 2)
    half = every[len(every) // 2].least_ns
    less = sum(one.least_ns < half for one in every)
    assert 2 < less < len(every)
    assert every[-1].least_ns < 1000
    scripted((half if tried == "what takes less" else 10_001, 0))
    search.run([relaxed])
    assert len(placed) == {"what takes less": less, "one": 1, "two": 2, "three": 3, "all": len(every)}[tried]


def test_the_search_goes_on_until_something_can_be_placed(monkeypatch: Any) -> None:
    """And where nothing can be, the tight placement is left."""
    problem = contiguous_of((1, 2, 1, 1), one_each(4))
    tried = []
    monkeypatch.setattr(contiguous, "place_oldest", lambda *_, **__: tried.append(1))
    found = search_of(problem, 3, effort=0.0).run([None])
    assert found is not None
    assert found.addresses == (0, 0, 0, 0)
    assert len(tried) > 1
    assert search_of(problem, 1).run([None]) is None


# The best that there is.


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
def test_no_placement_of_a_few_blocks_is_faster_than_the_plan(
    sizes: Sequence[int], reads: Reads, granules: int, latency: int
) -> None:
    problem = contiguous_of(sizes, reads, hardware=machine(2e9, latency_ns=latency))
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

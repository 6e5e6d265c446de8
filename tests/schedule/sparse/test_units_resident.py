"""The policy of a pool against sets of bytes, on random geometries and routings."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.facts.model import Part, Pool, SparseRead, Step, Trace
from penstock.schedule.sparse.residency import Residency
from tests.hunt import scaled
from tests.pool_oracle import PoolMachine, granules_of, replay, run_step

Problem = tuple[Pool, tuple[Trace, ...]]


def random_problem(dice):
    """Tables of odd strides, several to a route, read by one or two methods, and a pool of any size."""
    granule = dice.choice([1, 3, 4, 8, 16, 64])
    tables, layout, end, count = [], [], 0, dice.randint(2, 20)
    for s in range(dice.randint(1, 4)):
        read = _table(dice, s, count if dice.random() < 0.7 else dice.randint(2, 20))
        nbytes = read.unit(read.count - 1)[1] + dice.choice([0, 5])
        place = -(-end // granule) * granule + dice.randrange(granule)
        layout.append(place)
        end = place + nbytes
        tables.append(read)
    pool = Pool(1, granule, tuple(layout))
    traces = tuple(_trace(dice, graph, tables) for graph in range(dice.randint(1, 2)))
    each = [[len(granules_of(pool, one, n)) for n in range(one.count)] for one in tables]
    least, most = max(map(max, each)), sum(map(sum, each))
    slack = dice.choice([0, 0, 1, dice.randint(0, most - least)])
    return replace(pool, nbytes=(least + slack) * granule + dice.choice([0, granule - 1])), traces


def _table(dice, storage, count):
    dtype, item = dice.choice([("int8", 1), ("float16", 2), ("float32", 4)])
    shape = tuple(dice.randint(1, 5) for _ in range(dice.randint(0, 2)))
    order = dice.sample(range(len(shape)), len(shape))
    stride, dense = [0] * len(shape), 1
    for d in order:  # any order of the inner dimensions, and sometimes gaps
        stride[d] = dense * dice.choice([1, 1, 2])
        dense = stride[d] * shape[d]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    first = span + dice.choice([0, 0, 1, 3])
    view = Part("", dtype, (count, *shape), (first, *stride), storage, dice.randrange(4) * item)
    return SparseRead(view, "aten.embedding.default", 0, dice.randint(0, count))


def _trace(dice, graph, tables):
    steps = []
    for k in range(dice.randint(1, 6)):
        read = replace(dice.choice(tables), route=dice.randrange(2))
        steps.append(Step(f"s{k}", (), 1, 1, sparse=(read,)))
        if dice.random() < 0.2:
            steps.append(Step(f"w{k}", (0,), 1, 1))
    return Trace(f"m{graph}", graph, "", tuple(steps), 0, 0, "modelled")


@pytest.mark.random
@given(st.integers(0, 1 << 32))
@settings(max_examples=scaled(100), deadline=None)
def test_random_calls_are_served_within_the_pool(seed):
    dice = Random(seed)
    pool, traces = random_problem(dice)
    machine = replay(Residency(pool, traces), pool, traces, dice, calls=20)
    assert machine.peak <= pool.nbytes


def test_the_same_calls_give_the_same_decisions():
    for seed in range(20):
        moved = []
        for _ in range(2):
            dice = Random(seed)
            pool, traces = random_problem(dice)
            moved.append(replay(Residency(pool, traces), pool, traces, dice, calls=30).moved)
        assert moved[0] == moved[1]


# Three tables of one route, in a pool that holds the units of the second alone, but not beside the third.


def of_one_route(*widths, nbytes, count=16):
    layout = tuple(1024 * s for s in range(len(widths)))
    reads = (
        SparseRead(Part("", "int8", (count, width), (width, 1), s, 0), "aten.embedding.default", 0, 4)
        for s, width in enumerate(widths)
    )
    steps = tuple(Step(f"s{k}", (), 1, 1, sparse=(one,)) for k, one in enumerate(reads))
    return Pool(nbytes, 8, layout), Trace("m", 0, "", steps, 0, 0, "modelled")


def test_what_was_brought_ahead_makes_room_for_what_is_asked_for():
    pool, trace = of_one_route(8, 32, 8, nbytes=128)
    policy, machine = Residency(pool, [trace]), PoolMachine(pool, (trace,))
    policy.begin()
    for k in range(3):
        run_step(policy, machine, 0, k, [1, 2, 3, 4])
    # The four units of the second step, 128 bytes, are all that fits: what was ahead of the third has left.
    assert machine.moved >= 4 + 4 + 4


def test_rounds_are_not_kept_from_room_by_what_is_held_for_them():
    pool, trace = of_one_route(8, 40, nbytes=96)
    policy, machine = Residency(pool, [trace]), PoolMachine(pool, (trace,))
    for numbers in ([5, 6], [1, 5], [1, 2, 5, 6]):
        policy.begin()
        for k in range(2):
            run_step(policy, machine, 0, k, numbers)


def test_a_turn_brings_ahead_what_its_later_steps_will_ask_for():
    pool, trace = of_one_route(8, 16, nbytes=1024)
    policy = Residency(pool, [trace])
    policy.begin()
    policy.ask(0, 0, [3, 7])
    change = policy.acquire(0, 0, [3, 7])
    assert (change.bring, change.ahead, change.drop) == ([(0, 3), (0, 7)], [(1, 3), (1, 7)], [])
    policy.release(0, 0, [3, 7])
    policy.ask(0, 1, [3, 7])
    assert policy.acquire(0, 1, [3, 7]).bring == []


def test_what_is_asked_for_often_stays():
    pool, trace = of_one_route(8, nbytes=32)
    policy, machine = Residency(pool, [trace]), PoolMachine(pool, (trace,))
    for call in range(60):
        policy.begin()
        run_step(policy, machine, 0, 0, sorted({0, 1, 2 + call % 14}))
    assert machine.moved == 2 + 60  # and the third place is taken by another one each time

"""Packing blocks that are alive at some steps: exact on few, near the bound on hard instances of many."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plans.allocation import FAMILIES, make_instance
from penstock.schedule.space.addresses import conflicts_of, first_fit, height, pack_blocks


def test_nothing_takes_nothing():
    assert pack_blocks([], []).nbytes == 0
    assert pack_blocks([5, 0], [[], [1]]).nbytes == 5


def overlapping(sizes, alive, addresses):
    return any(
        set(alive[a]) & set(alive[b])
        and addresses[a] < addresses[b] + sizes[b]
        and addresses[b] < addresses[a] + sizes[a]
        for a, b in itertools.combinations(range(len(sizes)), 2)
    )


def exhaustive(sizes, alive):
    """The least height: some order of first fit reaches it."""
    conflicts = conflicts_of(alive)
    orders = itertools.permutations(range(len(sizes)))
    return min(height(sizes, first_fit(sizes, conflicts, order)) for order in orders)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)),
        min_size=1,
        max_size=6,
    )
)
def test_few_blocks_are_packed_as_well_as_can_be(blocks):
    sizes, alive = [size for size, _ in blocks], [steps for _, steps in blocks]
    found = pack_blocks(sizes, alive)
    assert not overlapping(sizes, alive, found.addresses)
    assert found.nbytes == height(sizes, found.addresses) == exhaustive(sizes, alive)
    assert found.bound == found.nbytes or len(sizes) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_instances_stay_near_the_bound(family):
    for seed in range(3):
        instance = make_instance(family, blocks=60, seed=seed)
        found = pack_blocks(instance.sizes, instance.alive)
        assert not overlapping(list(instance.sizes), [list(a) for a in instance.alive], found.addresses)
        assert instance.bound <= found.bound <= found.nbytes <= instance.bound * FAMILIES[family]


def test_more_work_is_never_worse():
    draw = random.Random(5)
    sizes = [draw.randint(1, 50) for _ in range(40)]
    alive = [range(start := draw.randint(0, 30), start + draw.randint(1, 12)) for _ in range(40)]
    assert pack_blocks(sizes, alive, work=10**6).nbytes <= pack_blocks(sizes, alive, work=1).nbytes

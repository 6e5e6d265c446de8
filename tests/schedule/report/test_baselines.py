"""The policies of other tools: periods worked out by hand, and no plan that loses to one it contains."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.schedule.bound.relaxation import relax, tier_of
from penstock.schedule.facts.model import Hardware, Step, Trace, Work
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.planner import floor
from penstock.schedule.report import comparison
from penstock.schedule.report.comparison import Setting, compare
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces
from tests.schedule.traces import machine, problems

US = 1000
UNIT = 1_000_000


def setting(n, *, cap, compute_us=0, reads=(), latency_us=0):
    """Storages of a unit, copied in 1,000 us each, and read in order unless `reads` says otherwise."""
    order = reads or tuple((k,) for k in range(n))
    steps = tuple(Step(f"s{k}", one, 0, compute_us * US) for k, one in enumerate(order))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    return Setting([UNIT] * n, trace, int(cap * UNIT), machine(1e9, latency_ns=latency_us * US))


def us(ns):
    return None if ns is None else ns / US


@pytest.mark.parametrize(
    ("policy", "cap", "compute_us", "expected"),
    [
        (comparison.everything_resident, 10, 100, 1000),
        (comparison.everything_resident, 9.9, 100, None),
        (comparison.on_demand, 1, 100, 11_000),  # each copy waits for the step before
        (comparison.on_demand, 0.9, 100, None),
        (comparison.one_block_ahead, 2, 100, 10_000),  # two slots: copies follow one another
        (comparison.one_block_ahead, 2, 1500, 15_000),  # and hide behind compute
        (comparison.one_block_ahead, 1, 100, 11_000),  # no room for two: on demand
        (comparison.some_of_every_group, 7, 100, 5_000),  # five stay, two slots for the others
        (comparison.least_recently_used, 9, 100, 11_000),  # a cyclic scan finds nothing
        (comparison.least_recently_used, 10, 100, 1_000),
    ],
)
def test_ten_equal_weights(policy, cap, compute_us, expected):
    assert us(policy(setting(10, cap=cap, compute_us=compute_us))) == expected


@pytest.mark.parametrize(
    ("policy", "cap", "expected"),
    [
        (comparison.everything_resident, 10, 1_000),
        (comparison.on_demand, 1, 30_000),
        (comparison.one_block_ahead, 2, 30_000),
        (comparison.some_of_every_group, 7, 15_000),  # five stay
        (comparison.least_recently_used, 9, 30_000),
    ],
)
def test_policies_launch_the_steps_that_they_stream(policy, cap, expected):
    one = setting(10, cap=cap, compute_us=100)
    assert us(policy(replace(one, hardware=replace(one.hardware, host_step_ns=3_000 * US)))) == expected


def test_the_least_recently_used_policy_finds_what_returns_soon():
    """0 is read every other step: with two places it stays, and each of the others is copied."""
    one = setting(4, cap=2, reads=((0, 1), (0, 2), (0, 3)))
    assert us(comparison.least_recently_used(one)) == 3_000
    twice = setting(3, cap=1, reads=((0,), (0,), (1,), (2,)))
    slow = replace(twice, hardware=replace(twice.hardware, host_step_ns=2_000 * US))
    assert us(comparison.least_recently_used(slow)) == 8_000  # of four steps, each reads what leaves


def test_every_copy_pays_its_latency():
    assert us(comparison.on_demand(setting(4, cap=1, latency_us=50))) == 4 * 1050


def test_the_rest_on_the_host_takes_the_hosts_time():
    """Half fits; the host moves its 2 MB at 1 GB/s, the device reads at no cost, and two hops of 50 us."""
    steps = tuple(Step(f"s{k}", (k,), 0, 0, Work(), Work(0, UNIT)) for k in range(4))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    host = Hardware("host", 1e12, 1e9, 1.0, 0)
    one = Setting([UNIT] * 4, trace, 2 * UNIT, machine(1e9, latency_ns=50 * US))
    assert us(comparison.rest_on_host(one, host)) == 2 * 1000 + 2 * 50
    assert us(compare(one, host)["rest on the host"]) == 2_100
    assert "rest on the host" not in compare(one)
    assert comparison.rest_on_host(one, replace(host, memory_nbytes=2 * UNIT)) is not None
    assert comparison.rest_on_host(one, replace(host, memory_nbytes=2 * UNIT - 1)) is None


@given(problems(kind="paged"))
@settings(max_examples=80)
def test_no_policy_beats_the_bound(p):
    """They copy whole storages to the byte, so the relaxation with granules of a byte holds for them too."""
    arena = packed_arena(p.storages, p.traces, kind="paged", granule=1, alignment=1)
    budget = p.budget(floor(Demand(p.storages, p.traces, arena)).upper_bytes)
    outside = sum(s.nbytes for s in p.storages if s.kind != "streamable")
    if not p.traces[0].steps:
        return
    found = compare(Setting([s.nbytes for s in p.storages], p.traces[0], budget - outside, p.hardware))
    problem = Problem(p.storages, p.traces, arena, hardware=p.hardware)
    relaxed = relax(problem, Pieces(problem), (tier_of(budget - outside, p.hardware),))
    assert relaxed is not None
    assert all(ns is None or ns >= relaxed.bound_ns for ns in found.values())

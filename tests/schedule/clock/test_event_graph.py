"""The steady period against simulation, brute force over cycles, and periods known by hand."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.clock.event_graph import build_graph, simulate, steady_period_ns
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Schedule, Step, Trace, Transfer
from tests.schedule.traces import machine

BYTE_PER_NS = machine(1e9)


def trace_of(*times, tail=0, gap=0):
    steps = tuple(Step(f"s{k}", (k,), lead, read) for k, (lead, read) in enumerate(times))
    return Trace("forward", 0, "", steps, tail, gap, "modelled")


def schedule_of(*transfers):
    """From (bytes, step, after)."""
    return Schedule(0, tuple(Transfer(0, nbytes, step, after) for nbytes, step, after in transfers), (), 0)


@st.composite
def timed(draw):
    """Schedules with few transfers, `after` growing along the line as a planner makes it."""
    n = draw(st.integers(1, 5))
    ns = st.integers(0, 20)
    trace = trace_of(*((draw(ns), draw(ns)) for _ in range(n)), tail=draw(ns), gap=draw(ns))
    steps = sorted(draw(st.lists(st.integers(0, n - 1), max_size=6)))
    reached, transfers = -n, []
    for step in steps:
        reached = max(reached, draw(st.integers(step - n, step - 1)))
        transfers.append((draw(st.integers(1, 30)), step, reached))
    if transfers:
        last = transfers[-1][2] - n
        transfers = [(nbytes, step, max(after, last)) for nbytes, step, after in transfers]
    return trace, schedule_of(*transfers), draw(st.sampled_from(["overlap", "barrier"]))


def test_without_transfers_the_period_is_the_compute():
    trace = trace_of((3, 4), (5, 6), tail=7, gap=8)
    assert steady_period_ns(trace, schedule_of(), BYTE_PER_NS, "overlap") == 33
    assert steady_period_ns(trace_of(tail=7, gap=8), schedule_of(), BYTE_PER_NS, "barrier") == 15


def test_a_slot_for_one_weight_serialises_copy_and_read():
    trace = trace_of((0, 10), (0, 10))
    assert steady_period_ns(trace, schedule_of((30, 0, -1), (30, 1, 0)), BYTE_PER_NS, "overlap") == 80


def test_bytes_flow_when_the_link_has_filled():
    """Unless the copy might start that much earlier."""
    trace = trace_of((0, 10), (0, 10), (0, 10), (0, 10))
    late = machine(1e9, in_flight=7)
    one_slot = schedule_of(*((30, k, k - 1) for k in range(4)))
    assert steady_period_ns(trace, one_slot, late, "overlap") == 4 * (7 + 30 + 10)
    two_slots = schedule_of(*((30, k, k - 2) for k in range(4)))
    assert steady_period_ns(trace, two_slots, late, "overlap") == 4 * 30
    (first,) = simulate(trace, two_slots, late, "overlap", 1)
    assert first.transfers == ((7, 37), (37, 67), (67, 97), (97, 127))


def test_the_rate_of_a_link_follows_from_the_bytes_on_their_way():
    """Half of it if as many bytes as fill the link are all that is on its way."""
    trace = trace_of((0, 0))
    for in_flight, nbytes in ((1000, 1000), (1000, 250), (64, 640)):
        hardware = machine(1e9, in_flight=in_flight)
        period = steady_period_ns(trace, schedule_of((nbytes, 0, -1)), hardware, "overlap")
        assert nbytes / period == nbytes / (nbytes + in_flight)


def test_lead_time_hides_a_copy():
    trace = trace_of((30, 10), (30, 10))
    assert steady_period_ns(trace, schedule_of((30, 0, -1), (30, 1, 0)), BYTE_PER_NS, "overlap") == 80
    assert steady_period_ns(trace, schedule_of((40, 0, -1), (40, 1, 0)), BYTE_PER_NS, "overlap") == 100


def test_a_barrier_makes_the_call_wait_for_what_is_on_its_way():
    trace = trace_of((30, 10), (30, 10))
    schedule = schedule_of((20, 0, -1), (30, 1, -1))
    assert steady_period_ns(trace, schedule, BYTE_PER_NS, "overlap") == 80
    assert steady_period_ns(trace, schedule, BYTE_PER_NS, "barrier") == 130


def test_the_time_between_calls_passes_after_what_a_barrier_waits_for():
    trace = trace_of((30, 10), (30, 10), gap=7)
    schedule = schedule_of((20, 0, -1), (30, 1, -1))
    assert steady_period_ns(trace, schedule, BYTE_PER_NS, "barrier") == 137
    _, second, third = simulate(trace, schedule, BYTE_PER_NS, "barrier", 3)
    assert second.call_start == second.transfers[-1][1] + 7
    assert third.call_start - second.call_start == 137


def test_a_ring_with_room_for_everything_waits_for_the_same_copy_of_the_pass_before():
    """The disk reads on while the last copies of the pass before still run."""
    hardware = replace(BYTE_PER_NS, disk_bytes_per_s=1e9)
    trace = trace_of((0, 5), (0, 5), (0, 5))
    schedule = replace(schedule_of((40, 0, -3), (40, 1, -2), (40, 2, -1)), staged=(40, 40, 40))
    for nbytes in (120, 121, 1000):
        roomy = replace(schedule, staging_bytes=nbytes)
        assert steady_period_ns(trace, roomy, hardware, "overlap") == 120
        first, second, _ = simulate(trace, roomy, hardware, "overlap", 3)
        assert [end for _, end in second.stages] == [160, 200, 240]
        assert first.transfers[-1][1] == 160
    tight = replace(schedule, staging_bytes=40)
    assert steady_period_ns(trace, tight, hardware, "overlap") == 240


def test_a_critical_cycle_over_two_passes_gives_a_fraction_rounded_up():
    trace = trace_of((0, 1), (0, 0))
    schedule = schedule_of((2, 0, -2), (1, 1, -1))
    graph = build_graph(trace, schedule, BYTE_PER_NS, "overlap")
    assert steady_period_ns(trace, schedule, BYTE_PER_NS, "overlap") == ceil(heaviest(graph))


def test_waiting_in_a_circle_is_refused():
    with pytest.raises(PlanError, match="wait for each other"):
        steady_period_ns(trace_of((0, 1), (0, 1)), schedule_of((1, 0, 1)), BYTE_PER_NS, "overlap")


def test_many_transfers_are_timed_quickly():
    """Thousands of events, with a transient that a simulation would follow for many passes."""
    trace = trace_of(*((0, 1000),) * 1100)
    rows = [(251 + (k % 7 == 0), k, max(k - 1100, k - 40)) for k in range(1100) for _ in range(4)]
    copying = sum(nbytes for nbytes, _, _ in rows)
    assert steady_period_ns(trace, schedule_of(*rows), BYTE_PER_NS, "overlap") == copying


def heaviest(graph):
    """The maximum over all simple cycles of weight over height, by enumeration."""
    ratios = []
    for cycle in networkx.simple_cycles(graph):
        edges = [graph.edges[pair] for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
        ratios.append(Fraction(sum(e["weight"] for e in edges), sum(e["height"] for e in edges)))
    return max(ratios)


@given(timed())
@settings(max_examples=150)
def test_period_is_the_maximum_over_all_cycles(case):
    trace, schedule, wrap = case
    graph = build_graph(trace, schedule, BYTE_PER_NS, wrap)
    assert steady_period_ns(trace, schedule, BYTE_PER_NS, wrap) == ceil(heaviest(graph))


@given(timed(), st.integers(-2, 2))
@settings(max_examples=50)
def test_a_period_of_more_than_enough_need_not_be_exact(case, more):
    trace, schedule, wrap = case
    period = steady_period_ns(trace, schedule, BYTE_PER_NS, wrap)
    for enough in (period + more, period // 2):
        found = steady_period_ns(trace, schedule, BYTE_PER_NS, wrap, enough=enough)
        assert enough < found <= period if period > enough else found == period


@given(timed())
@settings(max_examples=150)
def test_simulation_approaches_the_period_and_obeys_the_rules(case):
    trace, schedule, wrap = case
    passes = 200
    times = simulate(trace, schedule, BYTE_PER_NS, wrap, passes)
    period = steady_period_ns(trace, schedule, BYTE_PER_NS, wrap)
    slack = 2 * (trace.compute_ns + sum(t.stop for t in schedule.transfers)) + passes
    assert abs(times[-1].call_start - period * (passes - 1)) <= slack
    free, n = 0, len(trace.steps)
    for p, one in enumerate(times):
        for transfer, (start, end) in zip(schedule.transfers, one.transfers, strict=True):
            assert start >= free
            assert end - start == transfer.stop
            assert one.reads[transfer.step][0] >= end
            source = times[p - 1] if transfer.after < 0 else one
            if transfer.after >= 0 or p:
                assert start >= source.reads[transfer.after % n][1]
            free = end

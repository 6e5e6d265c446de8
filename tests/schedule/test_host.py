"""A host between disk and device: what it holds, the ring that the rest passes, and the time it takes."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.clock.event_graph import build_graph, launched_steps, simulate, steady_period_ns
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Hardware, HostTier, Range, Schedule, Step, Storage, Trace, Transfer
from penstock.schedule.facts.problem import Problem
from penstock.schedule.host import staged_bytes
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.verify.proof import verify_plan
from tests.schedule.clock.test_event_graph import heaviest
from tests.schedule.traces import problems

MACHINE = Hardware("test", 1e12, 1e12, 1e9, 0, disk_bytes_per_s=0.5e9)
"""A byte takes 1 ns on the link and 2 ns from the disk."""

_FEW = 24
"""Edges of an event graph."""


def scan(count, *, nbytes=64, compute=0):
    storages = tuple(Storage(nbytes, "streamable") for _ in range(count))
    steps = tuple(Step(f"s{k}", (k,), 0, compute) for k in range(count))
    return storages, (Trace("forward", 0, "", steps, 0, 0, "modelled"),)


def plan_of(count, budget, host, **options):
    storages, traces = scan(count, **options)
    arena = packed_arena(storages, traces, kind="paged", granule=16, alignment=64)
    plan = make_plan(Problem(storages, traces, arena, hardware=MACHINE, host=host), budget)
    verify_plan(storages, traces, plan)
    return plan


def test_a_host_that_holds_all_that_streams_costs_nothing():
    plain, held = plan_of(20, 128, None), plan_of(20, 128, 20 * 64)
    assert held.host is not None
    assert held.predicted_seconds == plain.predicted_seconds
    assert not any(schedule.staged for schedule in held.schedules)


def test_a_host_of_half_the_model_rereads_the_other_half():
    plan = plan_of(40, 128, 20 * 64)
    staged = sum(plan.schedules[0].staged)
    assert 0.4 * 40 * 64 <= staged <= 0.6 * 40 * 64
    assert plan.host is not None
    assert sum(r.nbytes for r in plan.host.resident) + plan.schedules[0].staging_bytes <= 20 * 64
    # The disk is half as fast as the link, and has to bring half as much: both are busy all the time.
    assert plan.ratio is not None
    assert plan.ratio < 1.1


def test_more_host_memory_is_never_slower():
    times = [plan_of(30, 192, host).predicted_seconds for host in (16, 64, 256, 512, 1024, 1600, 1920)]
    assert times == sorted(times, reverse=True)


def test_what_is_read_twice_is_held_first():
    storages = tuple(Storage(64, "streamable") for _ in range(8))
    order = (*range(8), 0, 1)
    steps = tuple(Step(f"s{k}", (s,), 0, 0) for k, s in enumerate(order))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    plan = make_plan(Problem(storages, traces, arena, hardware=MACHINE, host=3 * 64), 64)
    assert plan.host is not None
    assert Range(0, 128) in plan.host.resident


def test_memory_below_a_granule_and_a_disk_nobody_knows_are_refused():
    with pytest.raises(BudgetError, match="host memory of 15 B is below the floor of 16 B: weights"):
        plan_of(4, 64, 15)
    storages, traces = scan(4)
    arena = packed_arena(storages, traces, kind="paged", granule=16, alignment=64)
    hardware = replace(MACHINE, disk_bytes_per_s=None)
    with pytest.raises(PlanError, match="rate of the disk"):
        make_plan(Problem(storages, traces, arena, hardware=hardware, host=64), 64)


def spoiled(plan, **changes):
    return replace(plan, schedules=(replace(plan.schedules[0], **changes),))  # type: ignore[arg-type]


def test_the_verifier_finds_what_the_host_cannot_do():
    storages, traces = scan(20)
    plan = plan_of(20, 128, 10 * 64)
    schedule = plan.schedules[0]
    assert plan.host is not None
    wrong = {
        "says nothing": replace(plan, host=None),
        "expected one ring": replace(plan, host=replace(plan.host, nbytes=plan.host.nbytes // 2)),
        "in a ring of 1": spoiled(plan, staging_bytes=1),
        "lacks": spoiled(plan, staged=(*schedule.staged[:-1], schedule.staged[-1] + 1)),
        "counts of staged bytes": spoiled(plan, staged=schedule.staged[1:]),
        "ascending": replace(plan, host=replace(plan.host, resident=plan.host.resident[::-1])),
        "ranges of the layout's segments": replace(
            plan, host=replace(plan.host, resident=(*plan.host.resident, Range(20 * 128, 20 * 128 + 64)))
        ),
        "neither on the device nor with the host": replace(
            spoiled(plan, staging_bytes=0, staged=()), host=replace(plan.host, resident=())
        ),
    }
    for message, spoilt in wrong.items():
        with pytest.raises(PlanError, match=message):
            verify_plan(storages, traces, spoilt)


def test_staged_bytes_are_those_the_host_lacks():
    held = (Range(10, 20), Range(30, 40))
    assert staged_bytes(Transfer(0, 50, 0, 0), held) == 30
    assert staged_bytes(Transfer(12, 18, 0, 0), held) == 0
    assert staged_bytes(Transfer(20, 30, 0, 0), held) == 10
    assert staged_bytes(Transfer(35, 60, 0, 0), held) == 20


def test_a_ring_of_one_piece_reads_and_copies_in_turn():
    _, (trace,) = scan(2)
    transfers = (Transfer(0, 64, 0, -2), Transfer(64, 128, 1, -1))
    turns = Schedule(0, transfers, (), 0, staged=(64, 64), staging_bytes=64)
    assert steady_period_ns(trace, turns, MACHINE, "overlap") == 2 * (128 + 64)
    ahead = replace(turns, staging_bytes=128)
    assert steady_period_ns(trace, ahead, MACHINE, "overlap") == 2 * 128


@settings(max_examples=60)
@given(problems("paged"), st.integers(1, 6), st.integers(1, 5))
def test_the_event_graph_with_a_disk_agrees_with_the_oracle(p, share, parts):
    hardware = replace(p.hardware, disk_bytes_per_s=p.hardware.link_bytes_per_s / 2, disk_latency_ns=3)
    lowest = floor(p).upper_bytes
    total = sum(s.nbytes for s in p.storages)
    problem = replace(p, hardware=hardware, host=max(p.arena.granule, total * share // 6))
    plan = make_plan(problem, lowest + (total - lowest) * parts // 6)
    verify_plan(p.storages, p.traces, plan)
    assert isinstance(plan.host, HostTier)
    for which, (schedule, trace) in enumerate(zip(plan.schedules, p.traces, strict=True)):
        assert schedule.lower_bound_ns is None or schedule.lower_bound_ns <= schedule.predicted_ns
        launched = launched_steps(plan, which)
        graph = build_graph(trace, schedule, hardware, plan.wrap, launched=launched)
        if graph.number_of_edges() <= _FEW:  # all its cycles can be listed
            assert schedule.predicted_ns == ceil(heaviest(graph))
        passes = simulate(trace, schedule, hardware, plan.wrap, 40, launched=launched)
        taken = (passes[-1].call_start - passes[-13].call_start) / 12
        assert taken <= schedule.predicted_ns
        for one in passes:
            ends = [end for _, end in one.stages]
            assert ends == sorted(ends)

"""The launches of streamed steps by the thread that calls: in the clock, in bounds, and in plans."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.bound.relaxation import relax, tier_of
from penstock.schedule.clock.event_graph import (
    acting_steps,
    build_graph,
    launched_steps,
    launches_ns,
    settle,
    simulate,
    stalls_of,
    steady_period_ns,
)
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.model import Range, Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.comparison import replayed_ns
from penstock.schedule.report.verdict import slow_launches
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces
from tests.schedule.clock.test_event_graph import schedule_of, trace_of
from tests.schedule.traces import GRANULE, machine, problems


def launching(ns, link_bytes_per_s=1e9):
    return replace(machine(link_bytes_per_s), host_step_ns=ns)


def test_launches_follow_one_another_and_reads_follow_them():
    """Three steps of 10 ns, of which the first and the last stream; a launch takes 40 ns, a copy 5."""
    trace, schedule = trace_of((0, 10), (0, 10), (0, 10)), schedule_of((5, 0, -3), (5, 2, -1))
    one, two, *_ = simulate(trace, schedule, launching(40), "overlap", 4, launched=(0, 2))
    assert one.launches == ((0, 40), (40, 80))
    assert one.reads == ((40, 50), (50, 60), (80, 90))
    assert two.call_start == 90
    assert two.launches == ((80, 120), (120, 160))  # the thread does not wait for the device
    assert two.reads == ((120, 130), (130, 140), (160, 170))
    assert stalls_of(trace, two) == [30 - 10 + 10, 0, 20]
    assert steady_period_ns(trace, schedule, launching(40), "overlap", launched=(0, 2)) == 80


@pytest.mark.parametrize(
    ("launch_ns", "period"), [(0, 30), (10, 30), (15, 30), (16, 32), (40, 80)]
)  # compute takes 30 ns, and two steps are launched
def test_the_slower_of_device_and_calling_thread_sets_the_period(launch_ns, period):
    trace, schedule = trace_of((0, 10), (0, 10), (0, 10)), schedule_of((5, 0, -3), (5, 2, -1))
    facts = (trace, schedule, launching(launch_ns), "overlap")
    assert steady_period_ns(*facts, launched=(0, 2)) == period
    assert settle(*facts, launched=(0, 2)).period_ns == period


def test_without_launches_nothing_changes():
    trace, schedule = trace_of((3, 10), (0, 7)), schedule_of((30, 0, -1), (30, 1, 0))
    facts = (trace, schedule, launching(40), "overlap")
    none = (trace, schedule, launching(0), "overlap")
    assert steady_period_ns(*facts) == steady_period_ns(*none, launched=(0, 1)) == 77
    assert [one.reads for one in simulate(*facts, 5)] == [
        one.reads for one in simulate(*none, 5, launched=(0, 1))
    ]


def test_launches_are_nodes_of_the_graph():
    trace, schedule = trace_of((0, 10), (0, 10), (0, 10)), schedule_of((5, 0, -3), (5, 2, -1))
    graph = build_graph(trace, schedule, launching(40), "overlap", launched=(0, 2))
    edges = ((pair, facts) for *pair, facts in graph.edges(data=True) if pair[0][0] == "launch")
    assert {tuple(pair): (facts["weight"], facts["height"]) for pair, facts in edges} == {
        (("launch", 2), ("launch", 0)): (40, 1),
        (("launch", 0), ("launch", 2)): (40, 0),
        (("launch", 0), ("step", 0)): (10, 0),
        (("launch", 2), ("step", 2)): (10, 0),
    }


def test_a_plan_has_its_launches_in_its_own_graph():
    plan = tiny_plan(8, budget=4, launch_ns=500)
    graph = plan.event_graph()
    launched = launched_steps(plan, 0)
    nodes = {number: facts for (kind, number), facts in graph.nodes.items() if kind == "launch"}
    assert tuple(nodes) == launched
    assert [nodes[k]["name"] for k in launched] == [f"s{k}" for k in launched]
    assert {nodes[k]["end_ns"] - nodes[k]["start_ns"] for k in launched} == {500}
    edge = graph.edges[("launch", launched[0]), ("step", launched[0])]
    assert (edge["why"], edge["weight"]) == ("order", 100)


def tiny_problem(n, launch_ns, **options):
    """Steps of 100 ns, each of which reads a storage of its own, which a copy brings in 64 ns."""
    storages = (Storage(GRANULE, "streamable"),) * n
    trace = Trace("forward", 0, "", tuple(Step(f"s{k}", (k,), 0, 100) for k in range(n)), 0, 0, "modelled")
    arena = packed_arena(storages, (trace,), kind="paged", granule=GRANULE, alignment=GRANULE)
    return Problem(storages, (trace,), arena, hardware=launching(launch_ns), **options)  # type: ignore[arg-type]


def tiny_plan(n, *, budget, launch_ns, **options):
    return make_plan(tiny_problem(n, launch_ns, **options), budget * GRANULE)


def test_only_steps_that_stream_are_launched():
    """Of eight storages three stay, and five copies take turns in one granule."""
    plan = tiny_plan(8, budget=4, launch_ns=500)
    assert len(launched_steps(plan, 0)) == 5
    assert plan.predicted_ns == plan.lower_bound_ns == launches_ns(plan, 0) == 2_500
    assert 800 <= replayed_ns(plan) < 2_500
    assert replayed_ns(replace(plan, hardware=launching(10_000))) == 10_000  # one launch
    assert slow_launches(plan) == (
        "the calling thread is the limit: launching the 5 streamed steps of forward takes 2.5 us a pass, "
        "compute 800 ns"
    )
    everything = tiny_plan(8, budget=8, launch_ns=500)
    assert (everything.predicted_ns, launched_steps(everything, 0)) == (800, ())
    assert slow_launches(everything) == ""


def test_a_step_that_reads_what_leaves_later_is_launched_though_nothing_is_copied_for_it():
    """The plan copies a for the first step; it is read once more before it is dropped."""
    storages = (Storage(GRANULE, "streamable"),) * 3
    steps = tuple(Step(f"s{k}", (s,), 0, 100) for k, s in enumerate((0, 0, 0, 1, 2)))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    arena = packed_arena(storages, (trace,), kind="paged", granule=GRANULE, alignment=GRANULE)
    plan = make_plan(Problem(storages, (trace,), arena, hardware=launching(700)), GRANULE)
    assert launched_steps(plan, 0) == (0, 1, 2, 3, 4) == acting_steps(plan, 0, plan.sizes)
    assert {t.step for t in plan.schedules[0].transfers} == {0, 3, 4}
    assert plan.predicted_ns == 3_500
    assert launched_steps(replace(plan, sizes=()), 0) == (0, 1, 2, 3, 4)
    quiet = replace(plan, hardware=launching(0))
    assert launched_steps(quiet, 0) == ()
    resident = replace(plan, resident=(Range(0, 3 * GRANULE),), schedules=(schedule_of(),))
    assert launched_steps(resident, 0) == ()


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_choice_of_what_stays_has_fewer_launches_than_the_bound(seed):
    """All choices of whole storages that fit, by brute force."""
    dice = Random(seed)
    sizes = [dice.choice((1, 1, 2, 3)) for _ in range(dice.randint(2, 6))]
    storages = tuple(Storage(n * GRANULE, "streamable") for n in sizes)
    reads = [tuple(sorted(dice.sample(range(len(sizes)), dice.choice((1, 1, 2))))) for _ in range(6)]
    trace = Trace(
        "f", 0, "", tuple(Step(f"s{k}", one, 0, 0) for k, one in enumerate(reads)), 0, 0, "modelled"
    )
    read = sorted({s for one in reads for s in one})
    total = sum(sizes[s] for s in read)
    least = max(sum(sizes[s] for s in one) for one in reads)
    room = dice.randint(least, total)
    arena = packed_arena(storages, (trace,), kind="paged", granule=GRANULE, alignment=GRANULE)
    launch_ns = 10**9  # more than all copies
    problem = Problem(storages, (trace,), arena, hardware=launching(launch_ns))
    relaxed = relax(problem, Pieces(problem), [tier_of(room * GRANULE, problem.hardware, GRANULE)])
    choices = (some for count in range(len(read) + 1) for some in combinations(read, count))
    fewest = min(
        sum(not set(one) <= set(some) for one in reads)
        for some in choices
        if all(sum(sizes[s] for s in {*some, *one}) <= room for one in reads)
    )
    assert relaxed is not None
    assert relaxed.bound_ns // launch_ns <= fewest
    assert (relaxed.bound_ns >= launch_ns) == (room < total)


@pytest.mark.random
@given(problems("contiguous", methods=2) | problems("paged", methods=1), st.sampled_from([1, 40, 5_000]))
@settings(max_examples=60, deadline=None)
def test_plans_take_what_is_simulated_and_no_less_than_their_bound(p, launch_ns):
    """A launch makes no plan faster, and the period is that of the device or of the launches."""
    p = replace(p, hardware=replace(p.hardware, host_step_ns=launch_ns))
    plan = joined(make_plan(p, p.budget(floor(p).upper_bytes)))
    for which, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        facts = (trace, schedule, plan.hardware, plan.wrap)
        launched = launched_steps(plan, which)
        alone = steady_period_ns(*facts)
        assert schedule.predicted_ns == max(alone, launch_ns * len(launched))
        last = simulate(*facts, 60, launched=launched)[-13:]
        taken = last[-1].call_start - last[0].call_start
        assert taken <= 12 * schedule.predicted_ns + 12
        assert (schedule.lower_bound_ns or 0) <= schedule.predicted_ns

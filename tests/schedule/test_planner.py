"""Whole plans: periods known by hand, floors, budgets, and the verifier over random problems."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.clock.event_graph import launched_steps, steady_period_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Arena, Hardware, Range, Step, Storage, Trace
from penstock.schedule.facts.problem import Demand, Problem, first_uses
from penstock.schedule.planner import RUNGS, floor, improve_plan, make_plan, with_figures
from penstock.schedule.space import spans
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.verify.proof import verify_plan
from tests.hunt import sampled, scaled
from tests.schedule.traces import RandomProblem, equal_problem, machine, problems

UNIT = 4096


@pytest.mark.parametrize(
    ("n", "compute", "weights", "period"),
    [
        (20, 0.1, 1, 22.0),
        (20, 0.1, 1.25, 20.0),
        (20, 0.1, 2, 19.2),
        (20, 0.1, 5, 16.0),
        (20, 0.1, 10, 10.7),
        (20, 0.1, 18, 2.25),
        (20, 1, 1.5, 30.0),
        (20, 1, 2, 20.0),
        (80, 0.1, 40, 41.1),
        (80, 0.1, 72, 8.4),
    ],
)
def test_equal_weights_stream_at_nearly_the_fluid_rate(n, compute, weights, period):
    """Period in copy times of one weight. With a share of (B - 1 - c) / (n - 1) resident in each
    the link never idles; these are within 2 % of that, or what one slot and compute allow."""
    plan = make_plan(equal_problem(n, compute), int(weights * UNIT))
    assert plan.schedules[0].predicted_ns / 1000 <= period


def test_everything_that_fits_lies_outside_the_arena():
    problem = equal_problem(4, 1)
    plan = make_plan(problem, 4 * UNIT)
    assert (plan.arena_bytes, plan.outside, plan.schedules[0].transfers) == (0, (0, 1, 2, 3), ())
    assert plan.schedules[0].predicted_ns == 4000


def test_small_storages_leave_a_contiguous_arena_where_their_granules_are_missing():
    storages = tuple(Storage(1024 if k % 2 else 16 * UNIT, "streamable") for k in range(24))
    steps = tuple(Step(f"step.{k}", (2 * k, 2 * k + 1), 100, 100) for k in range(12))
    trace, slow = (
        Trace("f", 0, "", steps, 0, 0, "modelled"),
        replace(machine(UNIT * 1e6), link_latency_ns=5000),
    )
    arena = packed_arena(storages, (trace,), kind="contiguous", granule=UNIT, alignment=UNIT)
    problem, counter = Problem(storages, (trace,), arena, hardware=slow), itertools.count(1)
    plan = make_plan(problem, 195 * UNIT - 1)
    assert with_figures(plan, problem, math.inf) == plan
    for each in (plan, improve_plan(plan, problem, lambda _: next(counter) < 50)):
        verify_plan(storages, (trace,), each)
        assert each.outside == tuple(range(1, 24, 2))


def test_a_program_without_weights_needs_no_budget():
    trace = Trace("forward", 0, "", (), 5, 6, "modelled")
    for storages in ((), (Storage(0, "streamable"),), (Storage(8, "mutable"),)):
        arena = packed_arena(storages, (trace,), kind="paged", granule=64, alignment=64)
        lowest = floor(Demand(storages, (trace,), arena))
        plan = make_plan(Problem(storages, (trace,), arena, hardware=machine(1e9)), lowest.upper_bytes)
        assert plan.schedules[0].predicted_ns == 11


def test_a_refusal_names_floor_step_and_weights():
    storages = (Storage(64, "streamable"), Storage(128, "streamable"), Storage(10, "mutable"))
    steps = (Step("embed", (0,), 0, 1), Step("head", (0, 1), 0, 1), Step("other", (0,), 0, 1))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    with pytest.raises(BudgetError, match="of 202 B: step 'head' needs a, b at once") as caught:
        make_plan(Problem(storages, traces, arena, hardware=machine(1e9)), 100, names=("a", "b", "cache"))
    assert (caught.value.floor_bytes, caught.value.step, caught.value.weights) == (202, "head", ("a", "b"))


def test_a_refusal_says_so_where_no_step_sets_the_floor():
    storages = (Storage(8, "mutable"),)
    traces = (Trace("forward", 0, "", (), 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    problem = Problem(storages, traces, arena, hardware=machine(1e9))
    with pytest.raises(
        BudgetError, match="the floor of 8 B: so much stays in memory, whatever streams; give"
    ):
        make_plan(problem, 4, names=("cache",))


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_a_floor_is_found_without_cutting_storages_into_spans(kind, monkeypatch):
    """Which are up to 30,000, and each plan for a machine asks for many floors."""
    monkeypatch.setattr(spans, "span_groups", lambda *given: pytest.fail("cut"))
    p = equal_problem(4, 1)
    arena = packed_arena(p.storages, p.traces, kind=kind, granule=64, alignment=64)
    assert floor(Demand(p.storages, p.traces, arena)).upper_bytes == UNIT


def test_a_refusal_of_a_byte_less_says_how_many_bytes():
    problem = equal_problem(4, 1)
    lowest = floor(Demand(problem.storages, problem.traces, problem.arena)).upper_bytes
    with pytest.raises(
        BudgetError, match=f"of {lowest - 1:,} bytes is below the floor of {lowest:,} bytes: "
    ):
        make_plan(problem, lowest - 1)


def test_a_refusal_says_what_is_kept():
    p = equal_problem(4, 1)
    with pytest.raises(BudgetError, match=r"w3 in memory takes 4\.00 KiB"):
        make_plan(replace(p, keep=frozenset({3})), UNIT, names=("w0", "w1", "w2", "w3"))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["flops_per_s", "memory_bytes_per_s", "link_bytes_per_s"])
def test_a_rate_that_no_machine_has_is_refused(name, rate):
    p = equal_problem(4, 1)
    hardware = replace(p.hardware, **{name: rate})
    with pytest.raises(PlanError, match=rf"'toy': {name}: expected a rate above 0 and finite, got {rate}; "):
        make_plan(replace(p, hardware=hardware), 2 * UNIT)


def test_a_negative_latency_is_refused():
    p = equal_problem(4, 1)
    with pytest.raises(PlanError, match="link_latency_ns: expected 0 or more, got -1"):
        make_plan(replace(p, hardware=machine(1e9, latency_ns=-1)), 2 * UNIT)


@pytest.mark.parametrize(
    ("launch", "fault"),
    [
        (-1, "expected 0 or more, got -1"),
        (5.8, "expected a whole number, got 5.8"),
        (math.nan, "expected a whole number, got nan"),
        (None, "expected a whole number, got None"),
        (True, "expected a whole number, got True"),
    ],
)
def test_a_launch_takes_whole_nanoseconds(launch, fault):
    p = equal_problem(4, 1)
    with pytest.raises(PlanError, match=rf"'toy': host_step_ns: {fault}; give its figures"):
        make_plan(replace(p, hardware=replace(p.hardware, **{"host_step_ns": launch})), 2 * UNIT)


def test_kept_storages_are_resident():
    p = equal_problem(6, 1)
    for kind in ("paged", "contiguous"):
        arena = packed_arena(p.storages, p.traces, kind=kind, granule=64, alignment=64)
        plan = make_plan(Problem(p.storages, p.traces, arena, frozenset({4}), hardware=p.hardware), 3 * UNIT)
        start = arena.layout[4]
        assert any(r.start <= start and start + UNIT <= r.stop for r in plan.resident)


def test_tied_weights_are_kept_over_the_end_of_the_pass():
    """Read last and then first: one copy a pass for both reads."""
    storages = (Storage(UNIT, "streamable"),) * 5
    steps = tuple(Step(f"s{k}", (s,), 0, 1000) for k, s in enumerate((0, 1, 2, 3, 4, 0)))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    plan = make_plan(Problem(storages, traces, arena, hardware=machine(UNIT * 1e6)), UNIT)
    assert plan.streamed_bytes == 5 * UNIT
    verify_plan(storages, traces, plan)


def test_a_method_without_weights_beside_one_with():
    p = equal_problem(6, 1)
    traces = (*p.traces, Trace("empty", 1, "", (), 7, 0, "modelled"))
    for kind in ("paged", "contiguous"):
        arena = packed_arena(p.storages, traces, kind=kind, granule=64, alignment=64)
        plan = make_plan(Problem(p.storages, traces, arena, hardware=p.hardware), 3 * UNIT)
        verify_plan(p.storages, traces, plan)
        assert plan.boundary == plan.resident
        assert plan.schedules[1].predicted_ns == 7


def check(p):
    lowest = floor(p)
    for budget in (lowest.upper_bytes, p.budget(lowest.upper_bytes)):
        plan = make_plan(p, budget)
        verify_plan(p.storages, p.traces, plan)
        whole = joined(plan)
        for which, (schedule, trace) in enumerate(zip(whole.schedules, whole.traces, strict=True)):
            facts = (trace, schedule, p.hardware, p.wrap)
            launched = launched_steps(whole, which)
            assert schedule.predicted_ns == steady_period_ns(*facts, launched=launched)
    if lowest.upper_bytes:
        with pytest.raises(BudgetError):
            make_plan(p, lowest.upper_bytes - 1)


@pytest.mark.random
@given(problems())
@settings(max_examples=scaled(30))
def test_plans_are_safe_and_floors_exact(problem):
    check(problem)


@pytest.mark.random
@given(problems(methods=2))
@settings(max_examples=scaled(20))
def test_plans_of_several_methods_are_safe(problem):
    check(problem)


def decisions(plan):
    """A plan without its times."""
    schedules = tuple(replace(one, predicted_ns=0, lower_bound_ns=None) for one in plan.schedules)
    return replace(plan, schedules=schedules, traces=(), hardware=machine(1.0))


@pytest.mark.parametrize("faster", [0.9, 1.1])
def test_decisions_are_kept_under_figures_for_which_they_are_as_good(faster):
    problem = equal_problem(20, 0.1)
    plan = make_plan(problem, 5 * UNIT)
    other = replace(problem, hardware=machine(UNIT * 1e6 * faster))
    timed, made = with_figures(plan, other, 1.01), make_plan(other, 5 * UNIT)
    assert timed is not None
    assert decisions(timed) == decisions(plan)
    assert timed.hardware == other.hardware
    ((one,), (new,)) = timed.schedules, made.schedules
    assert one.predicted_ns == steady_period_ns(other.traces[0], one, other.hardware, "overlap")
    assert one.predicted_ns != plan.predicted_ns
    assert one.lower_bound_ns == new.lower_bound_ns
    assert one.predicted_ns <= 1.01 * new.predicted_ns


@pytest.mark.parametrize(("compute", "faster"), [(0.1, 2), (0.1, 100), (2, 0.1)])
def test_decisions_that_other_figures_make_poor_are_not_kept(compute, faster):
    problem = equal_problem(20, compute)
    plan = make_plan(problem, 5 * UNIT)
    assert with_figures(plan, replace(problem, hardware=machine(UNIT * 1e6 * faster)), 1.02) is None


def periods_on_the_ladder(p, *rungs):
    lowest = floor(p).upper_bytes
    read = first_uses(p.storages, p.traces)
    outside = sum(s.nbytes for s in p.storages if s.kind != "streamable")
    total = max(lowest, outside + sum(p.storages[s].nbytes for s in read))
    budgets = [lowest + (total - lowest) * rung // RUNGS for rung in rungs]
    return [sum(s.predicted_ns for s in make_plan(p, budget).schedules) for budget in budgets]


@pytest.mark.random
@given(st.one_of(problems(), problems(methods=2)))
@settings(max_examples=scaled(6))
def test_a_larger_budget_is_not_predicted_slower(problem):
    periods = periods_on_the_ladder(problem, *range(0, RUNGS + 1, 2))
    assert periods == sorted(periods, reverse=True)


def test_a_larger_budget_keeps_the_plan_of_a_smaller_one():
    """With room for more the planner moves copies, and here that takes 16.3 us instead of 15.3."""
    storages = tuple(Storage(nbytes, "streamable") for nbytes in (256, 256, 256, 64, 256))
    reads = (((2,), 2), ((3,), 3), ((4,), 0), ((3,), 1), ((0,), 3), ((2, 3), 0), ((1,), 2), ((1,), 2))
    steps = tuple(Step(f"s{k}", some, 0, 1000 * us) for k, (some, us) in enumerate(reads))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    hardware = machine(1e9, latency_ns=2000)
    problem = RandomProblem(storages, traces, arena, hardware=hardware)
    assert periods_on_the_ladder(problem, 4, 5) == [15_256, 15_256]


@pytest.mark.parametrize(
    ("step", "nbytes", "message"),
    [
        (Step("a", (0,), float("nan"), 1), 64, r"steps\[0\].lead_ns: expected a whole number, got nan"),  # type: ignore[arg-type]
        (Step("a", (0,), 0, -1), 64, r"steps\[0\].read_ns: expected 0 or more, got -1"),
        (Step("a", (7,), 0, 1), 64, r"steps\[0\].reads: expected indices of 2 storages, got \[7\]"),
        (Step("a", (), 0, 1), 64, r"steps\[0\].reads: expected one storage or more"),
        (Step("a", (0,), 0, 1), -1, r"storages\[0\].nbytes: expected 0 or more, got -1"),
    ],
)
def test_facts_that_cannot_be_are_refused(step, nbytes, message):
    storages = (Storage(nbytes, "streamable"), Storage(64, "streamable"))
    arena = Arena("paged", "anonymous", 64, (0, 64), (Range(0, 128),))
    trace = Trace("forward", 0, "", (step, Step("b", (1,), 0, 1)), 0, 0, "modelled")
    with pytest.raises(PlanError, match=message):
        make_plan(Problem(storages, (trace,), arena, hardware=Hardware("test", 1e12, 1e12, 1e9, 0)), 64)


@pytest.mark.parametrize("latency_ns", [0, 100])
def test_a_segment_may_begin_inside_a_granule(latency_ns):
    """As a weight file's does, whose header comes first."""
    sizes = (16384, *(2048, 2048, 2048, 2048, 5504, 5504, 5504) * 6)  # a decoder in kilobytes
    storages = tuple(Storage(size, "streamable") for size in sizes)
    steps = tuple(Step(f"s{k}", (k,), 0, 300) for k in range(len(sizes)))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    packed = packed_arena(storages, traces, kind="paged", granule=2048, alignment=4)
    layout = tuple(place + 24 for place in packed.layout)
    arena = replace(packed, layout=layout, segments=(Range(24, packed.segments[0].stop + 24),))
    hardware = Hardware("test", 1e12, 1e12, 1e9, latency_ns)
    lowest, total = floor(Demand(storages, traces, arena)).upper_bytes, sum(sizes)
    for budget in range(lowest, total, (total - lowest) // 6):
        verify_plan(storages, traces, make_plan(Problem(storages, traces, arena, hardware=hardware), budget))


@pytest.mark.random
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_a_plan_trades_resident_bytes_for_copies_on_their_way(kind):
    """With fewer it would wait for the link to fill, with more on their way it would copy more."""
    p = equal_problem(40, 0.1)
    arena = packed_arena(p.storages, p.traces, kind=kind, granule=64, alignment=64)
    prompt = replace(p, arena=arena)

    def on(share):
        return replace(prompt, hardware=replace(p.hardware, link_in_flight_bytes=int(UNIT * share)))

    def period(plan, share):
        return steady_period_ns(p.traces[0], plan.schedules[0], on(share).hardware, p.wrap)

    cases, gains = sampled([*itertools.product((3, 10, 20, 30), (0.1, 0.5, 2.0))], 4), 0
    for weights, share in cases:
        hasty, plan = make_plan(prompt, weights * UNIT), make_plan(on(share), weights * UNIT)
        verify_plan(p.storages, p.traces, plan)
        bounds = plan.lower_bound_ns or 0, hasty.lower_bound_ns or 0
        assert bounds[0] >= bounds[1] > 0
        assert plan.predicted_ns == period(plan, share) <= 1.01 * period(hasty, share)
        assert period(plan, 4 * share) <= 1.01 * period(hasty, 4 * share)
        gains += period(plan, share) < 0.9 * period(hasty, share)
        gains += period(plan, 4 * share) < 0.9 * period(hasty, 4 * share)
    assert gains >= len(cases) * 2 / 3


@pytest.mark.parametrize(
    ("n", "compute", "share", "weights", "periods"),
    [
        (40, 0.9, 0.25, 10, (36_000, 36_000)),  # care costs nothing; without it, 37.9 us on the slow link
        (60, 0.897, 0.25, 10, (54_632, 55_382)),  # it costs 0.6 %; without it, 54.4 and 58.8 us
        (40, 0.9, 1.0, 6, (38_900, 59_000)),  # it would cost 2.8 %, for 40.0 and 41.9 us
    ],
)
def test_a_plan_takes_care_of_a_slow_link_for_a_hundredth_of_its_period(n, compute, share, weights, periods):
    """Nanoseconds on its link, and on a slow one, where it takes four times as long until bytes flow."""
    p = equal_problem(n, compute)
    arena = packed_arena(p.storages, p.traces, kind="contiguous", granule=64, alignment=64)
    hardware = replace(p.hardware, link_in_flight_bytes=int(share * UNIT))
    plan = make_plan(replace(p, arena=arena, hardware=hardware), weights * UNIT)
    verify_plan(p.storages, p.traces, plan)
    slow = replace(hardware, link_in_flight_bytes=4 * hardware.link_in_flight_bytes)
    ((trace,), (schedule,)) = p.traces, plan.schedules
    assert (plan.predicted_ns, steady_period_ns(trace, schedule, slow, p.wrap)) == periods


def test_a_plan_as_long_as_its_bound_copies_seldom():
    """Where compute hides all copies, few large ones are less work for the machine."""
    p = equal_problem(64, 3.0)
    prompt = replace(p, hardware=replace(p.hardware, link_latency_ns=100))
    plan = make_plan(prompt, 32 * UNIT)
    assert plan.predicted_ns == plan.lower_bound_ns == 64 * 3000
    assert len(plan.schedules[0].transfers) <= 32  # 65 of single spans
    verify_plan(p.storages, p.traces, plan)


@pytest.mark.parametrize("budget", [0, 64])
def test_a_copy_that_is_put_off_is_not_on_its_way_when_a_round_begins(budget):
    """The backward reads one storage, and the forward others: its copy waits for the forward's first step."""
    storages = tuple(Storage(64, "streamable") for _ in range(3))
    choices = ((0,), (1,), (2,), (0, 1), (1, 2))
    for reads in itertools.product(choices, repeat=3):
        steps = tuple(Step(f"step.{k}", some, 5000, 10) for k, some in enumerate(reads))
        traces = (
            Trace("forward", 0, "", steps[:2], 10, 10, "modelled", follows=1),
            Trace("backward", 1, "", steps[2:], 10, 10, "modelled", follows=0),
        )
        arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
        problem = Problem(storages, traces, arena, hardware=machine(1e8))
        verify_plan(storages, traces, make_plan(problem, floor(problem).upper_bytes + budget))

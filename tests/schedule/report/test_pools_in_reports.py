"""What reports say of a pool: what it holds, and which of its times are expected, worst, and measured."""

from dataclasses import replace

import pytest

from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.model import Hardware, Part, SparseRead, Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import make_plan
from penstock.schedule.report.comparison import other_policies
from penstock.schedule.report.drawing import cards_of, note_of_steady, render_page, terms_of
from penstock.schedule.report.pictures import picture_of
from penstock.schedule.report.verdict import Origin, Use, limit_of, uses_of, verdict
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.sparse.pool import smallest_pool, timed_pool, units_layout, without_units
from penstock.schedule.verify.proof import verify_plan

MIB = 1 << 20
HARDWARE = Hardware("toy", 1e12, 1e10, 1e9, 10_000)
STORAGES = (Storage(64 * MIB, "streamable"), *(Storage(4 * MIB, "streamable") for _ in range(4)))
EXPERTS = SparseRead(
    Part("", "float32", (64, 512, 512), (512 * 512, 512, 1), 0, 0), "aten.index.Tensor", 0, 8
)


def program(read_ns):
    reads = ((1,), (0,), (2,), (3,), (4,))
    steps = (
        Step(f"s{k}", some, 0, read_ns, sparse=(EXPERTS,) * (some == (0,))) for k, some in enumerate(reads)
    )
    return Trace("forward", 0, "", tuple(steps), 0, 0, "modelled")


def pooled(read_ns, *, arena, pool):
    """A plan with so many MiB of arena, and of pool."""
    trace = program(read_ns)
    layout = units_layout(STORAGES, [trace], granule=4096)
    assert layout is not None
    smallest = replace(smallest_pool([trace], layout, 4096), nbytes=pool * MIB)
    reduced = without_units(trace, smallest)
    timed = timed_pool(smallest, [reduced], HARDWARE)
    own = packed_arena(STORAGES, (reduced,), kind="paged", granule=4096, alignment=64)
    problem = Problem(STORAGES, (reduced,), own, pool=timed, hardware=HARDWARE)
    names = ["experts", *(f"layer.{k}" for k in range(4))]
    plan = make_plan(problem, (arena + pool) * MIB, names=names)
    verify_plan(STORAGES, (trace,), plan)
    return plan


def test_a_plan_says_what_its_pool_holds():
    plan = pooled(1_000, arena=16, pool=8)
    assert plan.pool is not None
    expected, worst = plan.pool.expected_ns[0], plan.pool.worst_ns[0]
    assert 0 < expected < worst
    assert plan.predicted_ns == plan.schedules[0].predicted_ns + expected
    assert plan.residency.startswith(
        "16.00 MiB of 80.00 MiB resident, a pool of 8.00 MiB for units of 64.00 MiB, 0 B streamed"
    )
    first, limit, helps = verdict(plan, {})
    assert "Everything fits" not in first
    assert limit == (
        "Units limit it: of 7.38 ms, a pass waits for rows or experts that are not in the pool of 8.00 MiB: "
        "expected 7.37 ms if all are asked for equally often, at worst 8.41 ms."
    )
    assert first.endswith("their time may be above the best possible: that depends on what calls ask for.")
    assert helps == "A larger budget makes it faster."
    assert limit_of(plan) == "units"
    rate = 1e9 / plan.predicted_ns
    assert f"forward makes {rate:,.0f} passes a second" in first or f"{rate:.3g} passes a second" in first


@pytest.mark.parametrize(("share", "told"), [(0.009, False), (0.011, True)])
def test_waits_for_units_are_told_from_one_percent_on(share, told):
    plan = pooled(1_000, arena=4, pool=64)
    assert plan.pool is not None
    waits = int(sum(one.predicted_ns for one in plan.schedules) * share / (1 - share))
    plan = replace(plan, pool=replace(plan.pool, expected_ns=(waits,), worst_ns=(2 * waits,)))
    said = " ".join(verdict(plan, {}))
    assert ("rows or experts" in said) == ("with this pool" in said) == told
    assert ("pool" in said) == told
    (pool,) = (meaning for name, meaning in terms_of(plan) if name == "Pool")
    assert pool.endswith("its waits are short") != told


def test_what_limits_a_plan_is_found_beside_its_pool():
    assert limit_of(pooled(1_000, arena=4, pool=64)) == "link"
    assert limit_of(pooled(10_000_000, arena=16, pool=64)) == "compute"


def test_other_policies_read_whole_what_the_pool_serves():
    plan = pooled(1_000, arena=16, pool=8)
    assert other_policies(plan) == {}  # within 24 MiB there is no room for 64
    large = replace(plan, budget=72 * MIB)
    assert min(other_policies(large).values()) > 5 * large.predicted_ns


def test_the_page_says_it():
    plan = pooled(1_000, arena=16, pool=8)
    assert [card[1] for card in cards_of(plan)][2] == "Units"
    (pool,) = (said for name, said in terms_of(plan) if name == "Pool")
    assert pool.startswith(
        "8.00 MiB for the rows or experts of 1 weight (64.00 MiB) that calls ask for, beside the"
    )
    page = render_page(plan, plan.names, Origin(), ())
    assert "that are not in the pool of 8.00 MiB" in page
    assert "calls wait for rows or experts" in page
    assert "what a call waits for units is not drawn" in note_of_steady(picture_of(plan, 0))
    without = replace(plan, pool=replace(plan.pool, expected_ns=(), worst_ns=())) if plan.pool else plan
    assert any("has not been estimated" in one for one in verdict(without, {}))


def test_the_use_of_each_weight():
    plan = pooled(1_000, arena=16, pool=8)
    experts, *layers = uses_of(picture_of(plan, 0))
    why = "read by units in s1, from the pool: a call asks for 8 of 64 units at most, 1.00 MiB each"
    assert experts == Use("by units", "by units", 1, 0, why)
    assert {one.lives for one in layers} == {"outside"}


def test_methods_in_turn_have_the_sum_of_their_waits():
    plan = pooled(1_000, arena=16, pool=8)
    assert plan.pool is not None
    second = replace(plan.traces[0], graph=1, method="backward", follows=0)
    both = replace(
        plan,
        traces=(replace(plan.traces[0], follows=1), second),
        schedules=(plan.schedules[0], replace(plan.schedules[0], graph=1)),
        pool=replace(plan.pool, expected_ns=(3, 4), worst_ns=(5, 6)),
    )
    one = joined(both).pool
    assert one is not None
    assert (one.expected_ns, one.worst_ns) == ((7,), (11,))
    assert both.expected_ns(1) == both.schedules[1].predicted_ns + 4

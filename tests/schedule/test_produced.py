"""Produced storages: plans for random rounds of forward and backward, and plans that are wrong."""

from dataclasses import replace
from random import Random

import pytest

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import (
    Arena,
    Drop,
    Hardware,
    Range,
    Schedule,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.facts.problem import Problem
from penstock.schedule.payload.codec import plan_from_json
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, improve_plan, make_plan
from penstock.schedule.space.layout import mapped_arena, packed_arena
from penstock.schedule.verify.proof import verify_plan
from tests import oracle
from tests.hunt import nightly_but
from tests.schedule.traces import in_files, machine

GRANULE = 64
TIMES = (0, 1, 10, 300, 5_000)


def random_problem(dice):
    """A forward that writes, and a backward that reads what it wrote, as two methods or as one."""
    sizes = [GRANULE, 4 * GRANULE, 8 * GRANULE, 100, 333]
    weights = [Storage(dice.choice(sizes), "streamable") for _ in range(dice.randint(1, 5))]
    made = [Storage(dice.choice(sizes), "produced") for _ in range(dice.randint(1, 6))]
    kept = list(range(len(weights), len(weights) + len(made)))
    forward, backward = [], []
    for s in kept:
        reads = (dice.randrange(len(weights)),)
        if dice.random() < 0.5:
            forward.append(_step(dice, reads, (s,)))
        else:
            forward += [_step(dice, reads), _step(dice, (), (s,))]
    for s in reversed(kept):
        for _ in range(dice.choice([0, 1, 1, 1, 2])):
            more = {dice.randrange(len(weights))} if dice.random() < 0.5 else {dice.choice(kept)}
            backward.append(_step(dice, tuple(sorted({s} | more))))
    backward = backward or [_step(dice, (0,))]
    traces = _methods(dice, forward, backward)
    if dice.random() < 0.2:
        steps = tuple(_step(dice, (dice.randrange(len(weights)),)) for _ in range(3))
        traces = (*traces, Trace("evaluate", 2, "", steps, 7, 9, "modelled"))
    storages, arena = _placed(dice, tuple(weights), tuple(made), traces)
    hardware = Hardware(
        "toy",
        1e12,
        1e11,
        dice.choice([1e8, 1e9, 1e10]),
        dice.choice([0, 0, 20]),
        dice.choice([0, 0, 300]),
        write_bytes_per_s=dice.choice([None, None, 3e8]),
        duplex=dice.random() < 0.3,
    )
    wrap = dice.choice(["overlap", "overlap", "overlap", "barrier"])
    return Problem(storages, traces, arena, hardware=hardware, wrap=wrap)


def _step(dice, reads, writes=()):
    return Step("step", reads, dice.choice(TIMES), dice.choice(TIMES), writes=writes)


def _methods(dice, forward, backward):
    if dice.random() < 0.3:
        return (Trace("both", 0, "", (*forward, *backward), 5, 6, "modelled"),)
    return (
        Trace("forward", 0, "", tuple(forward), 1, 2, "modelled", follows=1),
        Trace("backward", 1, "", tuple(backward), 3, 4, "modelled", follows=0),
    )


def _placed(dice, weights, made, traces):
    kind, granule = dice.choice(["paged", "mapped", "contiguous"]), dice.choice([GRANULE, 4 * GRANULE])
    if kind == "mapped":
        placed, files = in_files(weights)
        arena = mapped_arena((*placed, *made), files, granule=granule, page=GRANULE)
        assert arena is not None
        return (*placed, *made), arena
    storages = (*weights, *made)
    if kind == "paged":
        return storages, packed_arena(storages, traces, kind="paged", granule=granule, alignment=GRANULE)
    return storages, packed_arena(storages, traces, kind="contiguous", granule=GRANULE, alignment=GRANULE)


def outs_of(plan):
    return [t for schedule in plan.schedules for t in schedule.transfers if t.direction == "out"]


@pytest.mark.parametrize("seeds", nightly_but({0, 1}, range(6)))
def test_plans_of_random_rounds_are_safe_and_within_their_bounds(seeds):
    spilled = 0
    for seed in range(8 * seeds, 8 * seeds + 8):
        dice = Random(seed)
        problem = random_problem(dice)
        lowest = floor(problem).upper_bytes
        total = sum(storage.nbytes for storage in problem.storages)
        plan = make_plan(problem, lowest + int(0.8 * dice.random() * max(0, total - lowest)))
        left = iter(range(20))
        plan = improve_plan(plan, problem, lambda _, left=left: next(left, None) is not None)
        verify_plan(problem.storages, problem.traces, plan)
        oracle.check_plan(problem.storages, problem.traces, plan, range(2))
        one = joined(plan)
        for trace, schedule in zip(one.traces, one.schedules, strict=True):
            assert steady_period_ns(trace, schedule, plan.hardware, plan.wrap) == schedule.predicted_ns
        assert plan.lower_bound_ns is not None
        assert plan.lower_bound_ns <= plan.predicted_ns
        spilled += bool(outs_of(plan))
    assert spilled  # or nothing was tried


def layers(count, nbytes, *, compute, hardware):
    """Each of `count` layers keeps one value for the backward, which runs them in reverse."""
    storages = (Storage(GRANULE, "streamable"), *(Storage(nbytes, "produced") for _ in range(count)))
    forward = tuple(Step(f"keep.{k}", (), compute, 0, writes=(k + 1,)) for k in range(count))
    backward = tuple(Step(f"grad.{k}", (k + 1,), 0, compute) for k in reversed(range(count)))
    traces = (
        Trace("forward", 0, "", (*forward, Step("loss", (0,), 0, 1)), 0, 0, "modelled", follows=1),
        Trace("backward", 1, "", backward, 0, 0, "modelled", follows=0),
    )
    arena = packed_arena(storages, traces, kind="paged", granule=GRANULE, alignment=GRANULE)
    return Problem(storages, traces, arena, hardware=hardware)


def test_what_does_not_fit_is_copied_out_and_in_once():
    nbytes, count = 16 * GRANULE, 20
    problem = layers(count, nbytes, compute=10, hardware=machine(1e9))
    plan = make_plan(problem, 12 * nbytes)
    verify_plan(problem.storages, problem.traces, plan)
    out = sum(t.stop - t.start for t in outs_of(plan))
    assert 8 * nbytes <= out <= 11 * nbytes
    assert plan.written_bytes == out
    assert plan.streamed_bytes <= out + 2 * GRANULE
    assert plan.predicted_ns <= 1.1 * (plan.lower_bound_ns or 0)
    both = make_plan(replace(problem, hardware=replace(problem.hardware, duplex=True)), 12 * nbytes)
    assert both.predicted_ns <= plan.predicted_ns
    slow = replace(problem.hardware, write_bytes_per_s=2.5e8)
    assert make_plan(replace(problem, hardware=slow), 12 * nbytes).predicted_ns > 1.5 * plan.predicted_ns


def test_enough_compute_hides_what_is_copied():
    nbytes = 64 * GRANULE
    problem = layers(20, nbytes, compute=3 * nbytes, hardware=machine(1e9))
    plan = make_plan(problem, 6 * nbytes)
    assert outs_of(plan)
    assert plan.predicted_ns <= 1.02 * plan.compute_ns


def test_no_copy_may_cross_a_barrier_so_what_does_is_held_whole():
    problem = replace(layers(4, 256, compute=1, hardware=machine(1e9)), wrap="barrier")
    plan = make_plan(problem, floor(problem).upper_bytes)
    assert set(plan.outside) >= {1, 2, 3, 4}
    verify_plan(problem.storages, problem.traces, plan)


# Plans that are wrong, in small: step 0 writes 0:64, which leaves by step 2 and comes back for step 4.

STEPS = (
    Step("write", (), 0, 1, writes=(0,)),
    Step("a", (1,), 0, 1),
    Step("b", (1,), 0, 1),
    Step("c", (1,), 0, 1),
    Step("read", (0,), 0, 1),
)
OUT, BACK = Transfer(0, 64, 2, 0, "out"), Transfer(0, 64, 4, 2)
DROPS = (Drop(0, 64, 2), Drop(0, 64, 4))
STORAGES = (Storage(64, "produced"), Storage(64, "streamable"))


def small_plan():
    trace = Trace("both", 0, "", STEPS, 0, 0, "modelled")
    weight = Range(64, 128)
    return Plan(
        budget=128,
        arena=Arena("paged", "anonymous", 64, (0, 64), (Range(0, 64), weight)),
        arena_bytes=128,
        outside=(),
        addresses=(),
        resident=(weight,),
        boundary=(weight,),
        wrap="overlap",
        schedules=(Schedule(0, (OUT, BACK), DROPS, 10),),
        traces=(trace,),
        hardware=machine(1e9),
    )


def test_the_small_plan_is_safe():
    plan = small_plan()
    verify_plan(STORAGES, plan.traces, plan)
    oracle.check_plan(STORAGES, plan.traces, plan)


def changed(**values):
    return lambda plan: replace(plan, schedules=(replace(plan.schedules[0], **values),))  # type: ignore[arg-type]


def with_steps(*steps):
    return lambda plan: replace(plan, traces=(replace(plan.traces[0], steps=steps),))


WEIGHT = Transfer(64, 128, 3, 2, "out")
TIGHT = (Drop(0, 64, 3), Drop(0, 64, 4))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (with_steps(STEPS[4], *STEPS[1:4], STEPS[0]), "no transfer has brought"),
        (with_steps(STEPS[0], STEPS[0], *STEPS[2:]), "that no other step writes"),
        (changed(transfers=(BACK,)), "before they are sure to be in the spill file"),
        (changed(transfers=(OUT, replace(BACK, after=1))), "before they are sure to be in the spill file"),
        (changed(transfers=(replace(OUT, step=3), BACK)), "before a copy out of them is sure to be done"),
        (changed(transfers=(replace(OUT, step=3), BACK), drops=TIGHT), "before they are sure to be in the"),
        (changed(transfers=(replace(OUT, after=-1), BACK)), "before they are sure to be in the spill file"),
        (changed(transfers=(replace(OUT, after=2, step=3), replace(BACK, after=3))), "not sure to be there"),
        (changed(transfers=(OUT, replace(BACK, after=3)), drops=(DROPS[1],)), "which are on the device"),
        (changed(transfers=(OUT,)), "no transfer has brought"),
        (changed(drops=(DROPS[0],)), "are gone, but in the boundary|are missing from the boundary"),
        (changed(transfers=(OUT, BACK, WEIGHT)), "takes bytes that are resident"),
        (lambda plan: replace(plan, arena_bytes=64), "does not fit|may need 128 bytes"),
        (lambda plan: replace(plan, boundary=(*plan.boundary, Range(0, 64))), "does not write"),
        (lambda plan: replace(plan, resident=(Range(0, 64), *plan.resident)), "resident"),
    ],
)
def test_wrong_plans_are_refused_by_verifier_and_oracle(spoil, sentence):
    plan = spoil(small_plan())
    with pytest.raises(PlanError, match=sentence):
        verify_plan(STORAGES, plan.traces, plan)
    with pytest.raises(oracle.UnsafeError):
        oracle.check_plan(STORAGES, plan.traces, plan)


@pytest.mark.parametrize("storage", [-1, 1, 2])
def test_a_step_writes_a_storage_that_is_produced_and_there(storage):
    plan = with_steps(replace(STEPS[0], writes=(storage,)), *STEPS[1:])(small_plan())
    with pytest.raises(PlanError, match=f"writes storage {storage}, expected a produced one of 2"):
        verify_plan(STORAGES, plan.traces, plan)


def test_room_is_taken_when_the_step_that_writes_begins():
    plan = small_plan()
    late = Transfer(64, 128, 1, 0)  # the weight may come while the first step writes: no room for both
    moved = replace(plan.schedules[0], transfers=(OUT, late, BACK), drops=(Drop(64, 128, 3), *DROPS))
    moved = replace(moved, transfers=(replace(late, after=-1), OUT, BACK))
    tight = replace(
        plan, budget=64, arena_bytes=64, resident=(), boundary=(Range(64, 128),), schedules=(moved,)
    )
    with pytest.raises(PlanError, match="may need 128 bytes"):
        verify_plan(STORAGES, tight.traces, tight)
    with pytest.raises(oracle.UnsafeError, match="more memory"):
        oracle.check_plan(STORAGES, tight.traces, tight)


def test_a_produced_storage_has_a_segment_of_its_own():
    plan = small_plan()
    shared = replace(plan, arena=replace(plan.arena, segments=(Range(0, 128),)))
    with pytest.raises(PlanError, match="expected one of its own"):
        verify_plan(STORAGES, shared.traces, shared)
    with pytest.raises(oracle.UnsafeError, match="shares its segment"):
        oracle.check_plan(STORAGES, shared.traces, shared)


def test_a_host_holds_what_is_copied_out_beside_its_ring():
    hardware = replace(machine(1e9), disk_bytes_per_s=5e8)
    problem = replace(layers(8, 1024, compute=10, hardware=hardware), host=8 * 1024)
    plan = make_plan(problem, 4 * 1024)
    assert outs_of(plan)
    assert plan.host is not None
    verify_plan(problem.storages, problem.traces, plan)
    lost = replace(plan, host=replace(plan.host, resident=plan.host.resident[1:]))
    with pytest.raises(PlanError, match="no memory for the bytes"):
        verify_plan(problem.storages, problem.traces, lost)
    with pytest.raises(BudgetError, match="beside what is copied out"):
        make_plan(replace(problem, host=1024), 4 * 1024)


def test_a_plan_with_copies_out_can_be_read():
    plan = make_plan(layers(8, 1024, compute=10, hardware=machine(1e9)), 4 * 1024)
    assert plan.event_graph().number_of_nodes() > 16
    assert plan_from_json(plan.to_json()) == plan

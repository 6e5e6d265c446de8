"""The rules of a pool: a plan that keeps them, and for each rule one that breaks it, with its sentence."""

from dataclasses import replace

import pytest

from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Computed, Part, Pool, SparseRead, Storage
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.verify.proof import verify_plan
from tests import oracle
from tests.schedule.verify.test_verify import HARDWARE, PAGED, STORAGES, trace_of

GRANULE = 64
# Twelve units of 40 bytes, one every 48, from byte 16 of storage 4 on.
UNITS = SparseRead(Part("", "int32", (12, 10), (12, 1), 4, 16), "aten.embedding.default", 0, 3)
WITH_TABLE = (*STORAGES, Storage(600, "streamable", phase=8), Storage(600, "streamable"))


def reading(*steps):
    plain = trace_of(*(reads for reads, _ in steps))
    sparse = ((() if one is None else (one,)) for _, one in steps)
    return replace(plain, steps=tuple(replace(k, sparse=s) for k, s in zip(plain.steps, sparse, strict=True)))


# The program's steps read storages 0, 1 and 2 as those of test_verify do, and the first one units, too.
PROGRAM = reading(((0, 4), UNITS), ((1,), None), ((2,), None))
PLANNED = reading(((0,), UNITS), ((1,), None), ((2,), None))
POOL = Pool(2 * GRANULE, GRANULE, (-1, -1, -1, -1, 8, -1))
PLAN = replace(
    PAGED,
    arena=replace(PAGED.arena, layout=(*PAGED.arena.layout, -1, -1)),
    budget=PAGED.budget + POOL.nbytes,
    traces=(PLANNED,),
    pool=POOL,
)


def refuse(plan, sentence, *, program=PROGRAM, storages=WITH_TABLE):
    with pytest.raises(PlanError) as caught:
        verify_plan(storages, (program,), plan)
    assert sentence in str(caught.value)
    with pytest.raises(oracle.UnsafeError):
        oracle.check_plan(storages, (program,), plan)


def pooled(**changes):
    return replace(PLAN, pool=replace(POOL, **changes))


def both(read):
    """A plan and its program, which read other units."""
    steps = ((1,), None), ((2,), None)
    return {
        "plan": replace(PLAN, traces=(reading(((0,), read), *steps),)),
        "program": reading(((0, 4), read), *steps),
    }


def viewed(**changes):
    return replace(UNITS, view=replace(UNITS.view, **changes))


def test_a_safe_plan():
    verify_plan(WITH_TABLE, (PROGRAM,), PLAN)
    oracle.check_plan(WITH_TABLE, (PROGRAM,), PLAN)


def test_without_a_pool_all_is_read_whole():
    refuse(replace(PLAN, pool=None), "the plan was made for another program, which has other reads in step 0")


def test_the_arena_has_what_the_pool_does_not_serve():
    away = replace(PLAN, traces=(reading(((), UNITS), ((1,), None), ((2,), None)),))
    refuse(away, "other reads in step 0")
    refuse(replace(PLAN, traces=(PROGRAM,)), "other reads in step 0")
    refuse(
        replace(PLAN, traces=(reading(((0,), None), ((1,), None), ((2,), None)),)), "other reads in step 0"
    )
    other = replace(UNITS, route=1)
    refuse(
        replace(PLAN, traces=(reading(((0,), other), ((1,), None), ((2,), None)),)), "other reads in step 0"
    )


def test_a_storage_that_another_step_reads_whole_is_in_the_arena_for_that_one():
    program = reading(((0, 4), UNITS), ((1, 4), None), ((2,), None))
    refuse(PLAN, "other reads in step 1", program=program)


def test_the_pool_is_within_the_budget():
    refuse(replace(PLAN, budget=PLAN.budget - 1), "do not fit into the budget")


def test_the_pool_has_granules_and_places():
    refuse(pooled(granule=0), "expected a pool of granules with 6 offsets")
    refuse(pooled(layout=(-1, -1, -1, -1, 8)), "expected a pool of granules with 6 offsets")


def test_a_storage_lies_at_its_phase():
    refuse(
        pooled(layout=(-1, -1, -1, -1, 16, -1)), "lies at byte 16 of the pool, expected a streamable one at 8"
    )


def test_what_is_not_streamable_has_no_units():
    storages = (*WITH_TABLE[:4], replace(WITH_TABLE[4], kind="returned"), WITH_TABLE[5])
    away = replace(PLAN, outside=(3, 4), budget=PLAN.budget + 600)
    refuse(away, "storage 4, which is returned, lies at byte 8 of the pool", storages=storages)


def test_no_two_storages_have_bytes_in_one_granule():
    # Storage 4 ends at byte 608 of the pool, in granule 9; storage 5 may begin in granule 10.
    verify_plan(WITH_TABLE, (PROGRAM,), pooled(layout=(-1, -1, -1, -1, 8, 640)))
    refuse(pooled(layout=(-1, -1, -1, -1, 8, 576)), "storage 5 lies in a granule of the pool that another")


def test_the_largest_unit_fits():
    # Units begin at bytes 24, 72, 120, ... of the pool: the third one, 120:160, is in granules 1 and 2.
    refuse(pooled(nbytes=127), "needs 128 bytes for one unit of storage 4, and the pool has 127")
    refuse(pooled(nbytes=GRANULE), "needs 128 bytes for one unit of storage 4")
    first = viewed(shape=(1, 10))  # the first alone, 24:64, is in one
    one = both(first)
    verify_plan(WITH_TABLE, (one["program"],), replace(one["plan"], pool=replace(POOL, nbytes=GRANULE)))


def test_units_lie_in_their_storage():
    verify_plan(
        WITH_TABLE,
        **{"plan": both(viewed(offset=32))["plan"], "traces": (both(viewed(offset=32))["program"],)},
    )
    refuse(**both(viewed(offset=36)), sentence="reads bytes 36:604 of storage 4, which has 600")
    refuse(**both(viewed(shape=(13, 10), offset=0)), sentence="reads bytes 0:616 of storage 4, which has 600")
    refuse(**both(viewed(offset=-4)), sentence="reads bytes -4:564 of storage 4")


def test_units_do_not_overlap():
    refuse(**both(viewed(stride=(9, 1))), sentence="reads units of 40 bytes every 36: they overlap")


@pytest.mark.parametrize("count", [0, -1, 1])
def test_as_many_slices_are_computed_as_there_are_units(count):
    computed = Computed("float32", (UNITS.count + count, 2), (2, 1))
    given = both(replace(UNITS, computed=computed))
    if count:
        refuse(**given, sentence=f"computes {UNITS.count + count} slices from {UNITS.count} units: expected")
    else:
        verify_plan(WITH_TABLE, (given["program"],), given["plan"])


@pytest.mark.parametrize(
    "changes", [{"shape": ()}, {"dtype": "complex5"}, {"shape": (12, 0)}, {"stride": (12,)}]
)
def test_units_are_slices_of_a_tensor(changes):
    refuse(**both(viewed(**changes)), sentence="reads units of a tensor of")


def test_all_reads_of_a_storage_have_the_same_units():
    other = viewed(shape=(6, 10), stride=(24, 1))
    program = reading(((0, 4), UNITS), ((1, 4), other), ((2,), None))
    plan = replace(PLAN, traces=(reading(((0,), UNITS), ((1,), other), ((2,), None)),))
    refuse(plan, "step 1 (layer.1) reads other units of storage 4 than an earlier step", program=program)
    again = replace(UNITS, route=1, asked=12)
    program = reading(((0, 4), UNITS), ((1, 4), again), ((2,), None))
    verify_plan(
        WITH_TABLE, (program,), replace(PLAN, traces=(reading(((0,), UNITS), ((1,), again), ((2,), None)),))
    )


def test_a_step_reads_units_of_one_storage():
    two = replace(UNITS, view=replace(UNITS.view, storage=5))
    steps = PROGRAM.steps[1:]
    program = replace(
        PROGRAM, steps=(replace(PROGRAM.steps[0], reads=(0, 4, 5), sparse=(UNITS, two)), *steps)
    )
    planned = replace(PLANNED, steps=(replace(PLANNED.steps[0], sparse=(UNITS, two)), *steps))
    plan = replace(pooled(layout=(-1, -1, -1, -1, 8, 640)), traces=(planned,))
    refuse(plan, "reads units of 2 storages, expected one at most", program=program)


def test_the_first_storage_may_be_that_of_the_units():
    read = viewed(storage=0)
    storages = (WITH_TABLE[4], Storage(GRANULE, "streamable"))
    program, planned = (reading((reads, read), ((1,), None)) for reads in ((0, 1), (1,)))
    arena = packed_arena(storages, (planned,), kind="paged", granule=GRANULE, alignment=GRANULE)
    pool = replace(POOL, layout=(8, -1))
    problem = Problem(storages, (planned,), arena, pool=pool, hardware=HARDWARE)
    plan = make_plan(problem, floor(problem).upper_bytes)
    verify_plan(storages, (program,), plan)
    oracle.check_plan(storages, (program,), plan)
    refuse(
        replace(plan, pool=replace(pool, nbytes=127)), "the pool has 127", program=program, storages=storages
    )


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("beside", [14, 18, 22, 26])
def test_plans_that_are_made_beside_a_pool_are_safe(kind, beside):
    arena = packed_arena(WITH_TABLE, (PLANNED,), kind=kind, granule=GRANULE // 16, alignment=1)
    problem = Problem(WITH_TABLE, (PLANNED,), arena, pool=POOL, hardware=HARDWARE)
    fixed = 5 + POOL.nbytes  # storage 3 is mutable
    least = floor(problem).upper_bytes
    assert least >= fixed + 8
    plan = make_plan(problem, max(least, fixed + beside))
    assert plan.pool == POOL
    verify_plan(WITH_TABLE, (PROGRAM,), plan)
    oracle.check_plan(WITH_TABLE, (PROGRAM,), plan)
    with pytest.raises(BudgetError):
        make_plan(problem, least - 1)

"""The oracle against literal faults, and the verifier against the oracle on thousands of random plans."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_verify import CONTIGUOUS, PAGED, STORAGES, TRACES, scheduled, transfers

from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Drop, Range, Transfer
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.verify.proof import verify_plan
from tests import oracle
from tests.hunt import scaled
from tests.schedule.traces import problems
from tests.schedule.verify.random_plans import Case, random_case, spoil

SEEDS = scaled(1_500)
SPOILED = 6


def verdicts(case):
    """What the verifier and the oracle say against a plan."""
    said = []
    for check, error in ((verify_plan, PlanError), (oracle.check_plan, oracle.UnsafeError)):
        try:
            check(case.storages, case.traces, case.plan)
            said.append(None)
        except error as problem:
            said.append(str(problem))
    return said[0], said[1]


def tightened(case):
    """The same plan in the smallest paged arena that holds it."""
    if case.plan.arena.kind == "contiguous":
        return case
    try:
        peak = oracle.peak_bytes(case.storages, case.plan)
    except oracle.UnsafeError:
        return case
    return replace(case, plan=replace(case.plan, arena_bytes=peak, budget=peak))


FAULTS = {
    "step 2 reads other data than its own": scheduled(
        PAGED, transfers=PAGED.schedules[0].transfers[:1], drops=()
    ),
    "more memory than the arena has": transfers(PAGED, 0, after=-2),
    "two copies write the same bytes at once": transfers(CONTIGUOUS, 0, after=-2),
    "everything waits at step 1": scheduled(
        PAGED,
        transfers=(Transfer(16, 22, 2, 1), Transfer(0, 8, 1, 0)),
        drops=(Drop(16, 22, 2), Drop(0, 8, 0)),
    ),
    "a drop takes resident bytes": scheduled(PAGED, drops=(*PAGED.schedules[0].drops, Drop(8, 16, 2))),
    "pass 0 does not end at the boundary": scheduled(
        CONTIGUOUS, transfers=CONTIGUOUS.schedules[0].transfers[1:]
    ),
    "a misaligned start": transfers(PAGED, 1, start=17),
    "over budget": replace(PAGED, budget=20),
    "two segments in one granule": replace(
        PAGED, arena=replace(PAGED.arena, segments=(Range(0, 18), Range(18, 22)))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_sees_what_was_spoiled_by_hand(fault):
    with pytest.raises(oracle.UnsafeError, match=fault):
        oracle.check_plan(STORAGES, TRACES, FAULTS[fault])


@pytest.mark.parametrize("plan", [PAGED, CONTIGUOUS])
def test_the_oracle_accepts_what_is_safe(plan):
    oracle.check_plan(STORAGES, TRACES, plan)


@pytest.mark.random
def test_verifier_and_oracle_agree_on_random_plans_safe_and_spoiled():
    counts = Counter()
    for seed in range(SEEDS):
        dice = Random(seed)
        case = random_case(dice)
        if dice.random() < 0.7:
            case = tightened(case)
        spoiled = dice.choice([0, 1, 1, 1, 2])
        for _ in range(spoiled):
            case = replace(case, plan=spoil(dice, case.plan))
        verifier, second = verdicts(case)
        assert (verifier is None) == (second is None), f"seed {seed}: {verifier!r} against {second!r}"
        counts[case.plan.arena.kind, spoiled > 0, verifier is None] += 1
    # the comparison is worth something only where both verdicts are frequent
    assert counts["paged", False, True] > 100
    assert min(counts[kind, True, safe] for kind in ("paged", "contiguous") for safe in (True, False)) > 40


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_both_accept_what_the_planner_makes_and_agree_on_it_spoiled(kind):
    counts = Counter()

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(st.one_of(problems(kind), problems(kind, methods=2)), st.integers(0, 2**32))
    def check(problem, seed):
        plan = planned(problem)
        if plan is None:
            counts["below the floor"] += 1
            return
        case = Case(problem.storages, problem.traces, plan)
        assert verdicts(case) == (None, None)
        counts["moves" if any(s.transfers for s in plan.schedules) else "nothing moves"] += 1
        for number in range(SPOILED if plan.schedules[0].transfers else 0):
            bad = replace(case, plan=spoil(Random(seed + number), plan))
            verifier, second = verdicts(bad)
            assert (verifier is None) == (second is None), f"{verifier!r} against {second!r}"
            counts["refused" if verifier else "still safe"] += 1

    check()
    assert counts["moves"] > 4
    assert counts["refused"] > 15


def planned(problem):
    lowest = floor(problem).upper_bytes
    # half-way shares leave nothing to stream in most of the small problems
    budget = lowest + (problem.budget(lowest) - lowest) // 4
    try:
        return make_plan(problem, budget)
    except BudgetError:
        return None

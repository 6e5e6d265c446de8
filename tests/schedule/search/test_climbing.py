"""The longer search behind a plan of a contiguous arena: never slower, always safe, and it ends when told."""

import itertools

import pytest

from benchmarks.corpus import Decoder, decoder_of
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import improve_plan, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.verify.proof import verify_plan
from tests.schedule.search.test_small_plans import drawn


def attempts(count):
    """Go on for so many attempts."""
    left = itertools.count(count, -1)
    return lambda period: next(left) > 0


def test_a_decoder_gets_a_faster_plan():
    program = decoder_of(Decoder(2, 512, 2048, 8, 2, 64, 4000), "decode")
    hardware = find_hardware("h200")
    trace = with_times(program.trace, hardware)
    arena = packed_arena(program.storages, (trace,), kind="contiguous", granule=4096, alignment=4096)
    problem = Problem(program.storages, (trace,), arena, hardware=hardware)
    plan = make_plan(problem, 14_000_000, effort=0.5)
    better = improve_plan(plan, problem, attempts(400))
    verify_plan(problem.storages, problem.traces, better)
    assert better.predicted_ns < plan.predicted_ns
    assert better == improve_plan(plan, problem, attempts(400))


@pytest.mark.parametrize("seed", range(1, 40, 2))
def test_improved_plans_are_safe_and_never_slower(seed):
    problem, budget = drawn(seed)
    plan = make_plan(problem, budget)
    periods = []

    def go_on(period):
        periods.append(period)
        return len(periods) <= 60

    better = improve_plan(plan, problem, go_on)
    verify_plan(problem.storages, problem.traces, better)
    assert better.predicted_ns <= plan.predicted_ns
    assert periods == sorted(periods, reverse=True)

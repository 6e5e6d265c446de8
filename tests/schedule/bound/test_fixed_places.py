"""The bound of each kind of arena against the best of all plans of tiny problems."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from penstock.schedule.bound import relaxation
from penstock.schedule.bound.gaps import FixedPlaces
from penstock.schedule.facts.model import Hardware, Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import _relaxed, floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces
from tests.hunt import nightly_but
from tests.schedule.bound.paged_plans import PagedPlans
from tests.schedule.bound.placements import Placements

GRANULE = 4096


def random_trace(dice, graph, storages):
    """Steps that read the storages in turn, in a third of the cases one of them again or two at once."""
    reads = [[s] for s in storages]
    if dice.random() < 0.35:
        reads.insert(dice.randrange(len(reads) + 1), [dice.choice(storages)])
    if dice.random() < 0.2:
        k = dice.randrange(len(reads) - 1)
        reads[k : k + 2] = [sorted({*reads[k], *reads[k + 1]})]
    ns = [dice.choice([0, 0, 1000, 3000, 10000]) for _ in range(2 * len(reads) + 2)]
    steps = (Step(f"s{k}", tuple(some), ns[2 * k], ns[2 * k + 1]) for k, some in enumerate(reads))
    return Trace(f"f{graph}", graph, "", tuple(steps), *ns[-2:], "modelled")


def random_problem(dice, kind, *, methods=1):
    """Storages of 1 to 3 granules, whole or cut, and a budget between the floor and all their bytes.

    Of two large ones, which have 2 more, at most 3 granules are over the budget.
    """
    while True:
        count = dice.choice([3, 3, 4, 4, 5] if kind == "contiguous" or methods > 1 else [2, 2, 3])
        sizes = [
            dice.choice([1, 1, 2, 2, 3]) * GRANULE - dice.choice([0, 0, 0, 1024, 3584]) for _ in range(count)
        ]
        if kind == "two large":
            sizes[:2] = (nbytes + 2 * GRANULE for nbytes in sizes[:2])
        storages = tuple(Storage(nbytes, "streamable") for nbytes in sizes)
        some = (
            [range(count)] if methods == 1 else [sorted(dice.sample(range(count), 3)) for _ in range(methods)]
        )
        traces = tuple(random_trace(dice, graph, list(mine)) for graph, mine in enumerate(some))
        granule_ns, in_flight = dice.choice([1000, 4000]), dice.choice([0, 0, 1, 3, 10])
        rate = GRANULE / granule_ns * 1e9
        hardware = Hardware(
            "tiny", 1e12, 1e12, rate, dice.choice([0, 1000, 5000, 20000]), in_flight * GRANULE
        )
        # With a quarter, storages begin within granules, and may share one without a common byte.
        alignment = dice.choice([1, 1, 1, 0.25]) * GRANULE
        arena = packed_arena(storages, traces, kind=KINDS[kind], granule=GRANULE, alignment=int(alignment))
        keep = frozenset({0} if dice.random() < 0.1 else ())
        wrap = dice.choice(["overlap", "overlap", "barrier"])
        problem = Problem(storages, traces, arena, keep, hardware=hardware, wrap=wrap)
        lowest, total = floor(problem).upper_bytes, problem.streamed_bytes
        if lowest < total:
            few = 3 * GRANULE if kind == "two large" else total
            return problem, dice.randrange(max(lowest, total - few), total)


EVERY = {"contiguous": Placements, "paged": PagedPlans}
KINDS = {"contiguous": "contiguous", "paged": "paged", "two large": "contiguous"}


@cache
def solved(seed, kind):
    """A random problem, its budget, and the least period of any plan (None: too many plans)."""
    problem, budget = random_problem(Random(seed), kind)
    return problem, budget, EVERY[KINDS[kind]](problem, budget).least_ns()


def bound_ns(problem, budget):
    return _relaxed(problem, Pieces(problem), budget - problem.outside_bytes, strong=True)[0].bound_ns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", nightly_but({0, 100}, range(0, 4000, 100)))
def test_no_plan_at_all_is_faster_than_the_bound(first, kind):
    ratios = []
    for seed in range(first, first + 100):
        problem, budget, best = solved(seed, kind)
        if best is not None:
            (schedule,) = make_plan(problem, budget).schedules
            assert schedule.lower_bound_ns is not None
            assert schedule.lower_bound_ns <= best <= schedule.predicted_ns, (
                f"seed {seed}: {problem}, {budget}"
            )
            ratios.append(best / schedule.lower_bound_ns)
    assert len(ratios) > 25
    assert sum(ratio < 1.01 for ratio in ratios) > len(ratios) / 4
    assert sum(ratio < 1.2 for ratio in ratios) > len(ratios) / 2


def stronger(rule):
    """One rule of the bound's, by the name that `relaxation` calls it, which says 1 % more than it proves."""
    known = getattr(relaxation, rule.partition(".")[0])

    class Stronger(FixedPlaces):
        def turns_ns(self):
            return int(super().turns_ns() * (1.01 if rule == "FixedPlaces.turns" else 1))

        def windows_ns(self, needed):
            for j, k, ns in super().windows_ns(needed):
                yield j, k, ns * (1.01 if rule == "FixedPlaces.windows" else 1)

    def later(program, hardware):
        in_flight, latency_ns = hardware.link_in_flight_bytes, hardware.link_latency_ns
        known(
            program,
            replace(
                hardware, link_in_flight_bytes=int(1.01 * in_flight), link_latency_ns=int(1.01 * latency_ns)
            ),
        )

    functions = {
        "copies_ns": lambda *facts: int(1.01 * known(*facts)),
        "usable_bytes": lambda *facts: int(known(*facts) / 1.01),
        "_add_arrivals": later,
    }
    return functions.get(rule, Stronger)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("FixedPlaces.turns", "contiguous"),
        ("FixedPlaces.turns", "two large"),
        ("FixedPlaces.windows", "contiguous"),
        ("copies_ns", "paged"),
        ("usable_bytes", "paged"),
        ("_add_arrivals", "paged"),
    ],
)
def test_one_percent_more_would_be_seen(rule, kind, monkeypatch):
    """Of 150 problems, at least one has a plan that is faster than the stronger rule allows."""
    monkeypatch.setattr(relaxation, rule.partition(".")[0], stronger(rule))
    cases = (solved(seed, kind) for seed in range(150))
    assert any(bound_ns(problem, budget) > best for problem, budget, best in cases if best is not None)


@pytest.mark.parametrize("kind", EVERY)
def test_the_bound_of_each_method_is_below_all_plans_of_that_method_alone(kind):
    """With only the storages that it reads, and those that are kept."""
    tried = 0
    for seed in range(40):
        problem, budget = random_problem(Random(seed), kind, methods=2)
        plan = make_plan(problem, budget)
        for trace, schedule in zip(problem.traces, plan.schedules, strict=True):
            used = {s for step in trace.steps for s in step.reads} | problem.keep
            storages = tuple(
                replace(storage, nbytes=storage.nbytes * (s in used))
                for s, storage in enumerate(problem.storages)
            )
            alone = replace(problem, storages=storages, traces=(trace,))
            best = EVERY[kind](alone, budget).least_ns()
            if best is not None:
                assert schedule.lower_bound_ns is not None
                assert schedule.lower_bound_ns <= best <= schedule.predicted_ns
                tried += best > trace.compute_ns
    assert tried > 10

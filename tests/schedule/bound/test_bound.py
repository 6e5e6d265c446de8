"""The bound against the best that there is: exhaustive search on tiny problems, plans on larger ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.bound import relaxation as bound
from penstock.schedule.bound.relaxation import Tier, relax, tier_of
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.model import Step, Storage, Trace
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.space.spans import Pieces
from tests.hunt import scaled
from tests.schedule.bound.exhaustive import TICK_NS, Memory, least_ticks, tiny_of
from tests.schedule.traces import GRANULE, RandomProblem, equal_problem, machine, problems

UNIT = 4096


def lettered(reads, *, ns=0, nbytes=GRANULE, kind="paged"):
    """Steps that read one storage each, named by letters, without leads."""
    storages = (Storage(nbytes, "streamable"),) * len(set(reads))
    steps = tuple(Step(f"s{k}", (ord(one) - ord("a"),), 0, ns) for k, one in enumerate(reads))
    traces = (Trace("f", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind=kind, granule=GRANULE, alignment=GRANULE)
    return RandomProblem(storages, traces, arena, hardware=machine(1e9))


@dataclass(frozen=True)
class Case:
    """A tiny problem, and its memories in chunks, which are granules."""

    problem: RandomProblem
    memories: tuple[Memory, ...]

    @cached_property
    def tiny(self):
        return tiny_of(self.problem, self.memories)

    @property
    def compute_ns(self):
        return self.problem.traces[0].compute_ns

    def best_ns(self, passes=0):
        """The least time of behaviours that repeat after some passes, or (0) after any number."""
        return least_ticks(self.tiny, passes=passes) * TICK_NS

    def relax(self):
        chunks = itertools.accumulate(memory.chunks for memory in self.memories)
        tiers = [
            Tier(n * GRANULE, one.chunk_ticks * TICK_NS / GRANULE, one.latency_ticks * TICK_NS, GRANULE)
            for n, one in zip(chunks, self.memories, strict=True)
        ]
        relaxed = relax(self.problem, Pieces(self.problem), tiers)
        assert relaxed is not None
        return relaxed


def random_case(dice, *, wrap="overlap", latency=False, disk=False, chunks=5):
    """Up to 5 steps that read 1 or 2 storages of 1 to 3 chunks, in memory for less than all of them."""
    while True:
        sizes = [dice.choice([1, 1, 1, 1.5, 2, 3]) for _ in range(dice.randint(2, 4))]
        storages = tuple(Storage(int(size * GRANULE), "streamable") for size in sizes)
        steps = []
        for k in range(dice.randint(2, 5)):
            reads = sorted(dice.sample(range(len(storages)), dice.choice([1, 1, 1, 2])))
            lead, read = dice.choice([0, 0, 1, 2]), dice.choice([0, 1, 1, 2])
            steps.append(Step(f"s{k}", tuple(reads), lead * TICK_NS, read * TICK_NS))
        tail_ns, gap_ns = dice.choice([0, 0, 1]) * TICK_NS, dice.choice([0, 0, 1, 2]) * TICK_NS
        trace = Trace("f", 0, "", tuple(steps), tail_ns, gap_ns, "modelled")
        # half a granule: neighbours may share one, which then is read with either
        arena = packed_arena(storages, (trace,), kind="paged", granule=GRANULE, alignment=GRANULE // 2)
        keep = frozenset(steps[0].reads[:1] if dice.random() < 0.1 else ())
        problem = RandomProblem(storages, (trace,), arena, keep, hardware=machine(1e9), wrap=wrap)
        tiny = tiny_of(problem, ())
        total, least = tiny.chunks.bit_count(), max((i.needs | tiny.pinned).bit_count() for i in tiny.items)
        if least < total <= chunks:
            break
    chunk_ticks, latency_ticks = dice.choice([1, 2, 3, 4]), dice.randint(1, 3) if latency else 0
    device = Memory(dice.randint(least, total - 1), chunk_ticks, latency_ticks)
    host = Memory(dice.randint(1, max(1, total - least)), dice.choice([1, 2]), int(latency))
    hardware = machine(GRANULE * 1e9 / (chunk_ticks * TICK_NS), latency_ns=latency_ticks * TICK_NS)
    return Case(replace(problem, hardware=hardware), (device, host) if disk else (device,))


def ratios(seeds, *, passes=0, **options):
    """Bound over optimum of random cases; none may be above 1."""
    found = []
    for seed in seeds:
        case = random_case(Random(seed), **options)
        best, bound_ns = case.best_ns(passes), case.relax().bound_ns
        assert bound_ns <= best, f"seed {seed}: {case}"
        found.append((case, bound_ns / float(best)))
    return found


@pytest.mark.random
@pytest.mark.parametrize("first", range(0, scaled(500), 500))
def test_the_bound_is_below_every_behaviour_and_near_the_best(first):
    found = ratios(range(first, first + 500))
    link_bound = [r for case, r in found if case.tiny.link_ticks * TICK_NS > case.compute_ns]
    assert len(link_bound) > 200
    assert sum(link_bound) / len(link_bound) > 0.9
    assert sum(ratio > 0.9999 for ratio in link_bound) > len(link_bound) / 4


@pytest.mark.random
@pytest.mark.parametrize(
    ("count", "near", "options"),
    [
        (100, 0.5, {"wrap": "barrier"}),
        (75, 0.01, {"latency": True, "chunks": 4, "passes": 1}),
        (50, 0.01, {"latency": True, "chunks": 4, "passes": 1, "wrap": "barrier"}),
        (50, 0.5, {"disk": True, "chunks": 4}),
        (25, 0.5, {"disk": True, "chunks": 4, "wrap": "barrier"}),
    ],
)
def test_the_bound_is_below_every_behaviour(count, near, options):
    """And within 4 % of the best in at least a share `near` of the cases.

    With latency, it is below what repeats every pass, as plans do; see `test_known_periods`.
    """
    found = [ratio for _, ratio in ratios(range(scaled(count)), **options)]
    assert sum(ratio > 0.96 for ratio in found) > near * len(found)


@pytest.mark.parametrize(
    ("compute", "lead", "weights", "period"),
    [(1, 0, 1, 40), (1, 0, 1.5, 30), (1, 0, 2, 20), (2, 0, 1, 60), (0.1, 0, 1, 22), (1, 0.9, 1, 22)],
)
def test_known_bounds(compute, lead, weights, period):
    """In copy times of one of 20 equal weights; with room for one, nothing is copied while it is read."""
    p = equal_problem(20, compute)
    lead_ns, ns = round(lead * compute * 1000), round(compute * 1000)
    steps = (replace(step, lead_ns=lead_ns, read_ns=ns - lead_ns) for step in p.traces[0].steps)
    p = replace(p, traces=(replace(p.traces[0], steps=tuple(steps)),))
    relaxed = relax(p, Pieces(p), (tier_of(int(weights * UNIT), p.hardware),))
    assert relaxed is not None
    assert relaxed.bound_ns in (period * 1000 - 1, period * 1000)


@pytest.mark.random
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_no_plan_beats_its_bound(kind):
    near = []

    @settings(max_examples=scaled(80))
    @given(st.one_of(problems(kind), problems(kind, methods=2)), st.sampled_from(["overlap", "barrier"]))
    def check(p, wrap):
        if wrap == "barrier":
            p = replace(p, traces=tuple(replace(trace, follows=None) for trace in p.traces))
        lowest = floor(p).upper_bytes
        soon = replace(p.hardware, link_in_flight_bytes=0)  # which the bound leaves out
        more = lowest + (p.budget(lowest) - lowest) // 4
        for budget, hardware in ((lowest, p.hardware), (lowest, soon), (more, soon)):
            plan = joined(make_plan(replace(p, wrap=wrap, hardware=hardware), budget))
            lower = 0
            for schedule, trace in zip(plan.schedules, plan.traces, strict=True):
                assert schedule.lower_bound_ns is not None
                assert trace.compute_ns <= schedule.lower_bound_ns <= schedule.predicted_ns
                lower += schedule.lower_bound_ns
            assert plan.lower_bound_seconds == lower / 1e9
            ratio = plan.ratio or 0.0
            assert ratio >= 1.0
            if plan.streamed_bytes and not hardware.link_in_flight_bytes:
                near.append(ratio < 1.1)

    check()
    assert len(near) > 3  # Hypothesis draws constants of loaded modules too, so that cases differ by worker
    assert sum(near) > len(near) / 10  # tiny problems, where one span is much


def test_the_best_behaviour_lies_between_bound_and_plan():
    """Plans in whole chunks are behaviours that the search tries, too."""
    near = 0
    for seed in range(75):
        case = random_case(Random(seed), wrap=("overlap", "barrier")[seed % 2], latency=seed % 3 == 0)
        budget, storages = case.memories[0].chunks * GRANULE, case.problem.storages
        if case.problem.arena.segments[-1].stop % GRANULE or budget >= sum(s.nbytes for s in storages):
            continue
        schedule = make_plan(case.problem, budget).schedules[0]
        assert schedule.lower_bound_ns is not None
        assert schedule.lower_bound_ns <= case.best_ns(passes=1)
        assert case.best_ns() <= schedule.predicted_ns
        near += schedule.predicted_ns < 1.01 * float(case.best_ns())
    assert near > 25


def tolerance_ns(case):
    """What the price that the bound puts on copying may lower it by, with the rounding."""
    return 2e-6 * case.tiny.link_ticks * TICK_NS * len(case.problem.traces[0].steps) + 1


def test_fewer_steps_only_lower_the_bound(monkeypatch):
    lower = above = 0
    for seed in range(50):
        case = random_case(Random(seed), wrap=("overlap", "barrier")[seed % 2])
        whole = case.relax().bound_ns
        for most in range(1, len(case.problem.traces[0].steps)):
            with monkeypatch.context() as patch:
                patch.setattr(bound, "MOST_STEPS", most)
                aggregated = case.relax().bound_ns
            assert aggregated <= whole + tolerance_ns(case)
            assert aggregated <= case.best_ns()
            lower += aggregated < whole - 10
            above += aggregated > case.compute_ns + 10
    assert min(lower, above) > 25


def test_more_memory_never_raises_the_bound():
    fallen = 0
    for seed in range(75):
        case = random_case(Random(seed), latency=seed % 3 == 0)
        one, total = case.memories[0], case.tiny.chunks.bit_count()
        rooms = [replace(case, memories=(replace(one, chunks=n),)) for n in range(one.chunks, total + 2)]
        bounds = [larger.relax().bound_ns for larger in rooms]
        for before, after in itertools.pairwise(bounds):
            assert after <= before + tolerance_ns(case)
            fallen += after < before - 10
        assert bounds[-1] == case.compute_ns
    assert fallen > 50


def test_what_is_reported_is_the_dual_value(monkeypatch):
    """It is never above the primal objective, and a bound even for multipliers that are wrong."""
    objectives = []
    solve, dice, wrong = scipy.optimize.linprog, Random(0), [False]

    def spy(*args, **options):
        result = solve(*args, **options)
        objectives.append(result.fun)
        if wrong[0]:
            for part in result.ineqlin, result.eqlin:
                part.marginals = part.marginals * [dice.uniform(0.98, 1.02) for _ in part.marginals]
        return result

    monkeypatch.setattr(scipy.optimize, "linprog", spy)
    useful = 0
    for seed in range(80):
        case = random_case(Random(seed), disk=seed % 4 == 0, chunks=4)
        wrong[0] = False
        relaxed = case.relax()
        nbytes = sum(relaxed.groups[gap.group].nbytes for gap in relaxed.gaps) / len(relaxed.gaps)
        unit_ns = nbytes * max(memory.chunk_ticks for memory in case.memories) * TICK_NS / GRANULE
        assert relaxed.bound_ns - case.compute_ns <= objectives[-1] * unit_ns
        wrong[0] = True
        spoiled = case.relax().bound_ns
        assert spoiled <= case.best_ns()
        useful += case.compute_ns < spoiled < relaxed.bound_ns
    assert useful > 8


def test_no_time_for_the_solver_gives_no_bound(monkeypatch):
    p = equal_problem(80, 0.1)
    tiers = (tier_of(9 * UNIT, p.hardware),)
    assert relax(p, Pieces(p), tiers) is not None
    monkeypatch.setattr(bound, "SECONDS", 0.0)
    assert relax(p, Pieces(p), tiers) is None


@pytest.mark.parametrize(("nbytes", "latency_ns"), [(0, 0), (0, 9), (UNIT - 1, 0), (UNIT - 1, 9)])
def test_too_little_memory_gives_no_bound(nbytes, latency_ns):
    p = equal_problem(4, 1)
    tiers = (tier_of(nbytes, replace(p.hardware, link_latency_ns=latency_ns)),)
    assert relax(p, Pieces(p), tiers) is None


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_a_plan_without_a_bound_says_so(kind, monkeypatch):
    failed = scipy.optimize.OptimizeResult(status=1, x=None, fun=None)
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **options: failed)
    plan = make_plan(lettered("abcdefgh", kind=kind), 3 * GRANULE)
    assert (plan.schedules[0].lower_bound_ns, plan.lower_bound_seconds, plan.ratio) == (None, None, None)
    assert min(plan.predicted_seconds, plan.streamed_bytes) > 0


@pytest.mark.parametrize(
    ("problem", "memories", "one", "two"),
    [
        # What was just read leaves (Belady), and half of the reads miss.
        (lettered("abc"), (Memory(2, 1),), 2, 1.5),
        (lettered("abcd", ns=TICK_NS), (Memory(1, 1),), 8, 8),
        (lettered("abcd", ns=TICK_NS), (Memory(2, 1),), 4, 4),
        (lettered("aba", ns=TICK_NS), (Memory(1, 4),), 11, 11),
        # Two copies of two chunks each take less than three of one.
        (lettered("abcd"), (Memory(2, 1, 3),), 10, 10),
        # Three copies in two passes, where each pass by itself takes two.
        (lettered("abc"), (Memory(2, 1, 1),), 4, 3),
        # The one place on the host is where all pass through, so the disk reads all.
        (lettered("abc"), (Memory(1, 1), Memory(1, 5)), 15, 15),
    ],
)
def test_known_periods(problem, memories, one, two):
    tiny = tiny_of(problem, memories)
    assert least_ticks(tiny, passes=1) == one
    assert min(one, least_ticks(tiny, passes=2)) == two == least_ticks(tiny)

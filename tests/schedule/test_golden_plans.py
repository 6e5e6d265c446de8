"""Plans without produced storages are those of the day on which produced storages came, to the byte.

Where a change of the planner is intended to change plans, `python -m benchmarks.corpus --against` first shows
that they are no worse. Then the digests that the failing tests print take the place of those here, in the
commit of that change, whose message says why. A change that is not about plans, or about produced storages
only, changes none of them.
"""

import hashlib
import json
from dataclasses import asdict, replace

import pytest

from penstock.schedule.planner import make_plan
from tests.schedule.report.report_plans import corpus_plan, equal_plan, plan_behind_a_disk
from tests.schedule.traces import equal_problem

FACTS = ("hardware", "traces")
"""What a plan repeats of its problem."""


def digest(plan):
    """The hash of all that a plan decides, and of the predicted times; bounds are a solver's floats.

    None of these plans has a pool, which came later.
    """
    decided = {name: value for name, value in asdict(plan).items() if name not in FACTS}
    assert decided.pop("pool") is None
    for schedule in decided["schedules"]:
        del schedule["lower_bound_ns"]
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:24]


def in_turn():
    """A forward, and a backward that reads the same in reverse."""
    problem = equal_problem(12, 0.7)
    (trace,) = problem.traces
    forward = replace(trace, follows=1)
    backward = replace(trace, method="backward", graph=1, steps=trace.steps[::-1], follows=0)
    return make_plan(replace(problem, traces=(forward, backward)), 5 * 4096)


PLANS = {
    "decoder, paged": (
        lambda: corpus_plan("llama-3.1-8b, decode", "rtx4090", "paged", 0.3),
        "cf22c09ac355dab02daa0dd7",
    ),
    "decoder, contiguous": (
        lambda: corpus_plan("llama-3.1-8b, prefill", "server", "contiguous", 0.5),
        "a71ba889ced05645200fb542",
    ),
    "training": (
        lambda: corpus_plan("llama-3.1-8b, train-lora", "h200", "paged", 0.1),
        "5473b48e4b849fd67894c596",
    ),
    "experts": (
        lambda: corpus_plan("gpt-oss-120b, decode", "gh200", "contiguous", 0.75),
        "ff7b67ff78bf564ba259b337",
    ),
    "pictures, at the floor": (
        lambda: corpus_plan("vit-h-14, prefill", "laptop", "paged", 0.0),
        "82f2d58e65d74ea004460563",
    ),
    "ladder": (lambda: equal_plan(8, kind="contiguous"), "47144a2897db5e55a4034f49"),
    "in turn": (in_turn, "ce95b2748e57a8e179f42936"),
    "behind a disk": (plan_behind_a_disk, "477d61cf412482bc40a9a303"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_the_same_to_the_byte(name):
    make, expected = PLANS[name]
    assert digest(make()) == expected

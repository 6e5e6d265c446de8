"""Mutants of what a streamer does with values that leave, and what comes of a training step with each.

A plan that the verifier would refuse has a streamer do what a wrong one would.
"""

import time
from dataclasses import replace

import penstock
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.runtime.training.module import TrainingModule
from tests.faults.double import Double, Kind
from tests.runtime.training.spill_faults import outcome, step
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER


def _outs(change):
    """Replaces each transfer out by others, which are issued in its place."""

    def changed(schedule):
        moved = [new for t in schedule.transfers for new in (change(t) if t.direction == "out" else [t])]
        return replace(schedule, transfers=tuple(moved))

    return lambda plan: replace(plan, schedules=tuple(map(changed, plan.schedules)))


def _not_waited_for(plan):
    last = len(plan.traces[0].steps) - 1
    return _outs(lambda t: [replace(t, step=last)])(plan)


def _all_but_the_first(plan):
    forward, backward = plan.schedules
    return replace(plan, schedules=(replace(forward, transfers=forward.transfers[:1]), backward))


def _nothing_comes_back(plan):
    forward, backward = plan.schedules
    made = {one.start for one in forward.transfers}
    left = tuple(t for t in backward.transfers if t.start not in made)
    return replace(plan, schedules=(forward, replace(backward, transfers=left)))


MUTANTS = {
    "none": lambda plan: plan,
    "an out is not waited for before its place is overwritten": _not_waited_for,
    "an out is issued before the value is written": _outs(lambda t: [replace(t, after=t.after - 1)]),
    "a value is read back before its out has ended": _outs(
        lambda t: [replace(t, direction="in", after=t.after, step=t.step), t]
    ),
    "all outs but the first are forgotten": _all_but_the_first,
    "outs are forgotten": _outs(lambda t: []),
    "nothing is read back into the poisoned arena": _nothing_comes_back,
}
"""By name, the plans that have a streamer go wrong; `none` is the control."""

ELSEWHERE = "outs go to another place of the file"


def run(artifact, folder, engine):
    """What comes of a step with each mutant on a CPU, where writes are late, or kernels that write values.

    The double of `tests/faults` must be preloaded.
    """
    double = Double()
    program = penstock.open(artifact)
    plan, wanted = spilling_plan(program.payload), step(DECODER.model())
    writing = {k for k, one in enumerate(program.payload.traces[0].steps) if one.writes}
    came = {}
    for name, mutant in {**MUTANTS, ELSEWHERE: MUTANTS["none"]}.items():
        late = name == "an out is issued before the value is written"
        moved = 4096 if name == ELSEWHERE else 0
        double.spoil_all(folder, Kind.WRITES, microseconds=0 if late else 3000, moved=moved)
        options = LoadRequest(engine=engine, poison=True, spill=folder)
        with load_module(program, mutant(plan), options) as module:
            assert isinstance(module, TrainingModule)
            if late:
                _delay(module, writing)
            came[name] = outcome(module, wanted, folder)
    return came


def _delay(module, steps):
    """Have the kernels of some steps of the forward run late."""
    streamer = module._weights.streamer
    assert streamer is not None
    acquire = streamer.acquire

    def late(graph, number):
        if graph == 0 and number in steps:
            time.sleep(0.003)
        acquire(graph, number)

    streamer.acquire = late  # type: ignore[method-assign]

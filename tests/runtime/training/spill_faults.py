"""Runs a training step with each write, or each read, of the spill file gone wrong."""

import errno
import json
from collections import Counter
from itertools import count

import torch

import penstock
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.runtime.training.module import TrainingModule
from penstock.schedule.facts.errors import SourceError
from tests.faults.double import Action, Double
from tests.hunt import scaled
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER

FAULTS = {
    "ENOSPC": (Action.FAIL, errno.ENOSPC),
    "EIO": (Action.FAIL, errno.EIO),
    "EINTR": (Action.FAIL, errno.EINTR),
    "nothing": (Action.NOTHING, 0),
    "one byte": (Action.SHORTEN, 1),
    "a block": (Action.SHORTEN, 512),
    "a page and a bit": (Action.SHORTEN, 4097),
}

APART = max(1, 7 // scaled(1))
"""Each kind of fault meets every so manyth call, from another one on; in `make soak`, every call."""


def step(module):
    torch.manual_seed(0)
    DECODER.loss(module(*DECODER.inputs())).backward()
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    return found


def outcome(module, wanted, folder):
    """What comes of a step: the gradients of the model, others, or an error by its kind."""
    try:
        found = step(module)
    except SourceError as error:
        told = str(folder) in str(error) and "load(spill=" in str(error)
        return "refused" if told else f"refused without the folder: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    same = set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    return "right" if same else "wrong gradients"


def fail_each(artifact, folder, engine, kind):
    """Print a line of JSON for each kind of fault: how many calls went wrong, and what came of it.

    The double of `tests/faults` must be preloaded.
    """
    double = Double()
    program = penstock.open(artifact)
    plan = spilling_plan(program.payload)
    wanted = step(DECODER.model())
    for first, (name, (action, value)) in enumerate(FAULTS.items()):
        module = load_module(program, plan, LoadRequest(engine=engine, poison=True, spill=folder))
        assert isinstance(module, TrainingModule)
        found = Counter()
        with module:
            for number in count(first % APART, APART):
                double.arm(folder, kind, number=number, action=action, value=value)
                came = outcome(module, wanted, folder)
                if not double.fired:
                    break
                found[f"{came}, then {outcome(module, wanted, folder)}"] += 1
            misses, calls = module.stats.misses, double.seen
        print(
            json.dumps(
                {"fault": name, "failed": found.total(), "calls": calls, "misses": misses, "came": found}
            )
        )

"""Runs a training step with each write, or each read, of the spill file gone wrong: `ARTIFACT FOLDER ENGINE`.

`spill_faults.c` must be preloaded. Prints a line of JSON for each kind of fault: how many calls went wrong,
and what came of it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import torch

import penstock
from penstock.runtime.loading import LoadOptions, load_module
from penstock.runtime.training.module import TrainingModule
from penstock.schedule.facts.errors import SourceError
from tests.hunt import scaled
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER

FAULTS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EINTR": errno.EINTR,
    "nothing": 0,
    "one byte": -1,
    "a block": -512,
    "a page and a bit": -4097,
}

APART = max(1, 7 // scaled(1))
"""Each kind of fault meets every so manyth call, from another one on; in `make soak`, every call."""


def step(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    DECODER.loss(module(*DECODER.inputs())).backward()
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    return found


def outcome(module: TrainingModule, wanted: dict[str, torch.Tensor], folder: Path) -> str:
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


def main(artifact: Path, folder: Path, engine: str) -> None:
    double = ctypes.CDLL(os.environ["LD_PRELOAD"])
    program = penstock.open(artifact)
    plan = spilling_plan(program.payload)
    wanted = step(DECODER.model())
    for first, (name, how) in enumerate(FAULTS.items()):
        module = load_module(program, plan, LoadOptions(engine=engine, poison=True, spill=folder))
        assert isinstance(module, TrainingModule)
        found: Counter[str] = Counter()
        with module:
            for number in count(first % APART, APART):
                double.fail_next(os.fsencode(folder), number, how)
                came = outcome(module, wanted, folder)
                if not double.calls_failed():
                    break
                found[f"{came}, then {outcome(module, wanted, folder)}"] += 1
            misses, calls = module.stats.misses, double.calls_seen()
        print(
            json.dumps(
                {"fault": name, "failed": found.total(), "calls": calls, "misses": misses, "came": found}
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

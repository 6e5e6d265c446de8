"""Mutants of what brings and drops units, and what comes of some calls of a real model with each.

As a program (`ARTIFACT`) this runs every mutant in a process of its own, as most of them are killed: memory
of absent units can be neither read nor written (`debug=True`).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import penstock
from penstock.passes.sparse import calls
from penstock.passes.sparse.contracts import Contract
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadOptions
from penstock.runtime.sparse.units import LoadedUnits
from penstock.schedule.facts.model import Hardware
from penstock.schedule.sparse.residency import Residency
from tests.engines import ENGINES
from tests.runtime.sparse.unit_reads import have_reads_pass, taken

HARDWARE = Hardware("toy", 1e12, 1e10, 1e9, 4_000)
POOLS = {"rounds": 24 * 4096, "one unit": 11 * 4096, "several": 80 * 4096}
"""Bytes of pools: of two experts, of one, and of what some calls name."""


class Model(nn.Module):
    """Rows of a table, ten to a page, and experts of two stacks, neither a whole number of pages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4096, 100))
        self.up = nn.Parameter(torch.randn(64, 100, 96))
        self.down = nn.Parameter(torch.randn(64, 96, 50))

    def forward(self, rows, ids):
        x = nn.functional.embedding(rows, self.table).sum(0)
        return ((x @ self.up[ids])[:, None] @ self.down[ids]).sum(0)


def inputs(call):
    """Rows and experts of a call, some of them those of the call before."""
    dice = torch.Generator().manual_seed(call // 2)
    again = torch.Generator().manual_seed(call)
    rows = torch.cat([torch.randint(4096, (4,), generator=dice), torch.randint(4096, (4,), generator=again)])
    ids = torch.cat([torch.randint(64, (2,), generator=dice), torch.randint(64, (3,), generator=again)])
    return rows, ids


def plan_with(program, pool):
    """A plan with a pool of a size of `POOLS`."""
    plan = program.plan("50%", hardware=HARDWARE)
    assert plan.pool is not None
    return replace(plan, pool=replace(plan.pool, nbytes=POOLS[pool]))


Mutant = tuple[Any, str, Callable[..., Any]]


def _last_unit_forgotten(was):
    return lambda self, index, count, slices: was(self, index, count, slices)[:-1]


def _stale_index(was):
    known = {}
    return lambda self, index, count, slices: known.setdefault(count, was(self, index, count, slices))


def _in_use_may_leave(was):
    def by_key(self, until, *, needed):
        used, self._used = self._used, self._used & False
        found = was(self, until, needed=needed)
        self._used = used
        return sorted(found, key=lambda index: not used[index])  # type: ignore[no-any-return]

    return by_key


def _round_off_by_one(was):
    def run(contract, operator, arguments, rounds):
        parts, hold = rounds.parts, rounds.hold
        shifted = dict(zip(map(tuple, parts), [parts[-1], *parts], strict=False))
        moved = replace(rounds, hold=lambda part: hold(shifted[tuple(part)]))
        return was(contract, operator, arguments, moved)

    return run


def _shared_edge_dropped(_):
    return lambda self, granule: False


def _edge_kept(_):
    return lambda self, granule: True


def _ahead_uncounted(was):
    def acquire(self, graph, step, numbers, *, alone=True):
        change = was(self, graph, step, numbers, alone=alone)
        self.held_bytes = 0 if change.ahead else self.held_bytes
        return change

    return acquire


def _not_waited_for(_):
    return lambda self, units: None


MUTANTS = {
    "none": None,
    "the last unit is forgotten": (Contract, "units", _last_unit_forgotten),
    "the index is that of the first call": (Contract, "units", _stale_index),
    "a unit in use is dropped": (Residency, "_by_key", _in_use_may_leave),
    "a round brings the units of another": (calls, "run_in_rounds", _round_off_by_one),
    "a shared edge is dropped": (Residency, "in_use", _shared_edge_dropped),
    "an edge is kept that nobody needs": (Residency, "in_use", _edge_kept),
    "what comes ahead does not count": (Residency, "acquire", _ahead_uncounted),
    "a unit is used before it is there": (LoadedUnits, "_wait", _not_waited_for),
}


def _watched(was):
    """Have each wait for units look at the memory that they take, those on their way included."""

    def wait(self, units):
        was(self, units)
        for future in list(self._coming.values()):
            future.exception()
        if taken(self) > self.pool.nbytes:
            raise MemoryError

    return wait


def engines_of(mutant):
    """The engines in which a mutant can be: the classes of Python's pool are not in the native one."""
    return ENGINES if mutant is None or mutant[0] in (Contract, calls) else ("python",)


def outcome(program, plan, engine):
    """What comes of some calls: `right`, or what is wrong."""
    model, options = Model(), LoadOptions(engine=engine, debug=True)
    with load_module(program, plan, options) as module, torch.no_grad():
        for call in range(8):
            try:
                found = module(*inputs(call))
            except MemoryError:
                return "too much memory"
            except Exception as error:  # whatever it is, it is told
                return f"{type(error).__name__}: {error}"
            if not torch.equal(found, model(*inputs(call))):
                return "wrong results"
    return "right"


def _alone(program, plan, mutant, engine):
    """What comes of a mutant, in a process that may be killed."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        if mutant is not None:
            owner, name, made = mutant
            patch.object(owner, name, made(getattr(owner, name))).start()
        if mutant is None or mutant[1] != "_wait":
            patch.object(LoadedUnits, "_wait", _watched(LoadedUnits._wait)).start()
        have_reads_pass(lambda address, nbytes: time.sleep(0.001), pytest.MonkeyPatch())
        os.write(ours, outcome(program, plan, engine).encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as answer:
        said = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said


if __name__ == "__main__":
    torch.set_num_threads(1)
    program = penstock.open(sys.argv[1])
    plans = {pool: plan_with(program, pool) for pool in POOLS}
    came = {
        f"{name}, {pool}, {engine}": _alone(program, plan, one, engine)
        for name, one in MUTANTS.items()
        for pool, plan in plans.items()
        for engine in engines_of(one)
    }
    print(json.dumps(came))

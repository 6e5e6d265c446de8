"""The mutants of what brings and drops units are caught, on a real model whose absent units kill a reader."""

import json
from pathlib import Path

import pytest
from torch.export import export

import penstock
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.forked import run_forked
from tests.runtime.sparse.unit_mutants import MUTANTS, POOLS, Model, engines_of, inputs, plan_with

ROOT = Path(__file__).parents[3]
KILLED = "killed by signal 11"
WRONG = (KILLED, "wrong results", "too much memory", "AssertionError")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("units") / "model.penstock"
    penstock.compile(export(Model(), inputs(0)), path)
    return path


@pytest.fixture(scope="module")
def came(artifact):
    code = "import runpy; runpy.run_module('tests.runtime.sparse.unit_mutants', run_name='__main__')"
    done = run_forked(code, artifact, folder=ROOT, warnings="default")
    assert done.status == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pool", POOLS)
def test_plans_are_safe_and_run_right(pool, engine, artifact, came):
    program = penstock.open(artifact)
    plan = plan_with(program, pool)
    verify_plan(program.payload.storages, program.payload.traces, plan)
    assert came[f"none, {pool}, {engine}"] == "right"


# The pools in which a mutant does something else: nothing comes ahead where a call has rounds, for example.
SEEN = {
    "the last unit is forgotten": POOLS,
    "the index is that of the first call": POOLS,
    "a unit in use is dropped": POOLS,
    "a round brings the units of another": ("rounds", "one unit"),
    "a shared edge is dropped": ("several",),
    "an edge is kept that nobody needs": POOLS,
    "what comes ahead does not count": ("several",),
    "a unit is used before it is there": POOLS,
}


@pytest.mark.parametrize(("name", "pool"), [(name, pool) for name, pools in SEEN.items() for pool in pools])
def test_mutants_are_caught(name, pool, came):
    for engine in engines_of(MUTANTS[name]):
        assert came[f"{name}, {pool}, {engine}"].startswith(WRONG)


def test_every_mutant_is_seen():
    assert SEEN.keys() == MUTANTS.keys() - {"none"}

"""A pool in memory when something is wrong: reads that fail, plans of elsewhere, doubted operators."""

import ctypes
import itertools
import signal
from dataclasses import replace

import pytest
import torch
from torch.export import export

import penstock
from penstock.passes.sparse.contracts import CONTRACTS
from penstock.runtime import planning
from penstock.runtime.loading import load_module, load_weights
from penstock.runtime.options import LoadRequest
from penstock.runtime.planning import PlanRequest
from penstock.runtime.sparse import trust
from penstock.schedule.facts.errors import BudgetError, PlanError, SourceError, StreamError
from penstock.schedule.sparse.pool import without_units
from tests.engines import ENGINES, ROOT
from tests.forked import run_forked
from tests.hunt import nightly_but
from tests.runtime.sparse.shared_pages import HARDWARE, POOLS, Model, inputs, plan_with
from tests.runtime.sparse.unit_reads import have_reads_pass, interrupt_wait, taken


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("units") / "model.penstock"
    return penstock.compile(export(Model(), inputs(0)), path)


FORGETTING = """
import sys, torch, penstock
from penstock.passes.sparse.contracts import Contract
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from tests.runtime.sparse.shared_pages import inputs, plan_with
program = penstock.open(sys.argv[1])
units = Contract.units
Contract.units = lambda self, *given: units(self, *given)[:-1]
options = LoadRequest(engine="python", check_reads=True)
with load_module(program, plan_with(program, "several"), options) as module, torch.no_grad():
    module(*inputs(0))
"""


def test_a_read_of_a_unit_that_is_not_there_kills_the_process_when_debugging(program):
    done = run_forked(FORGETTING, program.path, folder=ROOT, warnings="default")
    assert done.status == -signal.SIGSEGV, done.err


@pytest.mark.parametrize("pool", POOLS)
def test_engines_move_the_same_bytes_and_hold_the_same(program, pool):
    seen = {}
    for engine in ENGINES:
        with (
            load_module(program, plan_with(program, pool), LoadRequest(engine=engine)) as module,
            torch.no_grad(),
        ):
            seen[engine] = []
            for call in range(12):
                module(*inputs(call))
                now = module._weights.pooled.counters
                seen[engine].append((now.bytes_moved, now.bytes_read, *taken_by(module)))
    assert all(one == seen["python"] for one in seen.values())


def taken_by(module):
    units, stats = module._weights.pooled, module.stats
    return units.held_bytes, units.peak_bytes, stats.bytes_moved, stats.held_bytes, stats.peak_bytes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("pool", "bad"),
    nightly_but(lambda case: case[0] == "rounds" or case[1] == 3, itertools.product(POOLS, (0, 3, 10))),
)
def test_a_read_that_fails_leaves_nothing_behind(program, pool, bad, engine, monkeypatch):
    model, calls = Model(), itertools.count()

    def failing(address, nbytes):
        if next(calls) == bad:
            ctypes.memset(address, 0xFF, nbytes)  # bytes have come, and are not believed
            raise SourceError("reading weights failed: the disk is gone")

    have_reads_pass(failing, monkeypatch)
    options = LoadRequest(engine=engine, check_reads=True)
    with load_module(program, plan_with(program, pool), options) as module, torch.no_grad():
        units, raised = module._weights.pooled, 0
        for call in range(6):
            try:
                found = module(*inputs(call))
            except SourceError:
                raised += 1
                found = module(*inputs(call))
            assert torch.equal(found, model(*inputs(call)))
            assert taken(units) == units.held_bytes <= POOLS[pool]
        assert raised == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_in_a_round_is_no_matter_to_the_next_call(program, engine, monkeypatch):
    model, options = Model(), LoadRequest(engine=engine, check_reads=True)
    interrupt_wait(2, monkeypatch)
    with load_module(program, plan_with(program, "rounds"), options) as module, torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            module(*inputs(1))  # in its second round
        for call in range(3):
            assert torch.equal(module(*inputs(call)), model(*inputs(call)))
            assert taken(module._weights.pooled) == module._weights.pooled.held_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_an_index_that_is_out_of_range_is_refused_as_in_memory(program, engine):
    model, options = Model(), LoadRequest(engine=engine, check_reads=True)
    with load_module(program, plan_with(program, "rounds"), options) as module, torch.no_grad():
        rows, ids = inputs(0)
        for wrong in (64, -65):
            beyond = torch.cat([ids[:-1], torch.tensor([wrong])])
            for one in (model, module):
                with pytest.raises(IndexError, match="out of bounds"):
                    one(rows, beyond)
        with pytest.raises(IndexError, match="out of range"):
            module(torch.full_like(rows, -1), ids)
        negative = torch.tensor([-1, -64, 0, -1, 63])
        assert torch.equal(module(rows, negative), model(rows, negative))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_of_other_pages_is_refused(program, engine):
    plan = plan_with(program, "rounds")
    odd = replace(plan, pool=replace(plan.pool, granule=64))
    with pytest.raises(PlanError, match=r"granules of 64 bytes, and this system pages of \d+: make a plan"):
        load_module(program, odd, LoadRequest(engine=engine))


def test_a_plan_of_a_machine_whose_operators_were_trusted_is_not_run_where_they_are_not(program, monkeypatch):
    plan = plan_with(program, "rounds")
    monkeypatch.setattr(trust, "reads_units_only", lambda read: read.operator != "aten.index.Tensor")
    with pytest.raises(
        PlanError, match=r"aten\.index\.Tensor was not seen to read only those in this process"
    ):
        load_module(program, plan, LoadRequest())


class Mixed(torch.nn.Module):
    """Layers that stream whole, around experts that do not, and a head that is tied to a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(2048, 256)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256 * 4) for _ in range(4))
        self.experts = torch.nn.ParameterList(torch.randn(32, 1024, 256) / 32 for _ in range(4))

    def forward(self, words, ids):
        x = self.table(words)
        for layer, experts in zip(self.layers, self.experts, strict=True):
            x = x + (layer(x)[:, None] @ experts[ids]).sum(1)
        return x @ self.table.weight.t()


def words_and_ids(call):
    dice = torch.Generator().manual_seed(call)
    return torch.randint(2048, (3,), generator=dice), torch.randint(32, (3,), generator=dice)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "mixed.penstock"
    return penstock.compile(export(Mixed(), words_and_ids(0)), path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("arena", ["mapped", "paged", "contiguous"])
@pytest.mark.parametrize("budget", ["7MiB"])
def test_an_arena_streams_beside_a_pool(mixed, engine, arena, budget):
    model, payload = Mixed(), mixed.payload
    if arena not in mixed.arenas():
        pytest.skip("this system has no such arena")
    plan = mixed.plan(budget, hardware=HARDWARE, arena=arena)
    assert plan.pool is not None
    assert plan.streamed_bytes > 0
    table = next(w.parts[0].storage for w in payload.tensors if w.fqn == "table.weight")
    assert any(table in step.reads for step in plan.traces[0].steps)  # whole, for the head
    with load_module(mixed, plan, LoadRequest(engine=engine)) as module, torch.no_grad():
        for call in range(5):
            assert torch.equal(module(*words_and_ids(call)), model(*words_and_ids(call)))
        assert module.stats.misses == 0
        assert module.stats.peak_bytes <= plan.budget


def test_a_program_that_another_calls_has_no_pool(mixed):
    plan = planning.decide(mixed.path, mixed.payload, PlanRequest(7 << 20, hardware=HARDWARE))
    assert plan.pool is not None
    with pytest.raises(BudgetError):
        planning.decide(mixed.path, mixed.payload, PlanRequest(7 << 20, hardware=HARDWARE, ways=("whole",)))
    delegated = replace(mixed.payload, lowering="executorch")
    with pytest.raises(StreamError, match="a program of lowering 'executorch' cannot: make a plan for"):
        load_weights(mixed.path, delegated, plan, LoadRequest(engine="python"))


def test_a_weight_of_which_one_read_is_doubted_is_read_whole(tmp_path, monkeypatch):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (torch.nn.Parameter(torch.randn(4096, 100)) for _ in range(2))

        def forward(self, ids):
            return self.one[ids] + self.one.index_select(0, ids) + self.two[ids]

    given = torch.tensor([1, 2, 3])
    program = penstock.compile(export(Twice(), (given,)), tmp_path / "twice.penstock")
    names = program.payload.storage_names()
    sure = program.plan("60%", hardware=HARDWARE)
    assert sorted(names[s] for s in sure.pool.storages) == ["one", "two"]
    monkeypatch.setattr(trust, "reads_units_only", lambda read: read.operator != "aten.index_select.default")
    doubted = program.plan("60%", hardware=HARDWARE)
    assert [names[s] for s in doubted.pool.storages] == ["two"]
    assert without_units(program.payload.traces[0], doubted.pool).steps[0].reads
    with load_module(program, doubted, LoadRequest(check_reads=True)) as module, torch.no_grad():
        found = module(given)
    assert torch.equal(found, program.load("100%")(given))
    assert set(CONTRACTS) >= {"aten.index_select.default"}

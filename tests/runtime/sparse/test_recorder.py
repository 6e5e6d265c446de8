"""Recorded routes of a real module: their replay moves the very bytes that the run moved."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from penstock import LoadOptions
from penstock.runtime.sparse.units import read_routes
from penstock.schedule.facts.errors import PayloadError, SourceError, StreamError
from penstock.schedule.sparse.replay import replay
from penstock.schedule.sparse.routes import Ask, Routes, profile_of
from tests.engines import ENGINES
from tests.runtime.sparse.sparse_models import SLOW

ROWS = 4096


class Mixture(nn.Module):
    """A table whose rows of 400 bytes share pages, and a mixture of 16 experts that their index names."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 100)
        self.pick = nn.Linear(100, 16)
        self.up = nn.Parameter(torch.randn(16, 100, 256) / 10)
        self.down = nn.Parameter(torch.randn(16, 256, 100) / 16)

    def forward(self, ids):
        rows = self.table(ids)
        expert = self.pick(rows).argmax(-1)
        inner = torch.bmm(rows[:, None], self.up[expert]).relu()
        return rows + torch.bmm(inner, self.down[expert])[:, 0]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Mixture().eval()


@pytest.fixture(scope="module")
def program(model, tmp_path_factory):
    exported = torch.export.export(model, (torch.arange(4),))
    return penstock.compile(exported, tmp_path_factory.mktemp("recorder") / "mixture.penstock")


def calls(count):
    """Inputs in which small numbers are popular."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (torch.rand(4, generator=generator) ** 3 * (ROWS - 1)).long()


def profile(program, routes):
    payload = program.payload
    return profile_of(routes, payload.storages, payload.traces, payload.storage_names())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", ["12%", "30%", "45%", "60%", "90%"])
def test_a_replay_moves_the_bytes_that_the_run_moved(program, model, budget, engine):
    plan = program.plan(budget, hardware=SLOW)
    assert plan.pool is not None
    with (
        program.load(plan=plan, options=LoadOptions(engine=engine)) as module,
        torch.no_grad(),
        module.record_routes() as recorder,
    ):
        before = module.stats.bytes_moved
        for ids in calls(30):
            assert torch.equal(module(ids), model(ids))
        moved = module.stats.bytes_moved - before
    assert not plan.arena_bytes  # so the units are all that moves
    recorded = profile(program, recorder.routes)
    assert recorded.pool(plan.pool.nbytes).layout == plan.pool.layout
    done = replay(recorded, plan.pool)
    assert done.calls == 30
    assert done.penstock.nbytes == moved
    assert done.least_bytes <= moved <= done.asked.nbytes


def test_calls_outside_are_not_recorded_and_one_that_fails_is(program, tmp_path):
    with program.load("30%") as module, torch.no_grad():
        module(torch.arange(4))
        with module.record_routes() as recorder:
            module(torch.tensor([5, 9, 9, 1]))
            with pytest.raises(IndexError):
                module(torch.tensor([7, 0, 0, ROWS]))
            with pytest.raises(StreamError, match="another recorder is open"), module.record_routes():
                pass
        module(torch.arange(4))
    whole, failed = recorder.routes.calls
    reads = recorder.routes.reads
    assert [reads[ask.read].weight for ask in whole] == ["table.weight", "up", "down"]
    assert whole[0].units == (1, 5, 9)
    assert whole[1].units == whole[2].units
    assert [ask.units for ask in failed] == [(0, 7)]
    recorder.save(tmp_path / "routes.jsonl")
    assert read_routes(tmp_path / "routes.jsonl") == recorder.routes
    with pytest.raises(SourceError, match="exists"):
        recorder.save(tmp_path / "routes.jsonl")
    recorder.save(tmp_path / "routes.jsonl", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["routes.jsonl"]


def test_a_plan_that_reads_all_whole_has_no_routes(program):
    with program.load("100%") as module, pytest.raises(StreamError, match="within a budget smaller than all"):
        module.record_routes()


def test_files_that_hold_no_routes_are_refused(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        read_routes(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"{}\n")
    with pytest.raises(PayloadError, match="other, line 1: expected the format 'penstock-routes'"):
        read_routes(tmp_path / "other")
    (tmp_path / "large").write_bytes(b"")
    with (tmp_path / "large").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(PayloadError, match="more than 64 MiB"):
        read_routes(tmp_path / "large")


def test_a_plan_expects_what_was_recorded(program, tmp_path):
    """Calls that ask for the same units again miss less than ones that ask for all alike."""
    alike = program.plan("40%", hardware=SLOW)
    with program.load(plan=alike) as module, torch.no_grad(), module.record_routes() as recorder:
        for ids in calls(20):
            module(ids % 64)
    recorder.save(tmp_path / "routes.jsonl")
    plan = program.plan("40%", hardware=SLOW, routes=tmp_path / "routes.jsonl")
    assert plan == program.plan("40%", hardware=SLOW, routes=recorder.routes)
    assert plan.pool is not None
    assert alike.pool is not None
    assert plan.pool.expected_ns[0] < alike.pool.expected_ns[0]
    moved = replay(profile(program, recorder.routes), plan.pool).penstock.nbytes
    assert plan.pool.expected_ns == (round(moved // 20 * 1e9 / 1e8),)
    other = Routes((replace(recorder.routes.reads[0], name="other"),), ((Ask(0, (1,)),),))
    with pytest.raises(PayloadError, match="another program"):
        program.plan("40%", hardware=SLOW, routes=other)

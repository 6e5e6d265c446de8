"""Units that share granules, readers that are late, and interrupts anywhere: what a reviewer once broke."""

import ctypes
import itertools
import time

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import penstock
from penstock import LoadOptions
from penstock.passes.sparse.contracts import linears
from penstock.schedule.sparse.residency import Residency
from tests.engines import ENGINES
from tests.passes.pass_models import Calls
from tests.runtime.sparse.sparse_models import seeded
from tests.runtime.sparse.unit_reads import have_reads_pass, taken
from tests.schedule.traces import machine

SLOW = machine(1e8)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


@pytest.fixture(scope="module")
def straddling(tmp_path_factory):
    """A table whose rows of 1,200 bytes share pages, some of them both of theirs."""
    model = Calls(lambda m, index: m.rows[index], rows=drawn(1200, 300))
    example, shapes = (torch.arange(6),), {"args": ({0: Dim("n", min=0, max=600)},)}
    path = tmp_path_factory.mktemp("straddling") / "table.penstock"
    return model, penstock.compile(export(model, example, dynamic_shapes=shapes), path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", [16384, 65536, "10%", "50%"])
def test_a_granule_stays_as_long_as_a_unit_in_it(straddling, budget, engine):
    model, program = straddling
    plan = program.plan(budget, hardware=SLOW)
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module, torch.no_grad():
        units = module._weights.pooled
        for call in range(120):
            index = torch.randint(1200, (1 + call % 9,), generator=seeded(call))
            index[: call % 3] = torch.arange(call % 3) * 3 + 1  # near each other, again and again
            assert torch.equal(module(index), model(index))
            assert taken(units) == units.held_bytes <= plan.pool.nbytes


@pytest.mark.parametrize("engine", ENGINES)
def test_a_granule_that_is_there_is_not_read_again(straddling, engine):
    model, program = straddling
    with (
        program.load(plan=program.plan("50%", hardware=SLOW), options=LoadOptions(engine=engine)) as module,
        torch.no_grad(),
    ):
        for index, moved in (([0], 4096), ([1], 0), ([2], 0), ([3], 4096), ([4, 5], 0)):
            before = module.stats.bytes_moved
            assert torch.equal(module(torch.tensor(index)), model(torch.tensor(index)))
            assert module.stats.bytes_moved - before == moved, index


@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_waits_for_a_granule_that_is_on_its_way_for_another(tmp_path, engine, monkeypatch):
    """Readers are late, and leave NaN where they have not read yet.

    The rows of two tables are read by one index, those of the second by another in between, too.
    """
    model = Calls(
        lambda m, index, other: (m.first[index], m.second[other], m.second[index]),
        first=drawn(1200, 300, seed=1),
        second=drawn(1200, 300, seed=2),
    )
    program = penstock.compile(export(model, (torch.arange(3), torch.arange(4))), tmp_path / "two.penstock")

    def late(address, nbytes):
        ctypes.memset(address, 0xFF, nbytes)
        time.sleep(0.002)

    have_reads_pass(late, monkeypatch)
    with (
        program.load(plan=program.plan("40%", hardware=SLOW), options=LoadOptions(engine=engine)) as module,
        torch.no_grad(),
    ):
        for call in range(60):
            index = torch.randint(1199, (3,), generator=seeded(call))
            other = torch.cat([index + 1, torch.randint(1200, (1,), generator=seeded(call))])
            if call % 2:
                module(torch.tensor([0, 1, 2]), other)  # so that these are held
            for one, expected in zip(module(index, other), model(index, other), strict=True):
                assert torch.equal(one, expected)


@pytest.mark.parametrize("place", ["_take", "_drop", "acquire"])
def test_an_interrupt_within_a_decision_leaves_a_module_that_can_be_called(straddling, monkeypatch, place):
    """Each time after another one of the changes that a decision makes."""
    model, program = straddling
    with (
        program.load(plan=program.plan(65536, hardware=SLOW), options=LoadOptions(engine="python")) as module,
        torch.no_grad(),
    ):
        units = module._weights.pooled
        real = getattr(Residency, place)
        for turn in range(12):
            counter = itertools.count()

            def interrupted(self, *args, counter=counter, turn=turn, **options):
                result = real(self, *args, **options)
                if next(counter) == turn:
                    raise KeyboardInterrupt
                return result

            with monkeypatch.context() as patch:
                patch.setattr(Residency, place, interrupted)
                for call in range(3):
                    try:
                        module(torch.randint(1200, (12,), generator=seeded(100 * turn + call)))
                    except KeyboardInterrupt:
                        break
            index = torch.randint(1200, (12,), generator=seeded(turn))
            assert torch.equal(module(index), model(index))
            assert taken(units) == units.held_bytes <= units.pool.nbytes


def test_an_interrupt_between_readers_leaves_none_behind(straddling, monkeypatch):
    model, program = straddling
    with (
        program.load(plan=program.plan(65536, hardware=SLOW), options=LoadOptions(engine="python")) as module,
        torch.no_grad(),
    ):
        units = module._weights.pooled
        real, counter = units._workers.submit, itertools.count()

        def interrupted(*args):
            made = real(*args)
            if next(counter) == 1:
                raise KeyboardInterrupt
            return made

        monkeypatch.setattr(units._workers, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            module(torch.arange(0, 1200, 99))
        for call in range(5):
            index = torch.randint(1200, (12,), generator=seeded(call))
            assert torch.equal(module(index), model(index))
            assert taken(units) == units.held_bytes <= units.pool.nbytes


def test_what_is_not_positional_is_read_whole():
    """In rounds it would be lost; torch.export writes positions, other passes may not."""

    graph = export(nn.Linear(8, 8), (torch.zeros(1, 8),)).graph
    assert len(list(linears(graph))) == 1
    (node,) = linears(graph)
    node.args, node.kwargs = node.args[:2], {"bias": node.args[2]}
    assert not list(linears(graph))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float8_e5m2, torch.int8, torch.bool])
def test_tables_of_every_dtype_run_in_rounds_or_whole(dtype, tmp_path):
    rows = torch.randint(0, 2, (2048, 1024), generator=seeded()).to(dtype)

    model = Calls(lambda m, index: m.rows[index], rows=rows)
    program = penstock.compile(export(model, (torch.arange(40),)), tmp_path / "table.penstock")
    index = torch.randint(2048, (40,), generator=seeded(1))
    with program.load(plan=program.plan(program.floor_bytes, hardware=SLOW)) as module:
        got, expected = module(index), rows[index]
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_units_smaller_than_what_is_noted_of_them_are_read_whole(tmp_path):
    program = penstock.compile(
        export(nn.Embedding(1 << 20, 2), (torch.arange(4),)), tmp_path / "small.penstock"
    )
    assert program.floor_bytes == program.weight_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_units_with_gaps_take_no_more_than_they_count(tmp_path, engine):
    """Where each takes huge pages, twice as much is in memory, which page tables alone show.

    Units are the first 513 of each 1,024 rows: half of a huge page and a row, at the start of one.
    """
    model = Calls(lambda m, index: m.blocks[:, :513][index], blocks=drawn(8, 1024, 512))
    program = penstock.compile(export(model, (torch.tensor([1, 5]),)), tmp_path / "gaps.penstock")
    plan = program.plan("45%", hardware=SLOW)
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module, torch.no_grad():
        for first in range(8):
            index = torch.tensor([first, (first + 3) % 8])
            assert torch.equal(module(index), model(index))
            units = module._weights.pooled
            assert taken(units) <= units.held_bytes <= plan.pool.nbytes < 8 << 20

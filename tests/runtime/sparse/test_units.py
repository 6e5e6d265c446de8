"""Programs that read by units: bits, bytes and counts at every budget, with freed memory that faults."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

import penstock
from penstock.runtime.sparse import units as units_module
from penstock.schedule.sparse.pool import smallest_pool, without_units
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.runtime.sparse.sparse_models import Experts, Rows, Tables, routes, seeded
from tests.runtime.sparse.unit_reads import taken
from tests.schedule.traces import machine

WIDTH = 128

SLOW = machine(1e8)
"""A disk so slow that what a call does not need is better not read."""


def compiled(model, inputs, folder, **options):
    with torch.no_grad():
        return penstock.compile(export(model.eval(), inputs, **options), folder / "model.penstock")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    torch.manual_seed(0)
    model = Tables()
    inputs = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    return model, compiled(model, inputs, tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    model = Rows()
    tokens = {"ids": {0: Dim("tokens", min=0, max=600)}}
    example = torch.arange(300)
    return model, compiled(model, (example,), tmp_path_factory.mktemp("rows"), dynamic_shapes=tokens)


@pytest.fixture(
    scope="module", params=nightly_but({torch.bfloat16}, [torch.bfloat16, torch.float32]), ids=str
)
def experts(request, tmp_path_factory):
    model = Experts(request.param)
    tokens = Dim("tokens", min=2, max=64)
    example = torch.zeros(3, WIDTH, dtype=request.param), routes(3, 0)
    shapes = {"x": {0: tokens}, "routes": {1: tokens}}
    program = compiled(model, example, tmp_path_factory.mktemp("experts"), dynamic_shapes=shapes)
    return model, program


def pooled(program, budget, **options):
    """The plan for a budget that reads by units, on a machine whose figures are given."""
    plan = program.plan(budget, hardware=SLOW, **options)
    assert plan.pool is not None
    return plan


def equal(module, model, *inputs):
    with torch.no_grad():
        for one, other in zip(as_tuple(module(*inputs)), as_tuple(model(*inputs)), strict=True):
            assert torch.equal(one, other)


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def batch(tokens, seed, dtype):
    return torch.randn(tokens, WIDTH, generator=seeded(seed)).to(dtype), routes(tokens, seed)


WAYS = [*((engine, False) for engine in ENGINES), ("python", True)]
"""With `check_reads`, a read of a unit that is not in memory kills the process."""


@pytest.mark.parametrize(("engine", "check_reads"), WAYS)
def test_rows_by_every_operator(tables, engine, check_reads):
    model, program = tables
    reads = {one.operator for step in program.payload.traces[0].steps for one in step.sparse}
    assert reads == {"aten.embedding.default", "aten.index.Tensor", "aten.index_select.default"}
    for share in ("85%", "95%"):
        plan = pooled(program, share)
        with program.load(plan=plan, engine=engine, check_reads=check_reads) as module:
            for seed in range(4):
                ids = torch.randint(4096, (2, 8), generator=seeded(seed))
                index = torch.randint(-1200, 1200, (6,), generator=seeded(seed))
                equal(module, model, ids, index.abs())
            assert module.stats.misses == 0
            assert module.stats.peak_bytes <= plan.budget


@pytest.mark.parametrize(("engine", "check_reads"), WAYS)
def test_experts_at_every_budget(experts, engine, check_reads):
    model, program = experts
    dtype = model.gate_up[0].dtype
    whole = max(one.nbytes for one in model.parameters())
    assert program.floor_bytes < whole / 2
    for budget in (program.floor_bytes, "25%", "60%"):
        plan = pooled(program, budget)
        with program.load(plan=plan, engine=engine, check_reads=check_reads) as module:
            for seed, tokens in enumerate((3, 2, 40, 5, 64, 4)):
                equal(module, model, *batch(tokens, seed, dtype))
            assert module.stats.misses == 0
            assert module.stats.peak_bytes <= plan.budget


def test_one_byte_below_the_floor_is_refused(experts):
    _, program = experts
    with pytest.raises(penstock.BudgetError) as refused:
        program.plan(program.floor_bytes - 1, hardware=SLOW)
    assert refused.value.floor_bytes == program.floor_bytes


def test_a_refusal_keeps_nothing_of_those_who_asked(rows):
    """Such as the caches of a call that then runs without a plan, until garbage is collected."""

    def refused():
        asked_with = torch.empty(1)
        try:
            rows[1].plan("1KiB")
        except penstock.BudgetError:
            return weakref.ref(asked_with)
        raise AssertionError

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_of_one_unit_moves_each_unit_asked_for_once(rows, engine):
    """Bytes are exactly those of the different rows that are not the one still there."""
    model, program = rows
    plan = pooled(program, program.floor_bytes)
    assert (program.floor_bytes, plan.pool.nbytes) == (4096, 4096)
    with program.load(plan=plan, engine=engine) as module:
        moved, last = 0, -1
        for seed in range(5):
            ids = torch.randint(1024, (300,), generator=seeded(seed))
            asked = sorted(set(ids.tolist()))
            kept = asked[0] == last
            equal(module, model, ids)
            moved += 4096 * (len(asked) - kept)
            last = asked[-1]
            assert module.stats.bytes_moved == moved
            assert module.stats.peak_bytes == 4096


@pytest.mark.parametrize("engine", ENGINES)
def test_what_fits_is_read_once(rows, engine):
    model, program = rows
    with program.load(plan=pooled(program, "50%"), engine=engine) as module:
        ids = torch.randint(1024, (300,), generator=seeded(1))
        for _ in range(3):
            equal(module, model, ids)
        assert module.stats.bytes_moved == 4096 * len(set(ids.tolist()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_call_that_names_nothing_reads_nothing(rows, engine):
    model, program = rows
    with program.load(plan=pooled(program, "50%"), engine=engine) as module:
        equal(module, model, torch.zeros(0, dtype=torch.int64))
        assert module.stats.bytes_moved == 0


class Stacks(torch.nn.Module):
    """Three tables of units of 288, 400 and 800 KiB, of which each call asks for some."""

    def __init__(self):
        super().__init__()
        self.stacks = torch.nn.ParameterList(
            torch.randn(12, kib, 256, generator=seeded(kib)) for kib in (288, 400, 800)
        )

    def forward(self, *index):
        return tuple(stack.view(12, -1)[one] for stack, one in zip(self.stacks, index, strict=True))


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    model = Stacks()
    return model, compiled(model, tuple(torch.arange(2) for _ in range(3)), tmp_path_factory.mktemp("stacks"))


def mappings_in(start, stop):
    """The mappings of this process in a range of addresses: memory that was moved there is one of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = (tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines)
    return sum(start <= first and last <= stop for first, last in places)


def run_stacks(stacks, engine):
    """Call the program, and return the number of mappings of its pool after each call."""
    model, program = stacks
    with program.load(plan=pooled(program, "2500KiB"), engine=engine) as module:
        units, counts = module._weights.pooled, []
        for call in range(60):
            dice = seeded(call)
            index = tuple(torch.randperm(12, generator=dice)[:2].sort().values for _ in range(3))
            equal(module, model, *index)
            assert taken(units) <= units.pool.nbytes
            counts.append(mappings_in(*units.memory))
    return counts


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_moves_between_units_of_several_sizes(stacks, monkeypatch, refused):
    """Also where the system refuses to move it; what is spare is never that of a unit in use."""
    moved = []

    def move(old, new, nbytes):
        moved.append(nbytes)
        if refused:
            raise OSError(12, "no more mappings")
        real(old, new, nbytes)

    real = units_module.move
    monkeypatch.setattr(units_module, "move", move)
    run_stacks(stacks, "python")
    assert {288, 400, 800} <= {-(-nbytes // 1024 // 4) * 4 + 8 for nbytes in moved}


@pytest.mark.usefixtures("native")
def test_memory_moves_in_the_native_engine_when_it_moves_in_python(stacks):
    counts = run_stacks(stacks, "native")
    assert counts == run_stacks(stacks, "python")
    assert counts[-1] > counts[0] + 12


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_shrinks_is_an_error(tmp_path, engine):
    model = Rows()
    program = compiled(model, (torch.arange(300),), tmp_path)
    (weights,) = program.path.glob("*.safetensors")
    with program.load(plan=pooled(program, "50%"), engine=engine) as module:
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size - 64)
        with pytest.raises(penstock.SourceError, match="truncated"), torch.no_grad():
            module(torch.arange(724, 1024))


@pytest.mark.parametrize("engine", ENGINES)
def test_times_that_are_measured_have_no_waiting_for_units(rows, engine):
    _, program = rows
    with program.load(plan=pooled(program, program.floor_bytes), engine=engine) as module:
        trace = module.measure(torch.arange(300))
        assert module.stats.stall_seconds > 0
        assert trace.compute_ns / 1e9 < module.stats.stall_seconds + 1
        plan = program.plan("50%", traces=[trace], hardware=SLOW)
        assert plan.pool is not None


def test_a_device_reads_whole(experts):
    _, program = experts
    plan = program.plan("60%", device="sim", hardware=SLOW)
    assert plan.pool is None
    assert program.floor(device="sim") > program.floor_bytes
    with pytest.raises(penstock.StreamError, match="by units"):
        program.load(plan=pooled(program, "60%"), device="sim")


def test_what_is_kept_is_not_read_by_units(experts):
    _, program = experts
    plan = pooled(program, "60%", keep=["down.0"])
    names = program.payload.storage_names()
    kept = next(s for s, name in enumerate(names) if name == "down.0")
    assert plan.pool.layout[kept] == -1


def test_the_floor_is_what_is_read_whole_and_one_unit(experts):
    _, program = experts
    payload = program.payload
    layout = pooled(program, "25%").pool.layout
    pool = smallest_pool(payload.traces, layout, 4096)
    widest = max(one.unit_nbytes for trace in payload.traces for step in trace.steps for one in step.sparse)
    assert widest <= pool.nbytes <= widest + 4096
    reads = {s for step in without_units(payload.traces[0], pool).steps for s in step.reads}
    assert program.floor_bytes == pool.nbytes + max(payload.storages[s].nbytes for s in reads)

"""Experts that are computed from quantised ones: bits, bytes and memory, in both engines and lowerings."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock import LoadOptions
from penstock.passes.activations import Activations
from penstock.passes.sparse.calls import Rounds, run_in_rounds
from penstock.passes.sparse.contracts import BY_EXPERT, CONTRACTS
from penstock.runtime.program import Program
from penstock.runtime.sparse import trust
from penstock.runtime.sparse.units import LoadedUnits
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.passes.pass_models import Calls
from tests.runtime.sparse.sparse_models import SLOW, Quantised, routes, seeded

WIDTH, COUNT = 128, 32

UP, DOWN = 4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH
"""Bytes of an expert's two pieces, each whole pages."""


WITH_SCALES = {torch.float32: [2, 2, 2, 2], torch.bfloat16: [2, 2, 1, 1]}
"""How many storages the steps read: scales that are converted before they are used stand in other steps."""


@dataclass(frozen=True)
class Case:
    """A model, its exported program, and the compiled one."""

    model: Quantised
    exported: torch.export.ExportedProgram
    program: Program


def batch(tokens, seed, dtype):
    rows = torch.randn(tokens, WIDTH, generator=seeded(seed)).to(dtype)
    return rows, routes(tokens, seed, layers=2, experts=COUNT)


@pytest.fixture(
    scope="module", params=nightly_but({torch.bfloat16}, [torch.bfloat16, torch.float32]), ids=str
)
def case(request, tmp_path_factory):
    model = Quantised(request.param)
    tokens = Dim("tokens", min=2, max=64)
    shapes = {"x": {0: tokens}, "routes": {1: tokens}}
    with torch.no_grad():
        exported = export(model, batch(3, 0, request.param), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("quantised") / "model.penstock"
    return Case(model, exported, penstock.compile(exported, path))


def pooled(program, budget):
    plan = program.plan(budget, hardware=SLOW)
    assert plan.pool is not None
    return plan


def equal(module, model, *inputs):
    with torch.no_grad():
        return torch.equal(module(*inputs), model(*inputs))


def test_each_stack_is_a_read_by_units_of_what_it_is_computed_from(case):
    storages, (trace,) = case.program.payload.storages, case.program.payload.traces
    reads = [one for step in trace.steps for one in step.sparse]
    assert [storages[one.storage].nbytes for one in reads] == 2 * [COUNT * UP, COUNT * DOWN]
    dtype = str(case.model.dtype).removeprefix("torch.")
    assert [one.computed and one.computed.dtype for one in reads] == 4 * [dtype]
    assert [one.view.dtype for one in reads] == 2 * ["float8_e4m3fn"] + 2 * ["int8"]
    assert all(one.computed and one.computed.shape[0] == COUNT for one in reads)
    # The scales stand in the same steps, whole, and nothing else reads of a stack.
    steps = [step for step in trace.steps if step.sparse]
    assert [len(step.reads) for step in steps] == WITH_SCALES[case.model.dtype]
    assert sum(one.storage in step.reads for one in reads for step in trace.steps) == len(reads)


@pytest.mark.parametrize(("engine", "debug"), [*((engine, False) for engine in ENGINES), ("python", True)])
def test_bits_at_every_budget(case, engine, debug):
    """With `debug`, a read of an expert that is not in memory kills the process."""
    program = case.program
    assert program.floor_bytes < COUNT * DOWN / 2
    for budget in (program.floor_bytes, "25%", "60%"):
        plan = pooled(program, budget)
        with program.load(plan=plan, options=LoadOptions(engine=engine, check_reads=debug)) as module:
            for seed, tokens in enumerate((3, 2, 40, 5, 64, 4)):
                assert equal(module, case.model, *batch(tokens, seed, case.model.dtype))
            assert module.stats.misses == 0
            assert module.stats.peak_bytes <= plan.budget
    with program.load("100%") as module:
        assert equal(module, case.model, *batch(64, 7, case.model.dtype))
        assert module.stats.bytes_moved == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_of_one_unit_moves_the_sum_of_the_units_that_calls_ask_for(case, engine):
    program = case.program
    plan = pooled(program, "60%")
    assert plan.pool is not None
    plan = replace(plan, pool=replace(plan.pool, nbytes=UP))
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module:
        moved = 0
        for seed in range(4):
            x, route = batch(5, seed, case.model.dtype)
            assert equal(module, case.model, x, route)
            moved += sum((UP + DOWN) * len(set(layer.flatten().tolist())) for layer in route)
            units = module._weights.pooled
            assert units is not None
            assert (units.counters.bytes_moved, units.peak_bytes) == (moved, UP)


def test_a_call_takes_the_memory_of_one_expert_beside_it(case):
    """Of the whole stack it takes 32 times as much, twice in float32, before the stack is what it is."""
    whole = Activations.of(case.exported).peak()
    assert whole >= 2 * 4 * COUNT * UP
    assert 2 * 4 * UP <= case.program.activation_bytes <= 2 * 4 * UP + (64 << 10)


@pytest.mark.parametrize("wrong", ["ends that fall", "more rows than there are"])
def test_ends_that_are_none_are_refused(wrong):
    ends = torch.tensor([2, 1, 4] if wrong == "ends that fall" else [2, 3, 5], dtype=torch.int32)
    with pytest.raises(penstock.StreamError, match="do not ascend from 0 to 4"):
        BY_EXPERT(PRODUCT, 0, torch.ones(4, 8), torch.ones(3, 8, 8), ends)


PRODUCT = torch.fx.symbolic_trace(lambda rows, weight, ends: rows @ weight[0])


def test_rows_that_no_expert_has_are_zeros_and_no_rows_are_none():
    weight = torch.full((3, 8, 4), float("nan"))
    weight[1] = 1
    ends = torch.tensor([0, 2, 2], dtype=torch.int32)
    assert BY_EXPERT(PRODUCT, 0, torch.ones(3, 8), weight, ends).tolist() == [[8] * 4, [8] * 4, [0] * 4]
    assert BY_EXPERT(PRODUCT, 0, torch.ones(3, 8), weight, ends * 0).tolist() == 3 * [[0] * 4]
    assert BY_EXPERT(PRODUCT, 0, torch.ones(0, 8), weight, ends * 0).shape == (0, 4)


class Body:
    """A product that counts how many of its results are alive when it is called, and what it is given."""

    def __init__(self):
        self.made = []
        self.alive = []
        self.given = []

    def forward(self, rows, weight, ends):
        self.alive.append(sum(one() is not None for one in self.made))
        self.given.append(weight.untyped_storage().nbytes())
        result = rows @ weight[0]
        self.made.append(weakref.ref(result))
        return result


def test_an_expert_takes_no_memory_when_the_next_one_does_and_none_where_no_rows_are():
    body = Body()
    weight, ends = torch.ones(3, 8, 4), torch.tensor([1, 3, 4], dtype=torch.int32)
    assert BY_EXPERT(body, 0, torch.ones(4, 8), weight, ends).tolist() == 4 * [[8] * 4]
    assert body.alive == [0, 0, 0]
    assert BY_EXPERT(body, 0, torch.ones(4, 8), weight, 0 * ends).tolist() == 4 * [[0] * 4]
    assert body.given == 3 * [weight.nbytes] + [weight.itemsize]
    rounds = Rounds([[0], [1], [2]], lambda _: nullcontext())
    run_in_rounds(
        CONTRACTS["aten._grouped_mm.default"], body.forward, (torch.ones(4, 8), weight, ends), rounds
    )
    assert body.alive == 7 * [0]


class Taken(TorchDispatchMode):
    """The most bytes that operators' results take at once, without those in memory that is given."""

    def __init__(self, units, *inputs):
        super().__init__()
        self.others, self.now, self.peak = [range(*units), {one.data_ptr() for one in inputs}], 0, 0
        self.known = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            storage = one.untyped_storage() if isinstance(one, torch.Tensor) else None
            if storage is None or storage._cdata in self.known:
                continue
            if any(storage.data_ptr() in own for own in self.others):
                continue
            self.known[storage._cdata] = storage
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._left, storage.nbytes())
        return made

    def _left(self, nbytes):
        self.now -= nbytes


def taken_at_the_floor(model, inputs, folder):
    """A result at the floor; the bytes moved for it, taken beside units, and said to be taken."""
    with torch.no_grad():
        program = penstock.compile(export(model, inputs), folder / "rounds.penstock")
        with program.load(
            plan=pooled(program, program.floor_bytes), options=LoadOptions(engine="python")
        ) as module:
            units = module._weights.pooled
            assert isinstance(units, LoadedUnits)
            with Taken(units.memory, *inputs) as taken:
                made = module(*inputs)
            return made, units.counters.bytes_moved, taken.peak, program.activation_bytes


@pytest.mark.parametrize("quantised", [True, False])
def test_a_call_takes_no_more_memory_than_the_figure_says_in_rounds(tmp_path, quantised):
    """A row is that of an expert, and all others are those of another, in another round."""
    weight = torch.ones(COUNT, WIDTH, 2 * WIDTH, dtype=torch.int8 if quantised else torch.bfloat16)
    if quantised:
        scale = torch.ones(COUNT, 1, 1)
        model = Calls(lambda m, x, e: torch._grouped_mm(x, (m.w * m.s).to(x.dtype), e), w=weight, s=scale)
    else:
        model = Calls(lambda m, x, e: torch._grouped_mm(x, m.w, e), w=weight)
    x = torch.ones(600, WIDTH, dtype=torch.bfloat16)
    ends = torch.tensor([*(COUNT - 1) * [1], 600], dtype=torch.int32)
    made, moved, peak, figure = taken_at_the_floor(model, (x, ends), tmp_path)
    assert torch.equal(made, torch.full_like(made, WIDTH))
    assert moved == 2 * weight[0].nbytes
    row, stack = 2 * WIDTH * 2, WIDTH * 2 * WIDTH * 2
    least, most = (3 * 600 - 2, 3 * 600) if quantised else (2 * 600 - 1, 2 * 600)
    assert least * row <= peak <= figure <= most * row + quantised * stack + (17 << 10)


def test_rows_in_rounds_take_no_more_memory_than_the_figure_says(tmp_path):
    table = torch.arange(4096 * 512, dtype=torch.float32).reshape(4096, 512)
    model = Calls(lambda m, i: torch.ops.aten.index.Tensor(m.w, [i.t()]), w=table)
    numbers = torch.tensor([*range(0, -400, -4), *(1900 * [3])]).view(40, 50)
    made, moved, peak, figure = taken_at_the_floor(model, (numbers,), tmp_path)
    assert torch.equal(made, table[numbers.t()])
    assert moved < table.nbytes
    assert made.nbytes * 1.9 <= peak <= figure <= made.nbytes * 2 + 35 * (numbers.numel() + 1)


def test_tiles_in_rounds_take_no_more_memory_than_the_figure_says(tmp_path):
    weight = torch.randn(32768, 512, generator=seeded(0))
    model = Calls(lambda m, x: torch.nn.functional.linear(x, m.w), w=weight)
    x = torch.randn(8, 512, generator=seeded(1))
    with torch.no_grad():
        program = penstock.compile(export(model, (x,)), tmp_path / "tiles.penstock")
        plan = pooled(program, "90%")
        assert plan.pool is not None
        assert plan.pool.tiles
        with program.load(plan=plan, options=LoadOptions(engine="python")) as module:
            expected = module(x)  # certifies the tiles
            units = module._weights.pooled
            assert isinstance(units, LoadedUnits)
            with Taken(units.memory, x) as taken:
                made = module(x)
    assert torch.equal(made, expected)
    assert torch.equal(made, torch.nn.functional.linear(x, weight))
    assert made.nbytes * 1.5 < taken.peak <= program.activation_bytes == 2 * made.nbytes


def test_a_product_that_is_not_trusted_is_compiled_as_it_is(tmp_path, monkeypatch):
    model = Quantised(torch.bfloat16)
    example = batch(3, 0, torch.bfloat16)
    with torch.no_grad():
        exported = export(model, example)
    monkeypatch.setattr(trust, "_passes", lambda *_: False)
    trust._tried.cache_clear()
    program = penstock.compile(exported, tmp_path / "whole.penstock")
    monkeypatch.undo()
    trust._tried.cache_clear()
    assert not any(step.sparse for step in program.payload.traces[0].steps)
    with program.load(program.floor_bytes) as module:
        assert equal(module, model, *example)


def test_a_program_is_refused_where_single_experts_are_not_trusted(case, monkeypatch):
    monkeypatch.setattr(trust, "_passes", lambda *_: False)
    trust._tried.cache_clear()
    with pytest.raises(penstock.StreamError, match="was not seen to give the bits of all of them together"):
        case.program.load("100%")
    monkeypatch.undo()
    trust._tried.cache_clear()


def test_a_ladder_is_of_a_program_that_needs_no_python(case, tmp_path):
    program = penstock.compile(case.exported, tmp_path / "ladder.penstock", ladder=True)
    assert not any(one.computed for step in program.payload.traces[0].steps for one in step.sparse)
    with program.load("100%") as module:
        assert equal(module, case.model, *batch(9, 1, case.model.dtype))

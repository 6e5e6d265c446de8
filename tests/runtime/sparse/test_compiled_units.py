"""Compiled programs that read by units: the bits of the program in memory, from the eager floor on."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import penstock
from penstock.passes.lowering.emitted import observe_cpp
from penstock.passes.lowering.inductor import observed
from penstock.passes.lowering.post_grad import PlacedProbes
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Part, SparseRead, Step, Trace, Work
from tests.hunt import nightly_but
from tests.runtime.sparse.sparse_models import SLOW, Experts, Head, Quantised, Tables, routes, seeded

Arguments = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model in both lowerings, and arguments of a call by the seed."""

    compiled: Program
    eager: Program
    call: Callable[[int], Arguments]


def tables(seed):
    generator = seeded(seed)
    return torch.randint(4096, (5,), generator=generator), torch.randint(1200, (7,), generator=generator)


def experts(dtype):
    return lambda seed: (torch.randn(4, 128, generator=seeded(seed)).to(dtype), routes(4, seed))


def words(seed):
    return (torch.randint(1024, (1, 3), generator=seeded(seed)),)


def _of_two(seed):
    x, route = experts(torch.float32)(seed)
    return x, route[:2]


def _quantised(seed):
    x, _ = experts(torch.bfloat16)(seed)
    return x, routes(4, seed, layers=2, experts=32)


MODELS = {
    "tables": (Tables, tables),
    "experts": (lambda: Experts(torch.bfloat16), experts(torch.bfloat16)),
    "experts of transformers": (lambda: Experts(torch.float32, layers=2), _of_two),
    "quantised experts": (lambda: Quantised(torch.bfloat16), _quantised),
    "head": (lambda: Head(torch.bfloat16, tied=True), words),
}


@pytest.fixture(scope="module", params=nightly_but({"tables", "experts"}, MODELS))
def case(request, tmp_path_factory):
    make, call = MODELS[request.param]
    torch.manual_seed(0)
    with torch.no_grad():
        exported = torch.export.export(make(), call(0))
    folder = tmp_path_factory.mktemp("compiled")
    compiled = penstock.compile(
        exported, folder / "compiled.penstock", lowering="inductor", resident_below="4KiB"
    )
    return Case(compiled, penstock.compile(exported, folder / "eager.penstock"), call)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("share", [0, 0.25, 0.6])
def test_compiled_programs_read_by_units_with_their_bits(case, share):
    program = case.compiled
    budget = max(program.floor_bytes, int(share * program.weight_bytes))
    plan = program.plan(budget, hardware=SLOW)
    assert plan.pool is not None
    with torch.no_grad(), program.load(2 * program.weight_bytes) as whole, program.load(plan=plan) as module:
        for seed in range(4):
            given = case.call(seed)
            for got, expected in zip(outputs(module(*given)), outputs(whole(*given)), strict=True):
                assert torch.equal(got, expected)
        assert module.stats.peak_bytes <= budget


def test_the_floor_is_that_of_the_eager_lowering_to_a_page_or_two(case):
    assert case.compiled.floor_bytes <= case.eager.floor_bytes + 8192


def test_a_compiled_program_asks_for_what_the_eager_one_asks_for(case):
    asked = []
    for program in (case.compiled, case.eager):
        with torch.no_grad(), program.load(program.floor_bytes) as module, module.record_routes() as recorder:
            for seed in range(3):
                module(*case.call(seed))
        reads = recorder.routes.reads
        calls = recorder.routes.calls
        asked.append([[(reads[one.read].weight, one.units) for one in call] for call in calls])
    assert asked[0] == asked[1]


def test_a_mixture_is_measured_and_its_steps_are_numbered(case):
    (trace,), (order,) = case.compiled.payload.traces, case.compiled.payload.probes
    sparse = [k for k, step in enumerate(trace.steps) if step.sparse]
    assert sorted(order.units) == sparse
    assert sparse
    with torch.no_grad(), case.compiled.load(case.compiled.floor_bytes) as module:
        measured = module.measure(*case.call(1))
    assert [step.name for step in measured.steps] == [step.name for step in trace.steps]
    assert all(step.read_ns > 0 for step in measured.steps)


@pytest.mark.parametrize("case", ["tables"], indirect=True)
@pytest.mark.parametrize("share", [0, 2])
def test_a_call_that_fails_raises_what_the_operator_raises(case, share):
    program = case.compiled
    ids, index = case.call(0)
    with torch.no_grad(), program.load(max(program.floor_bytes, share * program.weight_bytes)) as module:
        expected = module(ids, index)
        for wrong in (-1, 4096):
            with pytest.raises(IndexError, match="index out of range in self"):
                module(ids.new_full((5,), wrong), index)
        for got, want in zip(module(ids, index), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["tables"], indirect=True)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), penstock.SourceError("it is gone")])
def test_what_a_probe_or_a_reader_raises_is_raised(case, error, monkeypatch):
    def fail(*arguments, **options):
        raise error

    with torch.no_grad(), case.compiled.load(case.compiled.floor_bytes) as module:
        expected = module(*case.call(0))
        for owner, name in ((module._weights.streamer, "acquire"), (module._weights.pooled, "ask")):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, fail)
                with pytest.raises(type(error)) as raised:
                    module(*case.call(1))
            assert raised.value is error
            for got, want in zip(module(*case.call(0)), expected, strict=True):
                assert torch.equal(got, want)


# What the emitted code says.

_SOURCE = """
  constants_info_[0].original_fqn = "table";
  constants_info_[1].original_fqn = "head";
void AOTInductorModel::run_impl(
    auto& table = constants_->at(0);
    auto& head = constants_->at(1);
    aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, {table});
    aoti_torch_proxy_executor_call_function(proxy_executor, 1, 2, {table, buf0});
%s
    aoti_torch_proxy_executor_call_function(proxy_executor, 2, 0, {table});
} // AOTInductorModel::run_impl
"""
_NODES = """{"nodes": [
 {"node": {"target": "penstock::acquire", "inputs":
  [{"name": "graph", "arg": {"as_int": 0}}, {"name": "step", "arg": {"as_int": 0}}]}},
 {"node": {"target": "penstock::by_units", "inputs":
  [{"name": "graph", "arg": {"as_int": 0}}, {"name": "read", "arg": {"as_int": 0}}]}},
 {"node": {"target": "penstock::release", "inputs":
  [{"name": "graph", "arg": {"as_int": 0}}, {"name": "step", "arg": {"as_int": 0}}]}}]}"""


@pytest.mark.parametrize(
    ("line", "units", "sparse"),
    [
        ("", (0,), [1]),
        ("    cpp_fused_tanh_0((const float*)(head.data_ptr()), buf1);", (0,), [1]),
        ("    cpp_fused_tanh_0((const float*)(table.data_ptr()), buf1);", (-1,), [0]),
        ("    aoti_torch_proxy_executor_call_function(proxy_executor, 1, 2, {table});", (0,), [1]),
    ],
)
def test_a_storage_that_something_else_reads_there_is_read_whole(line, units, sparse):
    seen = observe_cpp(_SOURCE % line, _NODES, {"table": 0, "head": 1}, 0)
    read = SparseRead(Part("", "float32", (8, 4), (4, 1), 0, 0), "aten.embedding.default", 0, 2)
    step = Step("embedding", (0,), 0, 0, Work(), Work(1, 2), sparse=(read,))
    modelled = Trace("forward", 0, "", (step,), 0, 0, "modelled")
    placed = PlacedProbes((replace(step, name="by_units", sparse=()),), Work())
    trace, order = observed(modelled, seen, placed, [("embedding", read)])
    assert order.units == units
    assert [len(one.sparse) for one in trace.steps] == sparse

"""Compiled programs that read by units: the bits of the program in memory, in Python and in penstock-run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from penstock import LoadOptions
from penstock.passes.lowering.emitted import observe_cpp
from penstock.passes.lowering.inductor import observed
from penstock.passes.lowering.post_grad import PlacedProbes
from penstock.runtime.files.artifact_files import PAYLOAD, digest_line, replace_payload
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Part, SparseRead, Step, Trace, Work
from penstock.schedule.plan import Plan
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.runtime.sparse.sparse_models import SLOW, Experts, Head, Quantised, Tables, routes, seeded

pytestmark = pytest.mark.usefixtures("compiler")
PASSES = 3


class Mixture(nn.Module):
    """Words that are looked up, and layers of experts."""

    def __init__(self, dtype, layers):
        super().__init__()
        self.words = nn.Embedding(8192, 128, dtype=dtype)
        self.experts = Experts(dtype, layers=layers)

    def forward(self, ids, routes):
        return self.experts(self.words(ids), routes)


@dataclass(frozen=True)
class Case:
    """A model in both lowerings, of which the compiled one has plans; tensors of a call by the seed."""

    compiled: Program
    eager: Program
    inputs: Callable[[int], dict[str, torch.Tensor]]
    plans: tuple[Plan, ...]

    def call(self, seed):
        return self.inputs(seed).values()


def tables(seed):
    return {
        "ids": torch.randint(4096, (2, 40), generator=seeded(seed)),
        "index": torch.randint(1200, (90,), generator=seeded(seed + 1)),
    }


def words(layers):
    def inputs(seed):
        return {
            "ids": torch.randint(8192, (9,), generator=seeded(seed)),
            "routes": routes(9, seed, layers=layers),
        }

    return inputs


def rows(seed):
    x = torch.randn(4, 128, generator=seeded(seed)).to(torch.bfloat16)
    return {"x": x, "routes": routes(4, seed, layers=2, experts=32)}


def head(seed):
    return {"ids": torch.randint(1024, (1, 3), generator=seeded(seed))}


MODELS = {
    "tables": (Tables, tables),
    "experts": (lambda: Mixture(torch.bfloat16, 2), words(2)),
    "experts of transformers": (lambda: Mixture(torch.float32, 1), words(1)),
    "quantised experts": (lambda: Quantised(torch.bfloat16), rows),
    "head": (lambda: Head(torch.bfloat16, tied=True), head),
}
RUNS = [*MODELS][:3]
"""Those that penstock-run runs by units: it has neither tiles nor experts that are computed."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By the name of a model, its case."""

    @cache
    def make(name):
        build, inputs = MODELS[name]
        torch.manual_seed(0)
        with torch.no_grad():
            exported = torch.export.export(build(), tuple(inputs(0).values()))
        folder = tmp_path_factory.mktemp("compiled")
        path = folder / "compiled.penstock"
        program = penstock.compile(exported, path, lowering="inductor", resident_below="4KiB")
        shares = (program.floor_bytes, *(("45%", "75%", "100%") if name in RUNS else ("25%", "60%")))
        plans = tuple(program.plan(share, hardware=SLOW) for share in shares)
        if name in RUNS:
            assert [plan.pool is None for plan in plans] == [False, False, False, True]
            replace_payload(path, replace(program.payload, plans=plans))
            program = penstock.open(path, trust=True)
        return Case(program, penstock.compile(exported, folder / "eager"), inputs, plans)

    return make


@pytest.fixture(params=nightly_but({"tables", "experts"}, MODELS))
def case(request, made):
    return made(request.param)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("rung", [0, 1, 2])
def test_compiled_programs_read_by_units_with_their_bits(case, rung):
    program = case.compiled
    plan = case.plans[rung]
    assert plan.pool is not None
    with torch.no_grad(), program.load(2 * program.weight_bytes) as whole, program.load(plan=plan) as module:
        for seed in range(4):
            given = case.call(seed)
            for got, expected in zip(outputs(module(*given)), outputs(whole(*given)), strict=True):
                assert torch.equal(got, expected)
        assert module.stats.peak_bytes <= plan.budget


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
                module(ids.new_full(ids.shape, wrong), index)
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


# penstock-run


def run_once(run, case, budget, folder):
    save_file(case.inputs(1), folder / "in.safetensors")
    files = ["--input", "in.safetensors", "--output", "out.safetensors", "--force"]
    done = run(case.compiled.path, "--budget", budget, *files, "--passes", PASSES, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), load_file(folder / "out.safetensors")


@pytest.mark.parametrize("case", nightly_but({"tables", "experts"}, RUNS), indirect=True)
@pytest.mark.parametrize("rung", range(4))
def test_bits_and_bytes_are_those_of_python(run, case, tmp_path, rung):
    plan = case.plans[rung]
    facts, found = run_once(run, case, plan.budget, tmp_path)
    assert facts["plan_budget"] == plan.budget
    assert facts["misses"] == 0
    for engine in ENGINES:
        with torch.no_grad(), case.compiled.load(plan=plan, options=LoadOptions(engine=engine)) as module:
            for _ in range(PASSES):
                expected = module(*case.call(1))
            stats = module.stats
        whole = expected if isinstance(expected, tuple) else (expected,)
        assert all(torch.equal(one, other) for one, other in zip(found.values(), whole, strict=True))
        if not plan.streamed_bytes:
            assert facts["bytes_moved"] == stats.bytes_moved
        assert facts["peak_bytes"] <= plan.budget
        assert facts["peak_bytes"] == stats.peak_bytes
    assert (facts["bytes_moved"] > 0) == (plan.pool is not None)


@pytest.mark.parametrize("case", ["experts"], indirect=True)
def test_units_alone_are_moved_and_rounds_are_run(case):
    """Or the tests above would show nothing: units do not fit at the floor, and are found with most."""
    assert case.plans[1].streamed_bytes == case.plans[2].streamed_bytes == 0
    moved = []
    for plan in case.plans[:3]:
        with torch.no_grad(), case.compiled.load(plan=plan) as module:
            module(*case.call(1))
            before = module.stats.bytes_moved
            module(*case.call(1))
            moved.append(module.stats.bytes_moved - before)
    assert moved[0] > moved[1] + 2 * case.plans[0].streamed_bytes
    assert moved[1] > moved[2] == 0


@pytest.mark.parametrize("case", ["tables"], indirect=True)
def test_penstock_run_refuses_an_index_as_the_kernel_refuses_it(run, case, tmp_path):
    for rung in (0, 2):
        wrong = case.inputs(1)
        wrong["ids"][0, 3] = 4096
        save_file(wrong, tmp_path / "in.safetensors")
        done = run(case.compiled.path, "--budget", case.plans[rung].budget, "--input", "in.safetensors")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert "index out of range" in done.stderr


def forged(case, folder, change):
    """A copy of the artifact whose payload was changed by somebody who also changed its hash."""
    copied = shutil.copytree(case.compiled.path, folder / "forged")
    payload = json.loads((copied / PAYLOAD).read_bytes())
    change(payload)
    data = json.dumps(payload).encode()
    (copied / PAYLOAD).write_bytes(data)
    (copied / f"{PAYLOAD}.sha256").write_bytes(digest_line(data))
    return copied


def reads_of(payload):
    return [
        one
        for plan in payload["plans"]
        for trace in plan["traces"]
        for s in trace["steps"]
        for one in s["sparse"]
    ]


def _no_numbers(payload):
    payload["probes"][0]["units"] = [-1] * len(payload["probes"][0]["units"])


def _exchanged_numbers(payload):
    payload["probes"][0]["units"].reverse()


def _other_shape(payload):
    for one in reads_of(payload):
        one["view"]["shape"][0] -= 1


def _small_pool(payload):
    for plan in payload["plans"][:-1]:
        plan["pool"]["nbytes"] = 4095


def _other_place(payload):
    for plan in payload["plans"][:-1]:
        plan["pool"]["layout"] = [one + 8 if one >= 0 else one for one in plan["pool"]["layout"]]


def _tiles(payload):
    for plan in payload["plans"][:-1]:
        plan["pool"]["tiles"] = True
    for one in reads_of(payload):
        one["tiles"] = True


@pytest.mark.parametrize("case", ["experts"], indirect=True)
@pytest.mark.parametrize(
    "refused",
    [
        (_no_numbers, 3, "reads by units, and no call of the program does"),
        (_exchanged_numbers, 3, "reads another tensor, or by another operator, than its plan says"),
        (_other_shape, 3, "reads another tensor, or by another operator, than its plan says"),
        (_small_pool, 3, "reads units of which one does not fit into the pool"),
        (_other_place, 3, "has no place in the pool, or another phase there"),
        (_tiles, 2, "by tiles, whose bits only Python compares with those of the whole"),
    ],
)
def test_plans_that_are_not_the_programs_are_refused(run, case, tmp_path, refused):
    change, status, words = refused
    folder = forged(case, tmp_path, change)
    save_file(case.inputs(1), tmp_path / "in.safetensors")
    files = ["--input", "in.safetensors", "--output", "out.safetensors"]
    done = run(folder, "--budget", case.plans[1].budget, *files)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
    assert words in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("case", ["experts"], indirect=True)
def test_a_ladder_begins_at_the_floor_of_units(run, case, tmp_path):
    copied = penstock.open(
        shutil.copytree(case.compiled.path, tmp_path / "laddered"), trust=True
    ).write_ladder()
    lowest = copied.payload.plans[0]
    assert lowest.pool is not None
    assert lowest.budget == copied.floor_bytes
    _, found = run_once(run, replace(case, compiled=copied), lowest.budget, tmp_path)
    with torch.no_grad(), case.compiled.load("100%") as module:
        assert torch.equal(*found.values(), module(*case.call(1)))


def test_a_ladder_has_no_tiles(made, tmp_path):
    copied = shutil.copytree(made("head").compiled.path, tmp_path / "head.penstock")
    program = penstock.open(copied, trust=True)
    assert program.plan(program.floor_bytes, hardware=SLOW).pool.tiles
    plans = program.write_ladder().payload.plans
    assert not any(plan.pool is not None and plan.pool.tiles for plan in plans)
    assert plans[0].budget >= 64 << 20


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

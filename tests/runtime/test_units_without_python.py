"""penstock-run reads by units: the bits, and the bytes moved, of Python's engines; and what it refuses."""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from penstock import LoadOptions
from penstock.runtime.files.artifact_files import PAYLOAD, digest_line, replace_payload
from penstock.runtime.program import Program
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.runtime.sparse.sparse_models import SLOW, Experts, Head, Tables, routes, seeded

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
    """A compiled program with a plan for some budgets, and what it is called with."""

    program: Program
    inputs: dict[str, torch.Tensor]

    def plan(self, k):
        return self.program.payload.plans[k]


def mixture(dtype, layers):
    ids = torch.randint(8192, (9,), generator=seeded(1))
    return Mixture(dtype, layers), {"ids": ids, "routes": routes(9, 2, layers=layers)}


def tables():
    ids, index = (
        torch.randint(4096, (2, 40), generator=seeded(1)),
        torch.randint(1200, (90,), generator=seeded(2)),
    )
    return Tables(), {"ids": ids, "index": index}


MODELS = {
    "experts": lambda: mixture(torch.bfloat16, 2),
    "experts of transformers": lambda: mixture(torch.float32, 1),
    "tables": tables,
}


@pytest.fixture(scope="module", params=nightly_but({"tables", "experts"}, MODELS))
def case(request, tmp_path_factory):
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    path = tmp_path_factory.mktemp("units") / "model.penstock"
    with torch.no_grad():
        exported = torch.export.export(model, tuple(inputs.values()))
    program = penstock.compile(exported, path, lowering="inductor")
    shares = (program.floor_bytes, "45%", "75%", "100%")
    plans = tuple(program.plan(share, hardware=SLOW) for share in shares)
    assert [plan.pool is None for plan in plans] == [False, False, False, True]
    replace_payload(path, replace(program.payload, plans=plans))
    return Case(penstock.open(path, trust=True), inputs)


def run_once(run, case, budget, folder):
    save_file(case.inputs, folder / "in.safetensors")
    files = ["--input", "in.safetensors", "--output", "out.safetensors", "--force"]
    done = run(case.program.path, "--budget", budget, *files, "--passes", PASSES, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), load_file(folder / "out.safetensors")


@pytest.mark.parametrize("rung", range(4))
def test_bits_and_bytes_are_those_of_python(run, case, tmp_path, rung):
    plan = case.plan(rung)
    facts, found = run_once(run, case, plan.budget, tmp_path)
    assert facts["plan_budget"] == plan.budget
    assert facts["misses"] == 0
    for engine in ENGINES:
        with torch.no_grad(), case.program.load(plan=plan, options=LoadOptions(engine=engine)) as module:
            for _ in range(PASSES):
                expected = module(*case.inputs.values())
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
    assert case.plan(0).streamed_bytes == case.plan(1).streamed_bytes == 0
    moved = []
    for plan in case.program.payload.plans[:3]:
        with torch.no_grad(), case.program.load(plan=plan) as module:
            module(*case.inputs.values())
            before = module.stats.bytes_moved
            module(*case.inputs.values())
            moved.append(module.stats.bytes_moved - before)
    assert moved[0] > moved[1] > moved[2] == 0


@pytest.mark.parametrize("case", ["tables"], indirect=True)
def test_an_index_out_of_range_is_refused_as_the_kernel_refuses_it(run, case, tmp_path):
    for rung in (0, 2):
        wrong = {**case.inputs, "ids": case.inputs["ids"].clone()}
        wrong["ids"][0, 3] = 4096
        save_file(wrong, tmp_path / "in.safetensors")
        done = run(case.program.path, "--budget", case.plan(rung).budget, "--input", "in.safetensors")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert "index out of range" in done.stderr


def forged(case, folder, change):
    """A copy of the artifact whose payload was changed by somebody who also changed its hash."""
    copied = shutil.copytree(case.program.path, folder / "forged")
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
    save_file(case.inputs, tmp_path / "in.safetensors")
    files = ["--input", "in.safetensors", "--output", "out.safetensors"]
    done = run(folder, "--budget", case.plan(1).budget, *files)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
    assert words in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("case", ["experts"], indirect=True)
def test_a_ladder_begins_at_the_floor_of_units(run, case, tmp_path):
    copied = penstock.open(
        shutil.copytree(case.program.path, tmp_path / "laddered"), trust=True
    ).write_ladder()
    lowest = copied.payload.plans[0]
    assert lowest.pool is not None
    assert lowest.budget == copied.floor_bytes
    _, found = run_once(run, replace(case, program=copied), lowest.budget, tmp_path)
    with torch.no_grad(), case.program.load("100%") as module:
        assert torch.equal(*found.values(), module(*case.inputs.values()))


def test_a_ladder_has_no_tiles(tmp_path):
    """Of a program that test_compiled_units.py compiles as well, so that g++ compiles it once."""
    model, given = Head(torch.bfloat16, tied=True), (torch.arange(3)[None],)
    with torch.no_grad():
        exported = torch.export.export(model, given)
    program = penstock.compile(
        exported, tmp_path / "head.penstock", lowering="inductor", resident_below="4KiB"
    )
    assert program.plan(program.floor_bytes, hardware=SLOW).pool.tiles
    plans = program.write_ladder().payload.plans
    assert not any(plan.pool is not None and plan.pool.tiles for plan in plans)
    assert plans[0].budget >= 64 << 20

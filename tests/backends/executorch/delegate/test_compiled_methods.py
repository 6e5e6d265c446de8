"""Whole methods of AOTInductor's code in ExecuTorch's run time: the bits of penstock's compiled artifact."""

import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim, export

import penstock
from penstock.backends.executorch import read
from penstock.backends.executorch.facts import SMALL
from tests.backends.executorch.delegate.conftest import METHODS
from tests.backends.executorch.delegate.pte_models import NEXT, PROMPT, WIDE, WIDTH, copied, rows, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program, outputs_of
from tests.backends.executorch.forging import fields, forge
from tests.hunt import nightly_but, sampled

pytestmark = pytest.mark.timeout(300)

CALLS = {
    "quantised rows": [Call([rows(count)]) for count in (3, 8, 1, 5)],
    "decoder": [Call(PROMPT, "prefill"), *(Call(one, "decode") for one in NEXT)],
}


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """By a model's name, what penstock's own compiled artifact of it gives for the calls."""

    @cache
    def outputs(name):
        path = tmp_path_factory.mktemp("artifact") / f"{name}.penstock"
        program = penstock.compile(METHODS[name](), path, lowering="inductor", resident_below=SMALL)
        with program.load("100%") as module:
            return [getattr(module, call.method)(*call.inputs).clone() for call in CALLS[name]]

    return outputs


def assert_equal(answers, expected):
    assert all(torch.equal(one, other) for one, other in zip(outputs_of(answers), expected, strict=True))


def moved_by(files, budget, calls):
    """The least and the most bytes that the plan for a budget brings in these calls."""
    payload = read(files.pte).payload
    plan = max((one for one in payload.plans if one.budget <= budget), key=lambda one: one.budget)
    graphs = {one.name: one.graph for one in payload.methods}
    passes = fresh = 0
    for before, call in pairwise([Call(method=""), *calls]):
        (schedule,) = (one for one in plan.schedules if one.graph == graphs[call.method])
        passes += sum(one.stop - one.start for one in schedule.transfers)
        # What the next pass begins with may have come already, and is brought anew where the method changes.
        boundary = plan.boundary if schedule.boundary is None else schedule.boundary
        fresh += (before.method != call.method) * sum(one.stop - one.start for one in boundary)
    return passes, passes + fresh


CASES = [(model, share) for model in CALLS for share in (0, 0.5, 1)]


@pytest.mark.parametrize(
    ("model", "share"), nightly_but([("quantised rows", 0), ("quantised rows", 1)], CASES)
)
def test_outputs_are_those_of_penstocks_artifact_within_the_budget(runner, compiled, expected, model, share):
    files = compiled(model)
    exported = read(files.pte)
    assert {(one.kernels, one.regions) for one in exported.regions} == {("aotinductor", 1)}
    lowest, highest = exported.payload.plans[0].budget, exported.payload.plans[-1].budget
    budget = lowest + int(share * (highest - lowest))
    answers = runner([Program(files, {"budget": str(budget)})], CALLS[model])
    assert_equal(answers, expected(model))
    assert [(one.programs, one.misses) for one in answers] == [(1, 0)] * len(answers)
    assert answers[-1].peak_bytes <= budget
    least, most = moved_by(files, budget, CALLS[model])
    assert least <= answers[-1].bytes_moved <= most
    assert (least > 0) == (share < 1)


@pytest.mark.nightly
def test_programs_of_one_file_share_nothing(runner, compiled, expected):
    program = Program(compiled("decoder"), {"budget": "60%"})
    calls = CALLS["decoder"]
    others = [replace(calls[k], program=1) for k in (0, 3, 1, 2, 4)]
    both = runner([program, program], list(chain.from_iterable(zip(calls, others, strict=False))))
    assert_equal(both[::2], expected("decoder"))
    assert not torch.equal(both[3].outputs[0], both[2].outputs[0])
    assert (both[-1].programs, both[-1].misses) == (2, 0)


def test_programs_that_outlive_what_is_static(runner, compiled, expected):
    assert_equal(
        runner([Program(compiled("quantised rows"))], CALLS["quantised rows"], late=True),
        expected("quantised rows"),
    )


@pytest.mark.nightly
def test_weights_are_not_copied(runner, compiled):
    files = compiled("wide")
    total = sum(storage.nbytes for storage in read(files.pte).payload.storages)
    calls = [Call([rows(width=WIDE)])] * 3
    small, large = (runner([Program(files, {"budget": share})], calls) for share in ("25%", "100%"))
    assert_equal(small, outputs_of(large))
    assert 0.6 * total < large[-1].process_bytes - small[-1].process_bytes < total


class Before(nn.Module):
    """Returns what a buffer and a count held before it writes them.

    It asks for a weight of which it uses no element.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.unread = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
        self.register_buffer("held", torch.randn(3, 64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        held, count = self.held[:2].clone().view(-1, 32), self.count.clone()
        self.held.add_(x)
        self.count.add_(1)
        return self.linear(x) + self.held + self.count + self.unread[:0].sum(), held, count


def test_results_that_a_buffer_held_before_it_is_written_and_a_weight_that_no_step_reads(runner, tmp_path):
    model = Before().eval()
    methods = {"forward": torch.export.export(model, (rows(),))}
    files = write_files(tmp_path / "before", methods, kernels="aotinductor")
    payload = read(files.pte).payload
    unread = next(one.parts[0].storage for one in payload.weights if one.fqn == "unread")
    assert unread not in {s for one in payload.traces for step in one.steps for s in step.reads}
    expected = [one for _ in range(3) for one in model(rows())]
    for plan in (payload.plans[0], payload.plans[-1]):
        program = Program(files, {"budget": str(plan.budget)})
        torch.testing.assert_close(outputs_of(runner([program], [Call([rows()])] * 3)), expected)


def refused(runner, files, error, sentence, budget="100%"):
    (answer,) = runner([Program(files, {"budget": budget})], [Call([rows()])])
    assert answer.error == f"Error::{error}"
    (said,) = runner.sentences()
    assert sentence in said
    assert (said.count(". "), answer.programs) == (0, 0)


def test_a_budget_below_the_floor(runner, compiled):
    files = compiled("quantised rows")
    floor = read(files.pte).payload.plans[0].budget
    sentence = f"below the lowest plan of the program, which takes {floor}: give at least that"
    refused(runner, files, "InvalidArgument", sentence, str(floor - 1))


@pytest.mark.parametrize("beside", [None, b"no library"])
def test_a_library_that_is_missing_or_cannot_be_loaded(runner, compiled, tmp_path, beside):
    alone = Path(shutil.copy(runner.library, tmp_path))
    if beside:
        alone.with_name("libpenstock_aoti.so").write_bytes(beside)
    sentence = 'build it with scripts/build-delegate beside torch, or export the program with kernels="exec'
    refused(replace(runner, library=alone), compiled("quantised rows"), "InvalidArgument", sentence)


def test_damaged_code(runner, compiled, tmp_path):
    files = compiled("quantised rows")
    damaged = copied(files, tmp_path)
    key = read(files.pte).regions[0].program
    code = read(files.pte).programs[key]
    damaged.pte.write_bytes(files.pte.read_bytes().replace(code, code[:-1000] + b"\1" + code[-999:]))
    refused(runner, damaged, "InvalidProgram", f"the program's {key} is damaged: its sha256 differs; copy")


def test_code_for_another_processor(runner, compiled, tmp_path):
    files = copied(compiled("quantised rows"), tmp_path)
    forge(files.pte, payload=fields(lambda one: one["program"].update(machine="cpu linux z80")))
    sentence = "the program was compiled for z80, and this is"
    refused(runner, files, "InvalidProgram", sentence)


@pytest.mark.nightly
def test_in_executorchs_python_without_penstock(built, compiled, expected, tmp_path):
    """And in a fork of the process that has penstock beside it, which is refused."""
    files = compiled("quantised rows")
    save_file({"x": CALLS["quantised rows"][0].inputs[0]}, tmp_path / "inputs")
    code = """
import ctypes, os, sys
from executorch.extension.pybindings.portable_lib import _load_for_executorch
from safetensors.torch import load_file, save_file
beside = os.fork()
if not beside:
    import penstock.passes.probes
ctypes.CDLL(sys.argv[1])
module = _load_for_executorch(sys.argv[2], sys.argv[3])
y = module.forward([load_file(sys.argv[4])["x"]])[0].clone()
if beside:
    save_file({"y": y}, sys.argv[5])
    print(os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1]))
"""
    library = built / "libpenstock_executorch.so"
    arguments = [str(one) for one in (library, files.pte, files.weights, tmp_path / "inputs", tmp_path / "y")]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "y")["y"], expected("quantised rows")[0])
    assert int(done.stdout.split()[-1]) == 1
    assert "this process has penstock's operators already" in done.stderr


# Inputs of compiled methods: sizes that their code is not for are refused, since it checks none.


class Added(nn.Module):
    """A linear layer of one input, plus another; with `turned`, the second one comes first."""

    def __init__(self, turned):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.turned = nn.Linear(WIDTH, WIDTH), turned

    def forward(self, a, b, unused):
        return self.linear(b) + a if self.turned else self.linear(a) + b


class Paired(nn.Module):
    """Takes rows in pairs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        torch._check(x.shape[0] <= 8)
        return self.linear(x).view(-1, 2, WIDTH)


def added(turned):
    count = Dim("count", min=2, max=8)
    shapes = ({0: count}, {0: count}, None)
    return export(Added(turned).eval(), (rows(4), rows(4), rows(1)), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    @cache
    def made(turned):
        folder = tmp_path_factory.mktemp("added") / "compiled"
        return write_files(folder, {"forward": added(turned)}, kernels="aotinductor")

    return made


@pytest.mark.random
@pytest.mark.parametrize("turned", sampled([True, False], 2))
def test_one_symbol_in_two_inputs(runner, files, turned):
    model, other = Added(turned).eval(), rows(1)
    inputs = [(rows(count), torch.randn(count, WIDTH), other) for count in (4, 8, 2)]
    answers = runner([Program(files(turned))], [Call(one) for one in inputs])
    assert [one.error for one in answers] == ["Error::Ok"] * 3
    for answer, given in zip(answers, inputs, strict=True):
        torch.testing.assert_close(answer.outputs[0], model(*given))


@pytest.mark.random
@pytest.mark.parametrize("turned", sampled([True, False], 2))
def test_two_sizes_of_one_symbol_are_refused(runner, files, turned):
    right, short = (rows(8), rows(8), rows(1)), (rows(8), rows(3), rows(1))
    swapped = (short[1], short[0], short[2])
    answers = runner([Program(files(turned))], [Call(one) for one in (right, short, right, swapped)])
    ok, refused = "Error::Ok", "Error::InvalidArgument"
    assert [one.error for one in answers] == [ok, refused, ok, refused]
    assert torch.equal(answers[0].outputs[0], answers[2].outputs[0])
    last, sizes = ("a", ((3, 8), (8, 3))) if turned else ("b", ((8, 3), (3, 8)))
    assert runner.sentences() == [
        f"input {last}.shape[0]: expected {first}, as in the other inputs, got {second}; "
        "pass what the program was exported for"
        for first, second in sizes
    ]


def test_the_regions_inputs_stand_in_the_file(files):
    exported = read(files(True).pte)
    (region,) = exported.regions
    assert [(one.name, one.dtype, one.shape) for one in region.takes] == [
        ("b", "float32", ("count", WIDTH)),
        ("a", "float32", ("count", WIDTH)),
    ]
    assert [(one.name, one.lower, one.upper) for one in region.symbols] == [("count", 2, 8)]
    assert [one.name for one in exported.payload.methods[0].inputs] == ["a", "b", "unused"]


@pytest.mark.parametrize("dimension", [2 * Dim("pairs", min=1, max=4), Dim.AUTO])
def test_where_sizes_cannot_be_checked_those_of_the_export_are_taken(runner, tmp_path, dimension, caplog):
    program = export(Paired().eval(), (rows(4),), dynamic_shapes=({0: dimension},))
    with caplog.at_level(logging.WARNING, "penstock"):
        written = write_files(tmp_path / "paired", {"forward": program}, kernels="aotinductor")
    assert "method 'forward' runs with the sizes of its export only: the delegate cannot check" in caplog.text
    answers = runner([Program(written)], [Call([rows(4)]), Call([rows(6)])])
    assert [one.error for one in answers] == ["Error::Ok", "Error::InvalidArgument"]
    (said,) = runner.sentences()
    assert "input x.shape[0]: expected 4, a static size, got 6" in said


def test_an_input_of_another_dtype_than_the_code_was_compiled_for(runner, files, tmp_path):
    """ExecuTorch refuses other dtypes than those of the method, so the region's own are changed here."""
    forged = copied(files(True), tmp_path)
    forge(forged.pte, region=fields(lambda one: one["takes"][1].update(dtype="int64")))
    (answer,) = runner([Program(forged)], [Call((rows(4), rows(4), rows(1)))])
    assert answer.error == "Error::InvalidArgument"
    (said,) = runner.sentences()
    assert said == "input a: expected Long, got Float; pass what the program was exported for"


def test_nothing_is_kept_of_the_results_of_a_call(runner, tmp_path):
    count = Dim("count", min=1, max=256)
    program = export(nn.Linear(WIDTH, WIDTH), (rows(4),), dynamic_shapes=({0: count},))
    written = write_files(tmp_path / "long", {"forward": program}, kernels="aotinductor")
    answers = runner([Program(written)], [Call([rows(size)]) for size in (1, 256, 1, 256)])
    assert [one.error for one in answers] == ["Error::Ok"] * 4  # and ExecuTorch renames an input `input`
    assert answers[3].heap_bytes - answers[2].heap_bytes < 256 * WIDTH * 4 // 2

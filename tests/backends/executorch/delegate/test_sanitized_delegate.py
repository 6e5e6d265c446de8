"""The delegate under ThreadSanitizer and AddressSanitizer, with the program that runs it: `make sanitize`.

ExecuTorch's own libraries are as pip installs them, so what they do is not seen: an address that a kernel
reads or writes, a value that it never wrote, or a race between two of its own accesses. Memory that the
delegate and they share is checked where the delegate touches it, and calls of the C library everywhere.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.backends.executorch.delegate.pte_models import NEXT, PROMPT, rows
from tests.backends.executorch.delegate.pte_runs import Call, Program, Runner
from tests.backends.executorch.forging import FORGERIES, deep, fields, forge
from tests.engines import ROOT

pytestmark = pytest.mark.sanitize
MLP = [Call([rows()])] * 3
SPOKEN = [Call(PROMPT, "prefill"), *(Call(one, "decode") for one in NEXT)]


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def sanitized(request):
    """The folder of a delegate that is compiled with a sanitizer."""
    subprocess.run([ROOT / "scripts/build-delegate", sys.executable, request.param], check=True)
    folder = ROOT / f"build/executorch-{request.param}"
    assert (folder / "run_pte").exists(), (
        "nothing was built: scripts/install-compiler installs what builds it"
    )
    return folder


@pytest.fixture
def runner(sanitized, tmp_path, monkeypatch):
    """Fails for what a sanitizer reports, because the program then ends with an error."""
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=1")
    return Runner(sanitized / "run_pte", sanitized / "libpenstock_executorch.so", tmp_path)


def _assert_equal(answers, expected):
    assert [one.error for one in (*answers, *expected)] == ["Error::Ok"] * (len(answers) + len(expected))
    for one, other in zip(answers, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.outputs, other.outputs, strict=True))


@pytest.mark.parametrize("mode", ["mmap", "memory"])
@pytest.mark.parametrize(("model", "calls"), [("mlp", MLP), ("quantised", MLP), ("decoder", SPOKEN)])
def test_runs(runner, exported, model, calls, mode):
    files, plain = exported(model)
    answers = runner([Program(files, {"budget": "60%", "readers": 2}, mode)], calls)
    _assert_equal(answers, runner([Program(plain, share=True)], calls))


def test_two_modules_in_two_threads(runner, exported):
    files, plain = exported("decoder")
    calls = [SPOKEN[0], *SPOKEN[1:] * 3]
    program = Program(files, {"budget": "60%"})
    unloaded = Call(method="")
    both = [*calls, unloaded, *(replace(call, program=1) for call in [*calls, unloaded])]
    answers = runner([program, program], both, threads=True)
    expected = runner([Program(plain, share=True)], [*calls])
    half = len(calls) + 1
    _assert_equal(answers[: half - 1], expected)
    _assert_equal(answers[half:-1], expected)


def test_programs_that_outlive_what_is_static(runner, exported):
    files, _ = exported("mlp")
    answers = runner([Program(files, {"budget": "60%"})] * 2, [*MLP, replace(MLP[0], program=1)], late=True)
    assert [one.error for one in answers] == ["Error::Ok"] * 4


def test_programs_that_come_and_go_in_threads(runner, exported):
    files, _ = exported("mlp")
    calls = [Call(program=number, reload=8) for number in range(3)]
    answers = runner([Program(files, {"budget": "50%"})] * 3, calls, threads=True)
    assert [one.error for one in answers] == ["Error::Ok"] * 3


DAMAGES = {
    **{name: {"region": fields(change)} for name, (change, _) in FORGERIES.items()},
    "deep region": {"region": deep},
    "deep payload": {"payload": deep},
    "no plans": {"payload": fields(lambda one: one.update(plans=[]))},
}


def test_damaged_programs(runner, files):
    """In one process, as an application that tries file after file."""
    good, copies = files.pte.read_bytes(), []
    for number, change in enumerate(DAMAGES.values()):
        files.pte.write_bytes(good)
        forge(files.pte, **change)
        copies.append(replace(files, pte=files.pte.rename(files.pte.with_name(f"{number}.pte"))))
    cut = files.pte.with_name("cut.ptd")
    cut.write_bytes(files.weights.read_bytes()[:50])
    files.pte.write_bytes(good)
    programs = [*(Program(one, {"budget": "50%"}) for one in copies), Program(files, {"weights": str(cut)})]
    answers = runner(programs, [replace(MLP[0], program=number) for number in range(len(programs))])
    allowed = {f"Error::{code}" for code in ("InvalidProgram", "InvalidArgument", "InvalidExternalData")}
    assert {one.error for one in answers} == allowed
    assert len(runner.sentences()) == len(programs)


def test_weights_that_change_while_they_are_used(runner, files):
    calls = [MLP[0], Call(shell=f"truncate --size=8192 {files.weights}"), *MLP]
    answers = runner([Program(files, {"budget": "40%"})], calls)
    assert [one.error for one in answers[2:]] == ["Error::InvalidExternalData"] * 3

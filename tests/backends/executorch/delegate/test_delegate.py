"""The delegate in ExecuTorch's run time: the bits of its kernels without penstock, within every budget."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backends.executorch import read
from tests.backends.executorch.delegate.pte_models import NEXT, PROMPT, WIDE, Mlp, rows, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program, outputs_of
from tests.forked import run_forked
from tests.hunt import nightly_but

THREE_CALLS = [Call([rows()])] * 3
SPOKEN = [Call(PROMPT, "prefill"), *(Call(one, "decode") for one in NEXT)]


def _assert_equal(answers, expected):
    pairs = zip(outputs_of(answers), outputs_of(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _plan(files, budget):
    """The plan of the payload's ladder that a budget allows."""
    return max((p for p in read(files.pte).payload.plans if p.budget <= budget), key=lambda p: p.budget)


def _moved(plan, graph=0):
    """Bytes that a pass of a method brings, once passes follow one another."""
    (schedule,) = (one for one in plan.schedules if one.graph == graph)
    return sum(one.stop - one.start for one in schedule.transfers)


CASES = [(model, share) for model in ("mlp", "quantised") for share in (0, 0.3, 0.6, 1)]


@pytest.mark.parametrize(("model", "share"), nightly_but([("mlp", 0), ("mlp", 1), ("mlp", 0.3)], CASES))
def test_outputs_are_those_of_the_kernels_alone_within_the_budget(runner, exported, model, share):
    files, plain = exported(model)
    plans = read(files.pte).payload.plans
    budget = plans[0].budget + int(share * (plans[-1].budget - plans[0].budget))
    answers = runner([Program(files, {"budget": str(budget)})], THREE_CALLS)
    _assert_equal(answers, runner([Program(plain)], THREE_CALLS))
    plan, last = _plan(files, budget), answers[-1]
    assert (last.plan_budget, last.misses, last.programs) == (plan.budget, 0, 1)
    assert last.peak_bytes <= budget
    # What the next pass begins with may have come already, and is brought first of all once.
    first = sum(one.stop - one.start for one in plan.boundary)
    assert 3 * _moved(plan) - first <= last.bytes_moved - first <= 3 * _moved(plan)
    assert (_moved(plan) == 0) == (share == 1)


@pytest.mark.parametrize("percent", nightly_but([40], [None, 40, 70]))
def test_methods_share_an_engine_a_cache_and_a_tied_head(runner, exported, percent):
    files, plain = exported("decoder")
    budget = {} if percent is None else {"budget": f"{percent}%"}
    answers = runner([Program(files, budget)], SPOKEN)
    _assert_equal(answers, runner([Program(plain, share=True)], SPOKEN))
    sizes = [storage.nbytes for storage in read(files.pte).payload.storages]
    assert [(one.programs, one.misses) for one in answers] == [(1, 0)] * len(SPOKEN)
    assert answers[-1].peak_bytes <= sum(sizes) * (percent or 100) // 100
    assert (answers[-1].bytes_moved > answers[0].bytes_moved) == (percent is not None)


def test_methods_may_follow_one_another_in_any_order(runner, exported):
    files, plain = exported("decoder")
    calls = [SPOKEN[2], SPOKEN[0], SPOKEN[0], SPOKEN[3], SPOKEN[0], SPOKEN[1]]
    answers = runner([Program(files, {"budget": "50%"})], calls)
    _assert_equal(answers, runner([Program(plain, share=True)], calls))
    assert answers[-1].misses == 0


@pytest.mark.parametrize("mode", ["mmap", "memory"])
def test_programs_of_one_file_share_nothing(runner, exported, mode):
    files, _ = exported("decoder")
    program = Program(files, {"budget": "60%"}, mode)
    alone = runner([program], SPOKEN)
    others = [replace(call, program=1) for call in (SPOKEN[0], SPOKEN[3], SPOKEN[1], SPOKEN[2], SPOKEN[4])]
    both = runner([program, program], list(chain.from_iterable(zip(SPOKEN, others, strict=True))))
    _assert_equal(both[::2], alone)
    assert not torch.equal(both[3].outputs[0], alone[1].outputs[0])
    assert both[-1].programs == 2
    assert both[-1].plan_budget == 2 * alone[-1].plan_budget


def test_a_state_lives_as_long_as_any_method_of_its_program_is_loaded(runner, exported):
    files, _ = exported("decoder")
    program = Program(files, {"budget": "60%"})
    prompt, word = SPOKEN[:2]
    kept = [prompt, word, Call(method="prefill"), word, Call(method="decode"), word]
    answers = runner([program], kept)
    first, again, fresh = (answers[k].outputs[0] for k in (1, 3, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, fresh)
    assert [one.programs for one in answers] == [1, 1, 1, 1, 0, 1]
    assert torch.equal(runner([program], [word])[0].outputs[0], fresh)


@pytest.mark.parametrize("mode", ["mmap", "mlock", "file", "memory"])
def test_weights_are_read_from_the_file_or_from_memory(runner, exported, mode):
    files, plain = exported("mlp")
    options = {"budget": "50%", "readers": 2}
    if mode == "file":  # whose loader would bring all weights into memory
        options["weights"] = str(files.weights)
    answers = runner([Program(files, options, mode)], THREE_CALLS)
    _assert_equal(answers, runner([Program(plain)], THREE_CALLS))
    assert answers[-1].bytes_moved >= 3 * _moved(_plan(files, answers[-1].plan_budget))
    assert answers[-1].misses == 0


@pytest.mark.nightly
def test_the_process_takes_the_memory_of_the_budget(runner, exported):
    files, plain = exported("wide")
    total = sum(storage.nbytes for storage in read(files.pte).payload.storages)
    calls = [Call([rows(width=WIDE)])] * 3
    small, large = (runner([Program(files, {"budget": share})], calls) for share in ("25%", "100%"))
    locked = runner([Program(files, {"budget": "25%"}, "mlock")], calls)
    _assert_equal(small, runner([Program(plain)], calls))
    _assert_equal(small, large)
    _assert_equal(small, locked)
    assert large[-1].process_bytes - small[-1].process_bytes > 0.6 * total
    assert locked[-1].process_bytes - small[-1].process_bytes < 0.3 * total


@pytest.mark.parametrize("count", nightly_but([150], [150, 1000]))
def test_nothing_is_left_of_a_program_that_is_destroyed(runner, exported, count):
    files, _ = exported("mlp")
    few, many = runner([Program(files)], [Call(reload=30), Call(reload=count)])
    assert (few.error, many.error, many.programs) == ("Error::Ok", "Error::Ok", 0)
    assert many.heap_bytes - few.heap_bytes < 16 << 10


def test_sizes_may_differ_from_call_to_call(runner, exported):
    files, plain = exported("dynamic")
    calls = [Call([rows(count)]) for count in (3, 8, 1, 5)]
    answers = runner([Program(files, {"budget": "50%"})], calls)
    _assert_equal(answers, runner([Program(plain)], calls))
    assert [len(one.outputs[0]) for one in answers] == [3, 8, 1, 5]


def test_a_program_without_options_runs_within_the_budget_of_its_export(runner, tmp_path):
    methods = {"forward": torch.export.export(Mlp().eval(), (rows(),))}
    files = write_files(tmp_path / "budget", methods, budget="50%")
    (answer,) = runner([Program(files)], THREE_CALLS[:1])
    total = sum(storage.nbytes for storage in read(files.pte).payload.storages)
    assert answer.plan_budget == _plan(files, total // 2).budget < total


@pytest.mark.usefixtures("executorch_python")
def test_it_runs_in_executorchs_python(built, runner, exported, tmp_path):
    files, _ = exported("mlp")
    save_file({"x": rows()}, tmp_path / "inputs")
    code = """
import ctypes, sys
from executorch.extension.pybindings.portable_lib import _load_for_executorch
from safetensors.torch import load_file, save_file
ctypes.CDLL(sys.argv[1])
module = _load_for_executorch(sys.argv[2], sys.argv[3])
save_file({"y": module.forward([load_file(sys.argv[4])["x"]])[0].clone()}, sys.argv[5])
"""
    library = built / "libpenstock_executorch.so"
    done = run_forked(
        code, library, files.pte, files.weights, tmp_path / "inputs", tmp_path / "y", warnings="default"
    )
    assert done.status == 0, done.err
    expected = runner([Program(files)], THREE_CALLS[:1])[0].outputs[0]
    assert torch.equal(load_file(tmp_path / "y")["y"], expected)

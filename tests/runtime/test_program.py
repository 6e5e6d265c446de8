"""An artifact from compile to close: outputs bit for bit, budgets kept, and every refusal by name."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime import direct_file
from tests.runtime.conftest import Compiled

ARENAS = ("mapped", "pooled", "contiguous", "paged")


@pytest.fixture
def artifact(stack: Compiled, tmp_path: Path) -> Path:
    """A copy of the artifact, for tests that harm it."""
    return Path(shutil.copytree(stack.path, tmp_path / "copy.penstock"))


def edit(artifact: Path, change) -> None:
    payload = json.loads((artifact / "payload.json").read_text())
    change(payload)
    (artifact / "payload.json").write_text(json.dumps(payload))


def mapped_lines() -> list[str]:
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "weights.safetensors" in line
    ]


# What it is for.


@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("budget", ["floor", "30%", "50%", "75%", "100%"])
def test_outputs_are_bit_for_bit_those_of_the_eager_module(stack, arena, budget):
    program = stack.open()
    budget = program.floor(arena=arena) if budget == "floor" else budget
    with program.load(budget, arena=arena, poison=True) as module:
        for _ in range(3):
            assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.peak_bytes <= module.stats.budget
        assert module.stats.misses == 0
        assert module.stats.passes == (3 if module.plan.arena_bytes else 0)


def test_the_floor_is_accepted_and_one_byte_less_is_not(stack):
    program = stack.open()
    with program.load(program.floor_bytes) as module:
        assert torch.equal(module(stack.tokens), stack.expected)
    with pytest.raises(penstock.BudgetError, match=f"floor of {program.floor_bytes}") as caught:
        program.load(program.floor_bytes - 1)
    assert caught.value.floor_bytes == program.floor_bytes
    assert caught.value.step in {step.name for step in program.payload.traces[0].steps}
    assert set(caught.value.weights) <= {w.fqn for w in program.payload.weights}


def test_bytes_that_move_are_those_that_the_plan_streams(stack):
    with stack.open().load("50%", arena="paged") as module:
        module(stack.tokens)
        before = module.stats.bytes_moved
        for _ in range(4):
            module(stack.tokens)
        ahead = sum(r.nbytes for r in module.plan.boundary)
        assert abs(module.stats.bytes_moved - before - 4 * module.plan.streamed_bytes) <= ahead


def test_a_dynamic_batch_streams_too(stack):
    tokens = torch.randint(0, 300, (11, 7))
    with torch.no_grad():
        expected = stack.exported.module()(tokens)
    with stack.open().load("40%", arena="paged") as module:
        assert torch.equal(module(tokens), expected)


def test_kept_weights_never_move(stack):
    program = stack.open()
    plan = program.plan("60%", keep=["blocks.0.*"], arena="paged")
    kept = {p.storage for w in program.payload.weights if w.fqn.startswith("blocks.0.") for p in w.parts}
    moved = {
        s
        for t in plan.schedules[0].transfers
        for s in kept
        if t.start < plan.arena.layout[s] + program.payload.storages[s].nbytes
        and plan.arena.layout[s] < t.stop
    }
    # Granules are pages here: only a page that a kept weight shares may not move either.
    assert not moved
    with program.load(plan=plan) as module:
        assert torch.equal(module(stack.tokens), stack.expected)


def test_measured_times_can_be_planned_with(stack):
    program = stack.open()
    with program.load("50%", arena="paged") as module:
        module(stack.tokens)
        trace = module.measure(stack.tokens)
        assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.misses == 0
    assert trace.times == "measured"
    assert all(step.read_ns > 0 for step in trace.steps)
    plan = program.plan("50%", traces=[trace], arena="paged")
    assert plan.traces == (trace,)
    with program.load(plan=plan) as module:
        assert torch.equal(module(stack.tokens), stack.expected)


def test_tied_weights_are_one_storage(stack):
    weights = {w.fqn: w.parts[0].storage for w in stack.open().payload.weights}
    assert weights["embed.weight"] == weights["head.weight"]


def test_two_modules_of_one_artifact_do_not_disturb_each_other(stack):
    program = stack.open()
    with program.load("30%", arena="paged") as one, program.load("60%", arena="contiguous") as two:
        for _ in range(3):
            assert torch.equal(one(stack.tokens), stack.expected)
            assert torch.equal(two(stack.tokens), stack.expected)


def test_nothing_is_left_after_close(stack):
    module = stack.open().load("50%", arena="mapped")
    module(stack.tokens)
    assert mapped_lines()
    module.close()
    module.close()
    assert not mapped_lines()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock")]


def test_nothing_is_left_after_a_load_that_failed(stack, monkeypatch):
    from penstock.runtime import loading

    def fail(*args, **kwargs):
        raise MemoryError("no room for the program")

    monkeypatch.setattr(loading.eager, "load", fail)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        stack.open().load("50%", arena="mapped")
    assert not mapped_lines()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock")]
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_module_that_is_forgotten_is_closed(stack):
    module = stack.open().load("50%", arena="mapped")
    module(stack.tokens)
    del module
    import gc

    gc.collect()
    assert not mapped_lines()


# Budgets that are none.


@pytest.mark.parametrize("budget", [0, -1, "0%", "much", "12 parsecs", "-3MiB"])
def test_a_budget_that_is_no_size_is_refused(stack, budget):
    with pytest.raises(penstock.BudgetError):
        stack.open().load(budget)


def test_a_budget_or_a_plan_and_not_both(stack):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match="not both"):
        program.load()
    with pytest.raises(penstock.BudgetError, match="not both"):
        program.load("50%", plan=program.plan("50%"))


def test_a_pattern_that_matches_nothing_is_refused(stack):
    with pytest.raises(penstock.PlanError, match=r"'lm_head\.\*' matches no weight"):
        stack.open().plan("50%", keep=["lm_head.*"])


def test_keeping_more_than_the_budget_is_refused(stack):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match="keep"):
        program.plan(program.floor_bytes + 100_000, keep=["*"])


def test_a_device_that_is_not_there_is_refused(stack):
    with pytest.raises(penstock.StreamError, match="cuda:7"):
        stack.open().load("50%", device="cuda:7")


def test_an_arena_that_does_not_exist_is_refused(stack):
    with pytest.raises(penstock.PlanError, match="'ring'"):
        stack.open().plan("50%", arena="ring")


# Artifacts that are harmed.


@pytest.mark.parametrize("name", ["payload.json", "program.zip", "weights.safetensors"])
def test_a_missing_file_is_named(artifact, name):
    (artifact / name).unlink()
    with pytest.raises(penstock.SourceError, match=name):
        penstock.open(artifact)


@pytest.mark.parametrize("name", ["payload.json", "program.zip", "weights.safetensors"])
def test_a_truncated_file_is_refused(artifact, name):
    os.truncate(artifact / name, (artifact / name).stat().st_size - 100)
    with pytest.raises((penstock.PayloadError, penstock.SourceError), match=name):
        penstock.open(artifact)


def test_an_unknown_version_is_refused(artifact):
    edit(artifact, lambda payload: payload.update(version=99))
    with pytest.raises(penstock.PayloadError, match="99"):
        penstock.open(artifact)


def test_an_unknown_field_is_refused(artifact):
    edit(artifact, lambda payload: payload.update(colour="red"))
    with pytest.raises(penstock.PayloadError, match="colour"):
        penstock.open(artifact)


def test_offsets_outside_the_file_are_refused(artifact):
    edit(artifact, lambda payload: payload["storages"][0]["extents"][0].update(file_offset=1 << 40))
    with pytest.raises(penstock.PayloadError):
        penstock.open(artifact)


def test_another_program_in_its_place_is_refused(artifact):
    (artifact / "program.zip").write_bytes(b"PK")
    with pytest.raises(penstock.PayloadError, match="sha256"):
        penstock.open(artifact)


def test_a_plan_for_another_program_is_refused(stack, artifact):
    program = stack.open()
    plan = program.plan("50%", arena="paged")
    from dataclasses import replace

    steps = plan.traces[0].steps
    other = replace(plan, traces=(replace(plan.traces[0], steps=steps[:-1]),))
    with pytest.raises(penstock.PlanError):
        program.load(plan=other)


def test_a_plan_that_never_transfers_what_a_step_reads_is_refused(stack):
    from dataclasses import replace

    program = stack.open()
    plan = program.plan("50%", arena="paged")
    schedule = plan.schedules[0]
    broken = replace(plan, schedules=(replace(schedule, transfers=schedule.transfers[1:]),))
    with pytest.raises(penstock.PlanError):
        program.load(plan=broken)


def test_weights_of_another_model_are_refused(artifact):
    path = artifact / "weights.safetensors"
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half:] = bytes(b ^ 1 for b in data[half:])
    path.write_bytes(data)
    with pytest.raises(penstock.SourceError, match="not the file that was compiled"):
        penstock.open(artifact)


def test_verify_finds_the_byte_that_a_stamp_does_not_sample(artifact):
    program = penstock.open(artifact)
    assert program.verify() == sum(s.nbytes for s in program.payload.storages)
    path = artifact / "weights.safetensors"
    weight = max(program.payload.storages, key=lambda s: s.nbytes).extents[0]
    for offset in range(weight.file_offset, weight.file_offset + weight.nbytes, 4096):
        flip(path, offset)
        try:
            survivor = penstock.open(artifact)
        except penstock.SourceError:
            flip(path, offset)
            continue
        with pytest.raises(penstock.SourceError, match="has changed since it was compiled"):
            survivor.verify()
        return
    pytest.fail("every block of the largest weight is sampled: make the fixture larger")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("arena", ["mapped", "paged"])
def test_weights_truncated_while_they_are_in_use(artifact, stack, arena):
    path = artifact / "weights.safetensors"
    whole = path.read_bytes()
    with penstock.open(artifact).load("70%", arena=arena) as module:
        module(stack.tokens)
        os.truncate(path, 8192)
        with pytest.raises(penstock.SourceError, match="truncated"):
            module(stack.tokens)
        with path.open("r+b") as file:
            file.write(whole)
        assert torch.equal(module(stack.tokens), stack.expected)


def test_a_read_error_in_the_middle_of_a_pass_raises_and_the_next_call_works(artifact, stack, monkeypatch):
    with penstock.open(artifact).load("40%", arena="contiguous") as module:
        module(stack.tokens)
        real, failures = os.preadv, [True]

        def fail_once(fd, buffers, offset, flags=0):
            if failures:
                failures.pop()
                raise OSError(5, "Input/output error")
            return real(fd, buffers, offset, flags)

        monkeypatch.setattr(direct_file.os, "preadv", fail_once)
        call_twice = [module, module]  # what was fetched ahead may serve one call still
        with pytest.raises(penstock.SourceError, match="Input/output error"):
            [call(stack.tokens) for call in call_twice]
        assert torch.equal(module(stack.tokens), stack.expected)


# Calls that cannot be right.


def test_inputs_of_another_dtype_shape_or_tree_are_refused(stack):
    with stack.open().load("50%") as module:
        moved = module.stats.bytes_moved
        for arguments in [
            (stack.tokens.float(),),
            (stack.tokens[:, :3],),
            (stack.tokens[0],),
            (),
            ([stack.tokens],),
        ]:
            with pytest.raises(penstock.StreamError, match=r"expected .*got "):
                module(*arguments)
        assert module.stats.passes == 0
        assert module.stats.bytes_moved >= moved
        assert torch.equal(module(stack.tokens), stack.expected)


def test_grad_mode_with_an_input_that_requires_grad_is_refused(tmp_path):
    linear = torch.nn.Linear(64, 64)
    x = torch.randn(2, 64)
    program = penstock.compile(torch.export.export(linear, (x,)), tmp_path / "linear.penstock")
    with program.load("100%") as module:
        with pytest.raises(penstock.StreamError, match="requires grad"):
            module(x.clone().requires_grad_())
        with torch.no_grad():
            assert torch.equal(module(x.clone().requires_grad_()), linear(x))
        assert not module(x).requires_grad


def test_a_second_thread_is_refused(stack):
    with stack.open().load("50%", arena="paged") as module, ThreadPoolExecutor(1) as pool:
        assert module._running.acquire(blocking=False)
        with pytest.raises(penstock.StreamError, match="another thread"):
            pool.submit(module, stack.tokens).result()
        module._running.release()
        assert torch.equal(module(stack.tokens), stack.expected)


def test_a_call_after_close_is_refused(stack):
    module = stack.open().load("50%")
    module.close()
    with pytest.raises(penstock.StreamError, match="closed"):
        module(stack.tokens)


def test_a_forked_child_may_only_close(stack):
    with stack.open().load("50%", arena="mapped") as module:
        module(stack.tokens)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                module(stack.tokens)
            except penstock.StreamError as error:
                status = 0 if "forked child" in str(error) else 2
            try:
                module.close()
            except BaseException:
                status = 3
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(module(stack.tokens), stack.expected)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda m: m.to("meta"),
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.train(),
        lambda m: m.requires_grad_(),
        lambda m: m.load_state_dict({}),
        lambda m: __import__("copy").deepcopy(m),
        lambda m: __import__("pickle").dumps(m),
    ],
)
def test_what_a_streamed_module_cannot_do_raises(stack, misuse):
    with stack.open().load("50%") as module:
        with pytest.raises(penstock.StreamError, match="not possible"):
            misuse(module)
        assert module.eval() is module


def test_an_exception_in_the_model_leaves_a_module_that_works(stack):
    outside = torch.full_like(stack.tokens, 10_000)
    with stack.open().load("40%", arena="paged") as module:
        for _ in range(2):
            with pytest.raises(IndexError):
                module(outside)
            assert torch.equal(module(stack.tokens), stack.expected)

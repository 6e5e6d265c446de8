"""Artifacts that were harmed, reads that fail, and calls that cannot be right: each refused by name."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.runtime.files import direct_file
from penstock.runtime.files.artifact_files import digest_line
from tests.engines import ENGINES


@pytest.fixture
def artifact(stack, tmp_path):
    """A copy of the artifact, for tests that harm it."""
    return Path(shutil.copytree(stack.path, tmp_path / "copy.penstock"))


def edit(artifact, change):
    payload = json.loads((artifact / "payload.json").read_text())
    change(payload)
    data = json.dumps(payload).encode()
    (artifact / "payload.json").write_bytes(data)
    (artifact / "payload.json.sha256").write_bytes(digest_line(data))


FILES = ("payload.json", "program.zip", "weights.safetensors")

# Artifacts that are harmed.


@pytest.mark.parametrize(
    "name", ["payload.json", "payload.json.sha256", "program.zip", "weights.safetensors"]
)
def test_a_missing_file_is_named(artifact, name):
    (artifact / name).unlink()
    with pytest.raises(penstock.SourceError, match=name):
        penstock.open(artifact)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused(artifact, name):
    os.truncate(artifact / name, (artifact / name).stat().st_size - 100)
    with pytest.raises((penstock.PayloadError, penstock.SourceError), match=name):
        penstock.open(artifact)


def test_a_payload_with_other_numbers_is_refused(artifact):
    """Two weights of one size whose storages are swapped are a valid payload, of another model."""
    path = artifact / "payload.json"
    data = path.read_bytes()
    digits = [k for k in range(len(data)) if data[k : k + 1].isdigit()]
    for k in digits[:: len(digits) // 40]:
        path.write_bytes(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
        with pytest.raises((penstock.PayloadError, penstock.SourceError, penstock.PlanError)):
            penstock.open(artifact)
    path.write_bytes(data)
    penstock.open(artifact)


def test_plans_that_are_not_safe_for_the_program_are_refused(stack):
    program = stack.open()
    plan = program.plan("50%", arena="paged")
    (trace,), (schedule,) = plan.traces, plan.schedules
    of_fewer_steps = replace(plan, traces=(replace(trace, steps=trace.steps[:-1]),))
    without_a_transfer = replace(plan, schedules=(replace(schedule, transfers=schedule.transfers[1:]),))
    for other in (of_fewer_steps, without_a_transfer):
        with pytest.raises(penstock.PlanError):
            program.load(plan=other)


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


def test_verify_names_the_weight_that_cannot_be_verified(artifact):
    edit(artifact, lambda payload: payload["storages"][1].update(sha256=None))
    program = penstock.open(artifact)
    name = program.payload.storage_names()[1]
    with pytest.raises(penstock.SourceError, match=f"weight {name} cannot be verified: .*compile again"):
        program.verify()


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("arena", ["mapped", "paged"])
def test_weights_truncated_while_they_are_in_use(artifact, stack, arena):
    path = artifact / "weights.safetensors"
    whole, before = path.read_bytes(), path.stat()
    with penstock.open(artifact).load("70%", options=LoadOptions(arena=arena)) as module:
        module(stack.tokens)
        os.truncate(path, 8192)
        with pytest.raises(penstock.SourceError, match="truncated"):
            module(stack.tokens)
        with path.open("r+b") as file:
            file.write(whole)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert torch.equal(module(stack.tokens), stack.expected)


@pytest.mark.parametrize("arena", ["mapped", "contiguous", "paged"])
def test_weights_overwritten_in_place_while_they_are_in_use(artifact, stack, arena):
    path = artifact / "weights.safetensors"
    weight = max(penstock.open(artifact).payload.storages, key=lambda s: s.nbytes).extents[0]
    with penstock.open(artifact).load("40%", options=LoadOptions(arena=arena)) as module:
        module(stack.tokens)
        flip(path, weight.file_offset)
        with pytest.raises(penstock.SourceError, match=r"changed while in use.*open the artifact again"):
            [module(stack.tokens) for _ in range(2)]  # what was fetched ahead may serve one call still
        with pytest.raises(penstock.SourceError, match="changed while in use"):
            module(stack.tokens)


def test_a_read_error_in_the_middle_of_a_pass_raises_and_the_next_call_works(artifact, stack, monkeypatch):
    with penstock.open(artifact).load(
        "40%", options=LoadOptions(arena="contiguous", engine="python")
    ) as module:
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
            with pytest.raises(penstock.StreamError, match=r"expected .*got |does not fit the program: "):
                module(*arguments)
        assert module.stats.passes == 0
        assert module.stats.bytes_moved >= moved
        assert torch.equal(module(stack.tokens), stack.expected)


def test_grad_mode_with_an_input_that_requires_grad_is_refused(tmp_path):
    linear = torch.nn.Linear(64, 64)
    x = torch.randn(2, 64)
    program = penstock.compile(torch.export.export(linear, (x,)), tmp_path / "linear.penstock")
    with program.load("100%") as module:
        with pytest.raises(penstock.StreamError, match="input input requires grad and grad mode is on"):
            module(x.clone().requires_grad_())
        with torch.no_grad():
            assert torch.equal(module(x.clone().requires_grad_()), linear(x))
        assert not module(x).requires_grad


def test_a_second_thread_is_refused(stack):
    with (
        stack.open().load("50%", options=LoadOptions(arena="paged")) as module,
        ThreadPoolExecutor(1) as pool,
    ):
        with module._gate.call():
            with pytest.raises(penstock.StreamError, match="another thread"):
                pool.submit(module, stack.tokens).result()
            with pytest.raises(penstock.StreamError, match="while a call runs"):
                module(stack.tokens)
            with pytest.raises(penstock.StreamError, match="while a call runs"):
                module.close()
        assert torch.equal(module(stack.tokens), stack.expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_may_only_close(stack, engine):
    with stack.open().load("50%", options=LoadOptions(arena="mapped", engine=engine)) as module:
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
    with stack.open().load("40%", options=LoadOptions(arena="paged")) as module:
        for _ in range(2):
            with pytest.raises(IndexError):
                module(outside)
            assert torch.equal(module(stack.tokens), stack.expected)

"""Files in place whose tensors are off 64 bytes: the bits are those of a model that is mapped from them."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.export import export

import penstock
from penstock import LoadOptions
from penstock.runtime.arena.kinds import cpu_arenas
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.runtime.models import aligned
from tests.schedule.traces import machine

PHASES = (8, 24, 40, 0, 9, 20)
ROW = torch.randn(1, 96, generator=torch.Generator().manual_seed(1))


def write(path, tensors):
    """A safetensors file in which tensor k begins at PHASES[k] modulo 64."""
    header = {}
    data = b""
    for number, (name, value) in enumerate(tensors.items()):
        pad = (PHASES[number % len(PHASES)] - len(data)) % 64
        if pad:
            header[f"pad.{number}"] = {
                "dtype": "U8", "shape": [pad], "data_offsets": [len(data), len(data) + pad]
            }  # fmt: skip
        data += bytes(pad)
        header[name] = {
            "dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]
        }  # fmt: skip
        data += value.numpy().tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The program, what the mapped model computes, and what it computes on aligned copies of its weights."""
    folder = tmp_path_factory.mktemp("phases")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).eval().requires_grad_(False)
    write(folder / "model.safetensors", dict(model.state_dict()))
    exported = export(model, (ROW,))
    model.load_state_dict(
        {n: v for n, v in load_file(folder / "model.safetensors").items() if "pad" not in n}, assign=True
    )
    assert {weight.data_ptr() % 64 for weight in model.parameters()} == set(PHASES)
    mapped = model(ROW)
    program = penstock.compile(
        exported, folder / "model.penstock", weights=folder / "model.safetensors", pack=False
    )
    return program, mapped, aligned(model)(ROW)


def arena_of(case, kind):
    """The arena that loads use, in smaller granules, so that a small model streams in them."""
    program = case[0]
    found = cpu_arenas(program.payload)[kind]
    return found if found.granule < 1 << 20 else replace(found, granule=4096)


def planned(case, kind, share=0.0):
    payload = case[0].payload
    problem = Problem(payload.storages, payload.traces, arena_of(case, kind), hardware=machine(1e9))
    least = floor(problem).upper_bytes
    plan = make_plan(problem, least + int(share * (sum(s.nbytes for s in payload.storages) - least)))
    verify_plan(payload.storages, payload.traces, plan)
    return plan


def test_weights_have_the_phases_of_their_files(case):
    program, mapped, copied = case  # whose last bits differ on some processors
    assert torch.allclose(mapped, copied, atol=1e-5)
    assert {storage.phase for storage in program.payload.storages} == set(PHASES)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["mapped", "paged", "contiguous"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_streamed_bits_are_those_of_the_mapped_model(case, kind, engine, share):
    plan = planned(case, kind, share)
    assert plan.streamed_bytes
    with case[0].load(plan=plan, options=LoadOptions(engine=engine, poison=kind != "mapped")) as module:
        for _ in range(2):
            assert torch.equal(module(ROW), case[1])


@pytest.mark.parametrize("arena", ["mapped", "pooled", "contiguous", "paged"])
def test_so_are_those_of_any_arena_that_a_load_chooses(case, arena):
    program = case[0]
    for budget in (program.floor(arena=arena), program.weight_bytes):
        with program.load(
            max(budget, program.floor(arena=arena)), options=LoadOptions(arena=arena)
        ) as module:
            assert torch.equal(module(ROW), case[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_aligns_them_is_refused(case, engine):
    program = case[0]
    payload = program.payload
    flat = replace(payload, storages=tuple(replace(one, phase=0) for one in payload.storages))
    plan = planned((penstock.runtime.program.Program(program.path, flat), *case[1:]), "contiguous")
    verify_plan(payload.storages, payload.traces, plan)  # it is safe, and gives other bits
    with pytest.raises(penstock.PenstockError, match=r"storage \d+ .*plan it again"):
        program.load(plan=plan, options=LoadOptions(engine=engine))


def test_a_device_gets_aligned_copies(case):
    program, _, copied = case
    plan = program.plan("60%", device="sim")
    assert {address % 64 for address in plan.addresses if address >= 0} == {0}
    with program.load(plan=plan, device="sim") as module:
        assert torch.equal(module(ROW), copied)

"""Compiling: values from the program, from files that are copied, and from files used in place."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.arena.kinds import cpu_arenas
from penstock.runtime.checkpoint.convert import convert
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.runtime.models import Counter, Stack, aligned
from tests.schedule.traces import machine


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Stack(width=128, blocks=2, tokens=50).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(model, tokens):
    return export(model, (tokens,))


@pytest.fixture
def checkpoint(model, tmp_path):
    """A checkpoint as the world writes them: tied names once, names of its own, aligned to 8 bytes."""
    values = {f"model.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    values["aaa.unused"] = torch.zeros(3)  # what comes first shifts all others off 64 bytes
    path = tmp_path / "checkpoint.safetensors"
    save_file(values, path)
    return path


def run(program, tokens, budget="60%", **options):
    with program.load(budget, **options) as module:
        return module(tokens)


def test_a_packed_file_is_a_valid_safetensors_file_in_order_of_first_use(exported, model, tmp_path):
    program = penstock.compile(exported, tmp_path / "a.penstock")
    packed = load_file(tmp_path / "a.penstock" / "weights.safetensors")
    for name, value in packed.items():
        if not name.startswith("__penstock_pad__"):
            assert torch.equal(value, model.state_dict()[name])
    used = [s for t in program.payload.traces for step in t.steps for s in step.reads]
    storages = [program.payload.storages[s] for s in dict.fromkeys(used)]
    small, large = (
        [s.extents[0].file_offset for s in storages if (s.nbytes >= 64 << 10) == is_large]
        for is_large in (False, True)
    )
    offsets = small + large
    assert len(small) > 1
    assert len(large) > 1
    assert offsets == sorted(offsets), "small ones first, both in order of first use"
    assert all(offset % 64 == 0 for offset in offsets)


@pytest.mark.parametrize("pack", [True, False])
def test_values_come_from_files_under_other_names(exported, model, tokens, checkpoint, tmp_path, *, pack):
    with torch.no_grad():
        expected = aligned(model)(tokens)
    program = penstock.compile(
        exported, tmp_path / "b.penstock", weights=checkpoint, rename=lambda fqn: f"model.{fqn}", pack=pack
    )
    assert (tmp_path / "b.penstock" / "weights.safetensors").exists() == pack
    for budget in (program.floor_bytes, "60%", "100%"):
        assert torch.equal(run(program, tokens, budget, poison=True), expected)
    assert program.verify() == program.weight_bytes


def test_a_checkpoint_is_mapped_where_it_lies_also_when_it_is_converted(
    exported, model, checkpoint, tmp_path, tokens
):
    program = penstock.compile(
        exported, tmp_path / "c.penstock", weights=checkpoint, rename=lambda n: f"model.{n}", pack=False
    )
    assert any(storage.phase for storage in program.payload.storages)
    assert program.arenas()[0] == "mapped"
    convert(checkpoint, tmp_path / "aligned.safetensors")
    program = penstock.compile(
        exported,
        tmp_path / "e.penstock",
        weights=tmp_path / "aligned.safetensors",
        rename=lambda n: f"model.{n}",
        pack=False,
    )
    plan = program.plan("100%", arena="mapped")
    with torch.no_grad(), program.load(plan=plan) as module:
        assert torch.equal(module(tokens), aligned(model)(tokens))
    assert "mapped" in program.arenas()


def test_a_checkpoint_in_place_that_changed_is_refused(exported, checkpoint, tmp_path):
    path = tmp_path / "d.penstock"
    penstock.compile(exported, path, weights=checkpoint, rename=lambda n: f"model.{n}", pack=False)
    os.utime(checkpoint, ns=(0, 0))
    with pytest.raises(penstock.SourceError, match="modification time"):
        penstock.open(path)


def test_the_shards_of_two_checkpoints_do_not_mix(exported, model, tmp_path):
    values = {k: v.clone() for k, v in model.state_dict().items()}
    for name in ("one", "two"):
        save_file(values, tmp_path / f"{name}.safetensors")
    both = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    with pytest.raises(penstock.SourceError, match="shards of one checkpoint"):
        penstock.compile(exported, tmp_path / "g.penstock", weights=both)


def test_an_output_that_exists_is_kept_unless_forced(exported, tmp_path, tokens):
    path = tmp_path / "h.penstock"
    penstock.compile(exported, path)
    before = (path / "payload.json").read_bytes()
    with pytest.raises(penstock.SourceError, match="--force"):
        penstock.compile(exported, path)
    assert (path / "payload.json").read_bytes() == before
    assert penstock.compile(exported, path, force=True).floor_bytes


def test_a_failed_compile_leaves_the_old_artifact(exported, tmp_path, monkeypatch):
    from penstock.runtime import artifact

    path = tmp_path / "i.penstock"
    penstock.compile(exported, path)
    before = sorted((p.name, p.stat().st_size) for p in path.iterdir())

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.eager, "save", fail)
    with pytest.raises(penstock.SourceError, match="No space left"):
        penstock.compile(exported, path, force=True)
    assert sorted((p.name, p.stat().st_size) for p in path.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["i.penstock"]


def test_a_disk_that_is_full_is_said_before_writing(exported, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 10, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(penstock.SourceError, match=r"needs .* bytes and 40960 are available"):
        penstock.compile(exported, tmp_path / "j.penstock")
    assert not list(tmp_path.iterdir())


def test_a_lowering_that_does_not_exist_is_refused(exported, tmp_path):
    with pytest.raises(penstock.PassError, match="no lowering 'tensorrt': choose 'eager' or 'inductor'"):
        penstock.compile(exported, tmp_path / "k.penstock", lowering="tensorrt")
    with pytest.raises(penstock.PassError, match="options= are Inductor's"):
        penstock.compile(exported, tmp_path / "k.penstock", options={})


def test_in_place_needs_the_files(exported, tmp_path):
    with pytest.raises(penstock.PassError, match="weights="):
        penstock.compile(exported, tmp_path / "l.penstock", pack=False)


# Weights of every kind.


def test_a_model_that_mutates_a_buffer(tmp_path):
    counter, x = Counter().eval(), torch.randn(2, 256)
    program = penstock.compile(export(counter, (x,)), tmp_path / "m.penstock")
    kinds = {w.fqn: program.payload.storages[w.parts[0].storage].kind for w in program.payload.weights}
    assert kinds == {"linear.weight": "streamable", "linear.bias": "streamable", "calls": "mutable"}
    with torch.no_grad(), program.load("100%") as whole, program.load(program.floor_bytes) as module:
        for _ in range(3):
            expected = counter(x)
            assert torch.equal(whole(x), expected)
            assert torch.equal(module(x), expected)
    with program.load("100%") as again, torch.no_grad():
        assert torch.equal(again(x), counter.linear(x)), "an artifact holds the buffer as it was compiled"


class Zoo(torch.nn.Module):
    """Weights of unusual kinds, each read for itself."""

    def __init__(self, precision=torch.complex64):
        super().__init__()
        filler = torch.arange(64 * 96, dtype=torch.float32).reshape(64, 96)
        self.transposed = torch.nn.Parameter((filler / 1000).t())
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("complex", torch.complex(filler, -filler).to(precision))
        self.register_buffer("float8", (filler / 6000).to(torch.float8_e4m3fn))
        self.register_buffer("integers", filler.to(torch.int32))
        self.register_buffer("flags", filler % 3 == 0)
        self.register_buffer(
            "fresh", torch.randn(8, generator=torch.Generator().manual_seed(0)), persistent=False
        )
        fused = torch.nn.Parameter(filler.clone() / 500)
        self.first, self.second = torch.nn.Parameter(fused[:32]), torch.nn.Parameter(fused[32:])

    def forward(self, x):
        x = x @ self.transposed
        x = x * self.flags.sum(1)[:64] + self.integers.sum(1)
        x = x + self.float8.to(torch.float32).sum(1) + self.complex.abs().float().sum(1)
        return (x @ torch.cat([self.first, self.second])).sum(1), self.empty.sum(), self.fresh * 2


@pytest.mark.parametrize("budget", ["floor", "70%", "100%"])
@pytest.mark.parametrize("precision", [torch.complex64, torch.complex128])
def test_weights_of_every_kind(tmp_path, budget, precision):
    zoo, x = Zoo(precision).eval(), torch.randn(3, 96)
    program = penstock.compile(export(zoo, (x,)), tmp_path / "zoo.penstock")
    parts = {w.fqn: w.parts[0] for w in program.payload.weights}
    assert parts["complex"].dtype == str(precision).removeprefix("torch.")
    assert program.verify() > 0
    with torch.no_grad():
        expected = aligned(zoo)(x)
    amount = program.floor_bytes if budget == "floor" else budget
    with program.load(amount, poison=True) as module:
        for _ in range(2):
            for got, wanted in zip(module(x), expected, strict=True):
                assert torch.equal(got, wanted)


def test_a_view_written_apart_in_a_checkpoint_is_found_again(tmp_path):
    zoo, x = Zoo().eval(), torch.randn(3, 96)
    exported = export(zoo, (x,))
    values = {k: v.contiguous().clone() for k, v in zoo.state_dict().items()}
    save_file(values, tmp_path / "zoo.safetensors")
    with pytest.raises(penstock.SourceError, match=r"weight transposed has strides \[1, 96\]"):
        penstock.compile(exported, tmp_path / "p.penstock", weights=tmp_path / "zoo.safetensors", pack=False)


# Files in place whose tensors are off 64 bytes: the bits are those of a model that is mapped from them.


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
    with case[0].load(plan=plan, engine=engine, poison=kind != "mapped") as module:
        for _ in range(2):
            assert torch.equal(module(ROW), case[1])


@pytest.mark.parametrize("arena", ["mapped", "contiguous", "paged"])
def test_so_are_those_of_any_arena_that_a_load_chooses(case, arena):
    program = case[0]
    for budget in (program.floor(arena=arena), program.weight_bytes):
        with program.load(max(budget, program.floor(arena=arena)), arena=arena) as module:
            assert torch.equal(module(ROW), case[1])
    with pytest.raises(TypeError, match=r"load takes no debug: LoadOptions has engine, readers, arena"):
        program.load("50%", debug=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_aligns_them_is_refused(case, engine):
    program = case[0]
    payload = program.payload
    flat = replace(payload, storages=tuple(replace(one, phase=0) for one in payload.storages))
    plan = planned((penstock.runtime.program.Program(program.path, flat), *case[1:]), "contiguous")
    verify_plan(payload.storages, payload.traces, plan)  # it is safe, and gives other bits
    with pytest.raises(penstock.PenstockError, match=r"storage \d+ .*plan it again"):
        program.load(plan=plan, engine=engine)


def test_a_device_gets_aligned_copies(case):
    program, _, copied = case
    plan = program.plan("60%", device="sim")
    assert {address % 64 for address in plan.addresses if address >= 0} == {0}
    with program.load(plan=plan, device="sim") as module:
        assert torch.equal(module(ROW), copied)

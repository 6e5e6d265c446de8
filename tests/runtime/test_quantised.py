"""Weights of several parts from export to outputs: packed, in place, streamed under every budget."""

import itertools
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import export
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

import penstock
from penstock import LoadOptions
from penstock.cli.inspect import artifact_tables
from penstock.schedule.facts.errors import PayloadError, SourceError
from tests.forked import run_forked
from tests.hunt import nightly_but
from tests.quantised_models import Hidden, Packed, Shown, linears, pack, quantise

x = torch.linspace(-1, 1, 3 * 256).reshape(3, 256)
KINDS = [Shown, Hidden]


@pytest.fixture(scope="module", params=nightly_but(KINDS[:1], KINDS), ids=lambda kind: kind.__name__)
def module(request):
    return quantise(linears(), request.param)


@pytest.fixture(scope="module")
def exported(module):
    return export(module, (x,))


@pytest.fixture(scope="module")
def program(exported, tmp_path_factory):
    return penstock.compile(exported, tmp_path_factory.mktemp("quantised") / "a.penstock")


def parts_of(module):
    """Every tensor of the module by the name it has in penstock's files."""
    values = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Packed):
            values |= {f"{name}.data_": value.data_, f"{name}.scale": value.scale}
        else:
            values[name] = value
    return values


def expected(module):
    with torch.no_grad():
        return module(x)


def run(program, budget, **options):
    with program.load(budget, **options) as streamed:
        streamed(x)
        output = streamed(x)
        assert streamed.stats.misses == 0
        return output


@pytest.mark.parametrize("arena", [None, "contiguous", "paged", "mapped"])
@pytest.mark.parametrize("budget", ["floor", "50%", "100%"])
def test_outputs_are_those_of_the_quantised_module(program, module, arena, budget):
    least = program.floor(arena=arena)  # of a mapped arena one granule, more than half of this model
    nbytes = {"floor": least, "50%": max(least, program.weight_bytes // 2), "100%": "100%"}[budget]
    assert torch.equal(run(program, nbytes, options=LoadOptions(arena=arena, poison=True)), expected(module))


@pytest.mark.parametrize("budget", ["floor", "50%"])
def test_the_simulated_device_says_the_same(program, module, budget):
    nbytes = program.floor(device="sim") if budget == "floor" else budget
    assert torch.equal(run(program, nbytes, device="sim", options=LoadOptions(poison=True)), expected(module))


def test_packed_parts_lie_side_by_side_under_their_names(program, module):
    packed = load_file(program.path / "weights.safetensors")
    for name, value in parts_of(module).items():
        assert torch.equal(packed[name], value), name
    for weight in (w for w in program.payload.weights if len(w.parts) > 1):
        data, scale = (program.payload.storages[p.storage].extents[0] for p in weight.parts)
        assert scale.file_offset == data.file_offset + data.nbytes


def test_parts_are_on_the_device_together(program):
    """Between any two steps a plan holds the whole of a weight or nothing of it that it will read."""
    plan = program.plan(program.floor(arena="contiguous"), arena="contiguous")
    (trace,) = program.payload.traces
    for weight in (w for w in program.payload.weights if len(w.parts) > 1):
        one, other = ([s.name for s in trace.steps if p.storage in s.reads] for p in weight.parts)
        assert one == other
        assert len(one) == 2  # the data at the first, the scale at the second
    assert plan.streamed_bytes


def test_every_part_is_listed_under_its_name(program):
    tables = artifact_tables(program)
    names = [row[0] for _, _, rows in tables for row in rows]
    assert {"2.weight.data_", "2.weight.scale", "2.bias"} <= set(names)


def test_keeping_a_weight_keeps_its_parts(program):
    plan = program.plan("60%", keep=["2.weight"], arena="contiguous")
    weight = next(w for w in program.payload.weights if w.fqn == "2.weight")
    for part in weight.parts:
        start = plan.arena.layout[part.storage]
        stop = start + program.payload.storages[part.storage].nbytes
        inside = any(r.start <= start and stop <= r.stop for r in plan.resident)
        assert inside or part.storage in plan.outside, part.name


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("names", ["own", "torchao"])
def test_parts_come_from_a_checkpoint(exported, module, tmp_path, in_place, names):
    values = parts_of(quantise(linears(seed=1), type(module[0].weight)))
    if names == "torchao":
        values = {re.sub(r"weight\.(\w+)$", r"_weight_\1", name): value for name, value in values.items()}
    save_file(values, tmp_path / "parts.safetensors")
    program = penstock.compile(
        exported, tmp_path / "b.penstock", weights=tmp_path / "parts.safetensors", pack=not in_place
    )
    assert (program.path / "weights.safetensors").exists() is not in_place
    other = quantise(linears(seed=1), type(module[0].weight))
    for budget in ("40%", "100%"):
        assert torch.equal(run(program, budget), expected(other))


def test_a_packed_artifact_is_a_checkpoint_for_another(exported, module, program, tmp_path):
    again = penstock.compile(
        exported, tmp_path / "c.penstock", weights=program.path / "weights.safetensors", pack=False
    )
    assert torch.equal(
        run(again, again.floor(arena="mapped"), options=LoadOptions(arena="mapped")), expected(module)
    )


def test_rename_may_name_the_weight_or_the_part(exported, module, tmp_path):
    values = {f"model.{name}": value for name, value in parts_of(module).items()}
    values["odd"] = values.pop("model.2.weight.scale")
    save_file(values, tmp_path / "parts.safetensors")
    program = penstock.compile(
        exported,
        tmp_path / "d.penstock",
        weights=tmp_path / "parts.safetensors",
        rename=lambda name: "odd" if name == "2.weight.scale" else f"model.{name}",
    )
    assert torch.equal(run(program, "50%"), expected(module))


def test_a_bound_program_holds_parts_of_the_files(exported, module, tmp_path):
    other = quantise(linears(seed=1), type(module[0].weight))
    save_file(parts_of(other), tmp_path / "parts.safetensors")
    bound = penstock.bind(exported, tmp_path / "parts.safetensors")
    assert torch.equal(expected(bound.module()), expected(other))
    program = penstock.compile(bound, tmp_path / "e.penstock")
    assert [len(w.parts) for w in program.payload.weights if w.fqn == "0.weight"] == [2]
    assert torch.equal(run(program, "50%"), expected(other))


@pytest.mark.parametrize("pack_", [True, False])
def test_a_missing_scale_is_refused_by_name(exported, module, tmp_path, pack_):
    values = parts_of(module)
    del values["2.weight.scale"]
    save_file(values, tmp_path / "parts.safetensors")
    with pytest.raises(SourceError, match=r"1 of the program's weights are not in .*: 2\.weight\.scale;"):
        penstock.compile(
            exported, tmp_path / "f.penstock", weights=tmp_path / "parts.safetensors", pack=pack_
        )
    with pytest.raises(SourceError, match=r"2\.weight\.scale"):
        penstock.bind(exported, tmp_path / "parts.safetensors")


def test_a_scale_of_another_shape_is_refused_by_name(exported, module, tmp_path):
    values = parts_of(module)
    values["2.weight.scale"] = values["2.weight.scale"].reshape(-1)
    save_file(values, tmp_path / "parts.safetensors")
    with pytest.raises(SourceError, match=r"weight 2\.weight\.scale is float32 \[256, 1\] in the program"):
        penstock.compile(exported, tmp_path / "g.penstock", weights=tmp_path / "parts.safetensors")


def test_a_checkpoint_that_is_not_quantised_is_refused_by_name(exported, tmp_path):
    save_file(linears().state_dict(), tmp_path / "dense.safetensors")
    with pytest.raises(SourceError, match=r"0\.weight\.data_"):
        penstock.compile(exported, tmp_path / "h.penstock", weights=tmp_path / "dense.safetensors")


class Table(nn.Module):
    """A buffer of several parts: buffers may be missing in a checkpoint, but not by halves."""

    def __init__(self):
        super().__init__()
        dense = torch.linspace(-1, 1, 8 * 256).reshape(8, 256)
        self.register_buffer("table", pack(dense, Shown))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return nn.functional.linear(x, self.table, self.bias)


@pytest.fixture
def table(tmp_path):
    model = Table()
    values = {"bias": model.bias.detach(), "table.data_": model.table.data_, "table.scale": model.table.scale}
    return export(model, (x,)), values, tmp_path / "table.safetensors"


def test_half_of_a_buffer_is_refused_by_name(table, tmp_path):
    exported, values, path = table
    del values["table.scale"]
    save_file(values, path)
    for use in (
        lambda: penstock.compile(exported, tmp_path / "i.penstock", weights=path),
        lambda: penstock.bind(exported, path),
    ):
        with pytest.raises(SourceError, match=r"only some parts of weight table: table\.scale is missing"):
            use()


def test_a_buffer_that_no_file_has_keeps_its_own_values(table, tmp_path):
    exported, values, path = table
    save_file({"bias": values["bias"]}, path)
    program = penstock.compile(exported, tmp_path / "j.penstock", weights=path)
    assert torch.equal(run(program, "100%"), expected(Table()))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiler")
def test_compiled_programs_read_parts_together(module, exported, tmp_path):
    program = penstock.compile(exported, tmp_path / "k.penstock", lowering="inductor", resident_below=0)
    whole = run(program, "100%")
    torch.testing.assert_close(whole, expected(module))
    (trace,) = program.payload.traces
    for weight in (w for w in program.payload.weights if len(w.parts) > 1):
        storages = {part.storage for part in weight.parts}
        assert all(storages & set(step.reads) in (set(), storages) for step in trace.steps), weight.fqn
    for budget in (program.floor(), "50%"):
        assert torch.equal(run(program, budget), whole)


# torchao's quantised modules: the outputs are the library's own, under every budget.


# Without set_inductor_config=False each would change options of Inductor for the whole process.
CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(set_inductor_config=False),
    "int8 activations": lambda: Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "float8": lambda: Float8WeightOnlyConfig(set_inductor_config=False),
    "int4 packed": lambda: PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False),
    "int4 in int8": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int2 by row": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerAxis(0)),
}
PARTS = {
    "int8": ["qdata", "scale", "zero_point"],
    "int8 activations": ["qdata", "scale", "zero_point"],
    "float8": ["qdata", "scale"],
    "int4 packed": ["qdata", "scale_and_zero"],
    "int4 in int8": ["qdata", "scale", "zero_point"],
    "int2 by row": ["qdata", "scale", "zero_point"],
}


def quantised(name, dtype, seed=0):
    module = linears(seed=seed).to(dtype)
    quantize_(module, CONFIGS[name]())
    return module


def inputs(dtype):
    return torch.linspace(-1, 1, 3 * 256).reshape(3, 256).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly_but(
        {("int8 activations", torch.float32), ("float8", torch.bfloat16), ("int4 packed", torch.bfloat16)},
        itertools.product(CONFIGS, (torch.float32, torch.bfloat16)),
    ),
)
def test_outputs_are_those_of_the_library(name, dtype, tmp_path):
    module, x = quantised(name, dtype), inputs(dtype)
    with torch.no_grad():
        expected = module(x)
    dense = linears().to(dtype)
    assert not torch.equal(expected, dense(x)), "nothing was quantised"
    program = penstock.compile(export(module, (x,)), tmp_path / "a.penstock")
    weight = next(w for w in program.payload.weights if w.fqn == "0.weight")
    assert [part.name for part in weight.parts] == PARTS[name]
    assert program.weight_bytes < sum(p.nbytes for p in dense.parameters())
    for arena in ("contiguous", "paged"):
        for budget in (program.floor(arena=arena), "50%", "100%"):
            with program.load(budget, options=LoadOptions(arena=arena, poison=True)) as streamed:
                assert torch.equal(streamed(x), expected), (arena, budget)
                assert torch.equal(streamed(x), expected), (arena, budget)
                assert streamed.stats.misses == 0
                assert budget == "100%" or streamed.stats.bytes_moved


def test_a_zero_point_that_no_kernel_reads_is_kept_in_the_file_and_costs_nothing(tmp_path):
    module, x = quantised("int8", torch.float32), inputs(torch.float32)
    program = penstock.compile(export(module, (x,)), tmp_path / "a.penstock")
    unread = {p.storage for w in program.payload.weights for p in w.parts if p.name == "zero_point"}
    assert not unread & {s for step in program.payload.traces[0].steps for s in step.reads}
    assert all(program.payload.storages[s].extents for s in unread)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_files_that_torchao_writes_are_used_as_they_are(in_place, tmp_path):
    x = inputs(torch.float32)
    module, other = quantised("int8", torch.float32), quantised("int8", torch.float32, seed=1)
    state = {name: value.data for name, value in other.state_dict().items()}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    exported = export(module, (x,))
    program = penstock.compile(
        exported, tmp_path / "b.penstock", weights=tmp_path / "model.safetensors", pack=not in_place
    )
    with program.load("50%") as streamed, torch.no_grad():
        assert torch.equal(streamed(x), other(x))


def test_operators_of_a_library_that_is_not_imported_are_said(tmp_path):
    module, x = quantised("int4 in int8", torch.float32), inputs(torch.float32)
    penstock.compile(export(module, (x,)), tmp_path / "f.penstock")
    assert "import the library" in load_elsewhere(tmp_path / "f.penstock")
    assert load_elsewhere(tmp_path / "f.penstock", first="import torchao") == "loaded"


def load_elsewhere(path, first=""):
    """What a process of its own says when it loads an artifact."""
    script = f"""
{first}
import penstock
try:
    penstock.open({str(path)!r}).load("100%").close()
    print("loaded")
except penstock.{PayloadError.__name__} as error:
    print(error)
"""
    done = run_forked(script, warnings="ignore")
    assert done.status == 0, done.err
    return done.out.strip()

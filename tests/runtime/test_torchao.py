"""torchao's quantised modules: the outputs are the library's own, under every budget."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
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
from penstock.schedule.facts.errors import PayloadError
from tests.forked import run_forked
from tests.hunt import nightly_but
from tests.quantised_models import linears

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

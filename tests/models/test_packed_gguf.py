"""Linears of GGUF blocks: exported, streamed, and the outputs still those of diffusers."""

import gguf
import numpy as np
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from safetensors.torch import save_file
from torch import nn
from torch.export import export

import penstock
from penstock.schedule.facts.errors import PassError
from tests.hunt import nightly_but

x = torch.linspace(-1, 1, 3 * 256).reshape(3, 256)


def blocks(rows, columns, seed, kind):
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5
    kind = gguf.GGMLQuantizationType[kind]
    packed = np.ascontiguousarray(gguf.quants.quantize(dense.numpy(), kind))
    return GGUFParameter(torch.from_numpy(packed), quant_type=kind)


def linears(kind, dtype=torch.float32):
    modules = []
    for seed, (columns, rows) in enumerate([(256, 512), (512, 256)] * 2):
        linear = GGUFLinear(columns, rows, bias=seed != 1, compute_dtype=dtype)
        linear.weight = blocks(rows, columns, seed, kind)
        if linear.bias is not None:
            linear.bias.data = torch.linspace(-1, 1, rows)
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules).eval().requires_grad_(False)


KINDS = (("Q8_0", torch.float32), ("Q4_0", torch.float32), ("Q5_1", torch.bfloat16), ("Q4_1", torch.float32))
CASES = [(*kind, strict) for kind in KINDS for strict in (False, True)]


@pytest.mark.parametrize(("kind", "dtype", "strict"), nightly_but([CASES[1], CASES[4]], CASES))
def test_outputs_are_those_of_diffusers(kind, dtype, strict, tmp_path):
    module, given = linears(kind, dtype), x.to(dtype)
    expected = module(given)
    unpacked = penstock.unpack_gguf(module)
    assert unpacked is module
    assert torch.equal(module(given), expected)
    program = penstock.compile(export(module, (given,), strict=strict), tmp_path / "a.penstock")
    dense = sum(256 * 512 * dtype.itemsize for _ in range(4))
    assert program.weight_bytes < dense / 1.8
    for budget in (program.floor_bytes, "50%", "100%"):
        with program.load(budget) as streamed:
            assert torch.equal(streamed(given), expected), budget


def test_the_bytes_may_come_from_a_checkpoint(tmp_path):
    module = penstock.unpack_gguf(linears("Q8_0"))
    save_file(module.state_dict(), tmp_path / "blocks.safetensors")
    assert "0.weight" in module.state_dict()
    program = penstock.compile(
        export(module, (x,)), tmp_path / "b.penstock", weights=tmp_path / "blocks.safetensors", pack=False
    )
    with program.load("50%") as streamed:
        assert torch.equal(streamed(x), module(x))


def test_blocks_outside_of_linears_are_refused_by_name_and_nothing_is_replaced():
    module = linears("Q8_0")
    module.add_module("table", nn.Module())
    module.table.rows = blocks(8, 256, 0, "Q8_0")
    with pytest.raises(PassError, match=r"'table\.rows' is a GGUFParameter of a Module.*dequantise"):
        penstock.unpack_gguf(module)
    assert isinstance(module[0], GGUFLinear)


def test_a_module_without_blocks_is_refused():
    with pytest.raises(PassError, match="no GGUF linears"):
        penstock.unpack_gguf(nn.Linear(4, 4))


def test_a_linear_by_itself_is_refused():
    with pytest.raises(PassError, match="give the module that holds it"):
        penstock.unpack_gguf(linears("Q8_0")[0])


def test_without_it_torch_cannot_export():
    """When this fails, torch or diffusers have learned it, and the function can go."""
    with pytest.raises(RuntimeError, match="same reduction dim"):
        export(linears("Q8_0"), (x,))

"""Products of groups of rows are traced in every dtype in which a CPU computes them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.passes.graph.propagation import groups_of_any_dtype


class Experts(nn.Module):
    """Three experts, each for two of six rows."""

    def __init__(self, dtype, width):
        super().__init__()
        self.experts = nn.Parameter(torch.empty(3, width, 16, dtype=dtype), requires_grad=False)

    def forward(self, x, ends):
        return torch.nn.functional.grouped_mm(x, self.experts.transpose(-1, -2), offs=ends)


def operands(dtype):
    torch.manual_seed(0)
    return torch.randn(6, 16).to(dtype), torch.tensor([2, 4, 6], dtype=torch.int32)


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_fake_product_looks_like_a_real_one(dtype, width):
    model = Experts(dtype, width)
    real = model(*operands(dtype))
    with FakeTensorMode(allow_non_fake_inputs=True), groups_of_any_dtype():
        fake = model(*operands(dtype))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_experts_in_float32_are_exported_and_stream(tmp_path):
    model = Experts(torch.float32, 16)
    nn.init.normal_(model.experts)
    inputs = operands(torch.float32)
    exported = penstock.fake_export(lambda: Experts(torch.float32, 16), inputs)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    bound = penstock.bind(exported, tmp_path / "weights.pt")
    program = penstock.compile(bound, tmp_path / "experts.penstock")
    with program.load(program.floor_bytes) as module:
        assert torch.equal(module(*inputs), model(*inputs))

"""Operators whose C++ code calls others, which fails on fakes: compiled and streamed like any other."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

import penstock
from penstock import LoadOptions

WIDTH = 16


class Weighted(nn.Module):
    def __init__(self, compute, weight):
        super().__init__()
        self.weight, self.compute = nn.Parameter(weight), compute

    def forward(self, x):
        return self.compute(x, self.weight)


def bilinear(x, weight):
    return functional.bilinear(x, x[..., :4].contiguous(), weight)


def waves(x, weight):
    return torch.fft.irfft(torch.fft.rfft(x) * weight, n=WIDTH)


def windowed(x, weight):
    found = torch.stft((x @ weight).flatten(1).repeat(1, 8), WIDTH, return_complex=True)
    return torch.istft(found, WIDTH)


MEMBERS = {
    "bilinear": (bilinear, (WIDTH, WIDTH, 4), torch.float32),
    "irfft": (waves, (WIDTH // 2 + 1,), torch.complex64),
    "istft": (windowed, (WIDTH, WIDTH), torch.float32),
}


@pytest.mark.filterwarnings("ignore:A window was not provided:UserWarning")
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_it_is_streamed_with_its_own_bits(name, dynamic, tmp_path):
    compute, shape, dtype = MEMBERS[name]
    torch.manual_seed(0)
    model = Weighted(compute, torch.randn(shape, dtype=dtype)).eval()
    x = torch.randn(2, 7, WIDTH)
    sizes = {0: Dim.AUTO, 1: Dim.AUTO} if dynamic else None
    exported = torch.export.export(copy.deepcopy(model), (x,), dynamic_shapes=(sizes,))
    program = penstock.compile(exported, tmp_path / "m.penstock")
    calls = [x, torch.randn(3, 9, WIDTH)] if dynamic and name == "bilinear" else [x]
    with program.load(program.floor_bytes, options=LoadOptions(poison=True)) as module, torch.no_grad():
        for given in calls:
            assert torch.equal(module(given), model(given))
        assert module.stats.misses == 0

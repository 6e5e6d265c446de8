"""Attention that is written by hand, compiled for ExecuTorch: Inductor takes a divisor for a number."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.export import export

pytest.importorskip("executorch", reason="executorch is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
    from tests.backends.executorch.delegate.pte_models import WIDTH, write_files
    from tests.backends.executorch.delegate.pte_runs import Call, Program, Runner
from tests.engines import built
from tests.hunt import nightly_but

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # ExecuTorch's own

HEADS = 4


class Attention(nn.Module):
    dtype = torch.float32

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, dtype=self.dtype) for _ in range(3))

    def forward(self, x, mask):
        x, mask = x.to(self.dtype), mask.to(self.dtype)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        values = self.weights(q @ k.transpose(-1, -2), mask) @ v
        return values.transpose(1, 2).flatten(2).float()

    def weights(self, scores, mask):
        return (scores / math.sqrt(WIDTH // HEADS) + mask).softmax(-1)


class Shifted(Attention):
    def weights(self, scores, mask):
        return ((scores - 0.5) * 0.3 + 1.5 * mask).softmax(-1)


class Kept(Attention):
    """Divides by a tensor that it keeps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def weights(self, scores, mask):
        return (scores / self.scale + mask).softmax(-1)


class Computed(Attention):
    """Divides by a tensor that it computes."""

    def weights(self, scores, mask):
        return (scores / torch.sqrt(torch.tensor(16.0)) + mask).softmax(-1)


class PerHead(Kept):
    """Divides by a tensor with an element for each head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))


class Half(Attention):
    """Divides numbers of 16 bits, and keeps the weights in 32."""

    dtype = torch.bfloat16

    def weights(self, scores, mask):
        scores = scores / math.sqrt(WIDTH // HEADS) + mask
        return scores.float().softmax(-1).to(self.dtype)


@pytest.fixture
def runner(tmp_path):
    folder = built("executorch/run_pte", "build-delegate").parent
    return Runner(folder / "run_pte", folder / "libpenstock_executorch.so", tmp_path)


KINDS = [Attention, Shifted, Kept, Computed, PerHead, Half]


@pytest.mark.parametrize("kind", nightly_but([Attention, PerHead], KINDS))
def test_its_outputs_are_those_of_the_model(runner, tmp_path, kind):
    model = kind().eval()
    given = torch.randn(1, 6, WIDTH), torch.randn(6, 6)
    files = write_files(tmp_path / "attention", {"forward": export(model, given)}, kernels="aotinductor")
    (answer,) = runner([Program(files)], [Call(given)])
    assert answer.error == "Error::Ok"
    close = {} if kind.dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(answer.outputs[0], model(*given), **close)

"""Attention that is written by hand: Inductor takes its scale for a number; ExecuTorch makes it a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from tests.backends.executorch.delegate.pte_models import WIDTH, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program, Runner

pytestmark = pytest.mark.timeout(300)

HEADS = 4

WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided, with a mask": lambda scores, mask: (scores / math.sqrt(WIDTH // HEADS) + mask).softmax(-1),
    "shifted": lambda scores, mask: ((scores - 0.5) * 0.3 + 1.5 * mask).softmax(-1),
}


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = WEIGHTS[self.how](q @ k.transpose(-1, -2), mask)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", WEIGHTS)
def test_its_outputs_are_those_of_the_model(runner: Runner, tmp_path: Path, how: str) -> None:
    model = Attention(how).eval()
    given = torch.randn(1, 6, WIDTH), torch.randn(6, 6)
    files = write_files(tmp_path / "attention", {"forward": export(model, given)}, kernels="aotinductor")
    (answer,) = runner([Program(files)], [Call(given)])
    assert answer.error == "Error::Ok"
    torch.testing.assert_close(answer.outputs[0], model(*given))

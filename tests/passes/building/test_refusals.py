"""What is said of models that do not export: the line, and what to try."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.passes.building.refusals import caller

X = torch.ones(2, 4)


class Applies(nn.Module):
    """A function on a tensor and a weight."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def branches(x):
    return x if x.sum() > 0 else -x


def reads_a_value(x):
    return x * (2 if x.sum().item() > 0 else 3)


def leaves_torch(x):
    return torch.from_numpy(np.sin(x.detach().numpy()))


def has_another_shape(x):
    return x @ torch.ones(5, 5)


@torch.library.custom_op("penstock_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def uses_an_operator(x):
    return unknown(x)


REMEDIES = {
    branches: "torch.where or torch.cond",
    reads_a_value: "torch.where or torch.cond",
    leaves_torch: "write this line with torch's operators alone",
    has_another_shape: "call the model in memory like this",
    uses_an_operator: "register a fake of it",
}


@pytest.mark.parametrize(("function", "message"), REMEDIES.items())
def test_a_model_that_does_not_export_says_where_and_what_to_try(function, message):
    with pytest.raises(penstock.PassError, match=message) as caught:
        penstock.fake_export(lambda: Applies(function), (X,))
    assert "test_refusals.py:" in str(caught.value)


def test_a_file_whose_folder_is_called_nearly_as_torchs_is_the_users():
    file = Path(torch.__file__).parent.with_name("torchmodels") / "net.py"
    names = {"caller": caller}
    exec(compile("def build():\n    return caller()", file, "exec"), names)
    assert names["build"]().startswith(f" at {file}:2, in build")

"""Values that Inductor copies into the code are the checkpoint's, whatever the program had, or had none."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock

pytestmark = pytest.mark.timeout(300)
X = torch.ones(2, 64)


class Scaled(nn.Module):
    """A linear, a scalar, and a vector short enough to be copied."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x):
        return self.linear(x)[:, :3] * self.scale + self.shift


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.usefixtures("compiler")
def test_what_is_copied_into_the_code_is_the_checkpoints(fake, tmp_path):
    torch.manual_seed(0)
    other, model = Scaled().eval(), Scaled().eval()
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    exported = penstock.fake_export(Scaled, (X,)) if fake else torch.export.export(other, (X,))

    program = penstock.compile(
        exported,
        tmp_path / "model.penstock",
        weights=tmp_path / "model.safetensors",
        rename=lambda fqn: f"model.{fqn}",
        lowering="inductor",
        resident_below="1KiB",
    )

    kinds = {w.fqn: program.payload.storages[w.parts[0].storage].kind for w in program.payload.weights}
    assert kinds["scale"] == "inlined", "the test is about such weights"
    with torch.no_grad(), program.load("100%") as module:
        torch.testing.assert_close(module(X), model(X))

"""Programs that torch has made in other ways than by `torch.export.export` alone."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

import penstock
from tests.hunt import nightly_but

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Solved(nn.Module):
    """Solves equations, in which torch checks for errors in an operator of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), torch.tensor([2.0])

    def forward(self, x):
        y = self.layer(x)
        matrix = y.T @ y + 16 * torch.eye(16)
        return torch.linalg.solve(matrix, x.T * self.scale), torch.linalg.inv(matrix)


class Branching(Solved):
    """Solves in the body of control flow."""

    def forward(self, x):
        def solved(y):
            return torch.linalg.inv(y.T @ y + 16 * torch.eye(16))

        return torch.cond(x.shape[0] > 3, solved, lambda y: y.T @ y, (self.layer(x),))


class Sized(Solved):
    """Has results whose size the values of the input decide."""

    def forward(self, x):
        y = self.layer(x)
        return self.layer(y[torch.nonzero(y[:, 0] > 0).squeeze(1)]), torch.unique(y.round()).numel() * y


class Told(Solved):
    """Calls operators with effects: one that prints, and one that checks a value."""

    def forward(self, x):
        torch.ops.aten._print("told")
        torch._assert_async((x.abs() < 100).all(), "small")
        return (self.layer(x),)


EXPORTS = {
    "decomposed": lambda model: torch.export.export(model, (X,)).run_decompositions(),
    "functional": lambda model: torch.export.export(model, (X,)).run_decompositions({}),
    "drafted": lambda model: torch.export.draft_export(model, (X,)),
    "drafted, functional": lambda model: torch.export.draft_export(model, (X,)).run_decompositions({}),
    "drafted, decomposed": lambda model: torch.export.draft_export(model, (X,)).run_decompositions(),
    # torch itself drafts no control flow of any size
    "drafted for any number of rows": lambda model: torch.export.draft_export(
        model, (X,), dynamic_shapes=({0: Dim("rows", min=2, max=8)},)
    ),
}


CASES = [
    *((Solved, how) for how in EXPORTS),
    *((kind, how) for kind in (Branching, Sized, Told) for how in list(EXPORTS)[:-1]),
]
SAMPLE = [
    *((Solved, how) for how in EXPORTS),
    *((kind, how) for kind in (Branching, Sized, Told) for how in ("decomposed", "drafted")),
]


@pytest.fixture
def drafts():
    """Collects what drafts leave open: their logs, which torch never closes."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.mark.usefixtures("drafts")
@pytest.mark.filterwarnings("ignore")  # torch's own, of its drafts
@pytest.mark.parametrize(("kind", "how"), nightly_but(SAMPLE, CASES))
def test_outputs_are_those_of_the_program_itself(tmp_path, kind, how):
    torch.manual_seed(0)
    model = kind().eval()
    exported = EXPORTS[how](model)
    before = exported.graph_module.code, str(exported.graph_signature)
    expected = exported.module()(X)
    program = penstock.compile(exported, tmp_path / "model.penstock")
    with program.load(program.floor_bytes) as module:
        found = module(X)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.equal(one, other)
    assert (exported.graph_module.code, str(exported.graph_signature)) == before
    assert torch.equal(exported.module()(X)[0], expected[0])


def test_a_constant_without_values_is_called_one(tmp_path):
    exported = torch.export.export(Solved().eval(), (X,))
    with FakeTensorMode() as mode:
        exported.constants["scale"] = mode.from_tensor(exported.constants["scale"])
    with pytest.raises(
        penstock.PassError, match=r"constant 'scale' of the program has no values .*: export again"
    ):
        penstock.compile(exported, tmp_path / "model.penstock")

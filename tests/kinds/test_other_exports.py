"""Programs that torch makes in other ways, that fail on fakes, or that read storages by offsets."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.nn import functional

import penstock
from penstock import LoadOptions
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


SIDE = 64


class Strided(nn.Module):
    """Reads weights, views of weights and a buffer by offsets in their storages, behind another weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(SIDE, SIDE)
        self.both = nn.Parameter(torch.randn(2 * SIDE, SIDE), requires_grad=False)
        self.lower = nn.Parameter(self.both.detach()[SIDE:], requires_grad=False)
        self.alone = nn.Parameter(torch.randn(2, SIDE, SIDE)[1], requires_grad=False)
        self.register_buffer("state", torch.zeros(3 * SIDE))

    def forward(self, x):
        x = self.first(x)
        x = x @ self.both.as_strided((SIDE, SIDE), (1, SIDE), 3)
        x = x @ self.lower.as_strided((SIDE, SIDE), (SIDE, 1), SIDE)
        x = x @ self.alone.t().as_strided((SIDE, SIDE), (1, SIDE), SIDE * SIDE // 2)
        self.state.as_strided((SIDE,), (1,), 5).add_(x.mean(0))
        return x / SIDE + self.state[:SIDE]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("strided") / "m.penstock"
    return penstock.compile(torch.export.export(Strided().eval(), (torch.randn(5, SIDE),)), path)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("place", ["sim", "paged", "contiguous"])
def test_the_bytes_are_those_of_the_module(place, share, program):
    x, reference = torch.randn(5, SIDE), Strided().eval()  # a copy would have a storage for each parameter
    where = {"device": "sim", "hardware": "laptop"} if place == "sim" else {"arena": place}
    floor = program.floor(where.get("device", "cpu"), where.get("arena"))
    plan = program.plan(max(floor, int(program.weight_bytes * share)), **where)
    with (
        program.load(
            plan=plan, device=where.get("device", "cpu"), options=LoadOptions(poison=True)
        ) as module,
        torch.no_grad(),
    ):
        for _ in range(3):
            assert torch.equal(module(x), reference(x))


def test_a_view_that_outlives_a_module_on_a_device_has_its_memory(program):
    """Not the weights any longer, but nobody else's bytes."""
    module = program.load(budget="50%", device="sim", options=LoadOptions(poison=True))
    kept = dict(module._weights.tensors)
    module.close()
    del module
    taken = [torch.full((SIDE, SIDE), 7.0) for _ in range(64)]
    for tensor in kept.values():
        assert not (tensor == 7.0).any()
    assert taken

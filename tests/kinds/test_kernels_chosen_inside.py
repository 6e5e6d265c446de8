"""Kernels, dtypes and transforms that a forward chooses for a while: they hold in a streamed model."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock import LoadOptions
from penstock.integrations import apply
from tests.hunt import nightly_but
from tests.integrations import models

# torch's own, of backends.mkldnn.flags
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")

POISONED = LoadOptions(arena="contiguous", poison=True)


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.way = way

    def forward(self, x):
        with self.way():
            q, k, v = (part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.o(mixed) * torch.tensor(0.1)


@contextmanager
def wide():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


WAYS = {
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": wide,
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
}
DIFFER = ("sdpa_kernel", "autocast")


def made(way):
    torch.manual_seed(0)
    return models.frozen(nn.Sequential(*(Attention(way) for _ in range(3))))


X = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", DIFFER)
def test_the_choice_matters(name):
    with torch.no_grad():
        assert not torch.equal(made(WAYS[name])(X), made(nullcontext)(X))


AROUND = {"alone": nullcontext, "within autocast": WAYS["autocast"]}
CASES = [(name, around) for name in WAYS for around in AROUND]
SAMPLE = [("autocast off", "within autocast"), *((name, "alone") for name in WAYS)]


@pytest.mark.parametrize(("name", "around"), nightly_but(SAMPLE, CASES))
def test_it_holds_in_a_streamed_model(name, around, tmp_path):
    model, reference = made(WAYS[name]), made(WAYS[name])
    with torch.no_grad(), AROUND[around](), apply(model, "500KB", cache=tmp_path, options=POISONED):
        for x in (X, X, X[:1], X, X[:, :9], X):
            assert torch.equal(model(x), reference(x))


def test_a_backend_that_diffusers_sets_after_it_is_applied(tmp_path):
    model = models.frozen(models.unet())
    reference = models.twin(model)
    given = torch.randn(1, 4, 8, 8), 5, torch.randn(1, 5, 32)
    with torch.no_grad(), apply(model, "4MB", cache=tmp_path):
        for backend in ("native", "_native_math", "native"):
            for one in (model, reference):
                one.set_attention_backend(backend)
            for _ in range(2):
                assert torch.equal(model(*given).sample, reference(*given).sample)


class Transforms(nn.Module):
    """Layers, of which `run` computes something with a transform of functorch."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.run, self.weight = run, nn.Parameter(torch.randn(64, 64) / 8)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.run(self, x)


def ensemble(model, x):
    weights, buffers = torch.func.stack_module_state(list(model.layers))

    def call(weight, buffer):
        return torch.func.functional_call(model.layers[0], (weight, buffer), (x,))

    return torch.vmap(call)(weights, buffers).sum(0)


TRANSFORMS = {
    "vmap over rows": lambda model, x: torch.vmap(lambda row: row @ model.weight)(x),
    "vmap of a layer": lambda model, x: torch.vmap(model.layers[1])(x),
    "vmap over a weight": lambda model, x: x + torch.vmap(lambda row: row.sum())(model.layers[2].weight),
    "an ensemble": ensemble,
    "grad of an input": lambda model, x: torch.func.grad(lambda y: model.layers[0](y).sum())(x),
    "grad of a weight": lambda model, x: (
        x @ torch.func.grad(lambda w: functional.linear(x, w).square().sum())(model.layers[3].weight)
    ),
    "jacrev and jacfwd": lambda model, x: (
        torch.func.jacrev(model.layers[0])(x[0]) + torch.func.jacfwd(model.layers[1])(x[0])
    ),
    "jvp": lambda model, x: torch.func.jvp(model.layers[2], (x,), (torch.ones_like(x),))[1],
    "functional_call": lambda model, x: torch.func.functional_call(
        model.layers[1], {"weight": model.weight * 0.5}, (x,)
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of jvp
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_run_within_a_forward(name, tmp_path):
    model, reference = (models.frozen(Transforms(TRANSFORMS[name])) for _ in range(2))
    x = X[0, :6]
    with torch.no_grad(), apply(model, "150KB", cache=tmp_path, options=POISONED):
        for given in (x, x, x[:2], x):
            expected = reference(given)  # first, as it imports much
            assert torch.equal(model(given), expected)
    assert torch.vmap(lambda row: row + 1)(x).shape == x.shape
    assert torch._C._functorch.maybe_current_level() is None

"""Forwards that do with modules and weights what nobody expects compute what they compute in memory."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import BudgetError
from tests.hunt import nightly_but
from tests.integrations import models

POISONED = LoadOptions(arena="contiguous", poison=True)
WIDTH = 64


class Model(nn.Module):
    """Layers that are called one after another, and `odd`, which is called with the model afterwards."""

    def __init__(self, odd):
        super().__init__()
        torch.manual_seed(0)
        self.odd = odd
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.again, self.spare = self.layers[1], nn.Linear(WIDTH, WIDTH)
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4))
        self.dict = nn.ParameterDict({f"w{k}": torch.randn(WIDTH, WIDTH) / 8 for k in range(4)})

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.odd(self, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()


def swaps(model, x):
    model.spare, model.layers[5] = model.layers[5], model.spare
    return model.spare(x) + model.layers[5](x)


def takes_out(model, x):
    layer = model.layers[2]
    del model.layers[2]
    x = model.layers[2](x)
    model.layers.insert(2, layer)
    return layer(x)


def puts_in(model, x):
    own, model.spare = model.spare, nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(model.spare.weight, 0.01)
    nn.init.zeros_(model.spare.bias)
    x = model.spare(x)
    model.spare = own
    return own(x)


def hooks_for_a_moment(model, x):
    def scale(layer, _, out):
        return out * layer.weight.mean() + model.spare.weight.sum()

    hook = model.layers[0].register_forward_hook(scale)
    try:
        return model.layers[0](x)
    finally:
        hook.remove()


def chooses(model, x):
    for _ in range(3):
        k = int(x.sum().abs() * 7) % 4
        x = torch.tanh(x @ model.list[k]) + x @ model.dict[f"w{k * 3 % 4}"]
    return x


def yields(model, x):
    def steps(x):
        for layer in model.layers:
            x = layer(x)
            yield x

    left = model.__dict__.get("left")
    kept = next(left, x).sum() if left else 0
    model.__dict__["left"] = steps(x)
    return next(model.left) + kept


def calls_itself(model, x):
    depth = model.__dict__.setdefault("depth", [])
    if len(depth) == 2:
        return x
    depth.append(1)
    try:
        return model(x) + x
    finally:
        depth.pop()


def in_threads(model, x):
    def walk(rows):
        with torch.no_grad():
            for layer in model.layers:
                rows = torch.tanh(layer(rows))
        return rows

    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(walk, x.chunk(2))))


def as_arrays(model, x):
    array = model.spare.weight.numpy().sum(0) + numpy.asarray(model.layers[3].bias)
    return x + torch.from_numpy(array)


def checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(
        lambda y: functional.linear(y, model.spare.weight), x, use_reentrant=False
    )


def with_a_gradient(model, x):
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        return torch.autograd.grad(model.layers[0](given).square().sum(), given)[0]


ODD = {
    "it swaps its children": swaps,
    "it takes a child out": takes_out,
    "it puts a new child in": puts_in,
    "a child with two names": lambda model, x: model.again(x),
    "it hooks a child": hooks_for_a_moment,
    "values choose parameters of lists": chooses,
    "a generator is left open": yields,
    "it calls itself": calls_itself,
    "two threads call the same layers": in_threads,
    "it makes arrays of weights": as_arrays,
    "a function of autograd": lambda model, x: Product.apply(x, model.spare.weight),
    "a checkpoint": checkpointed,
    "a gradient of its input": with_a_gradient,
    "a copied part": lambda model, x: copy.deepcopy(model.spare)(x),
}


def rows(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def bytes_missing(name, memory, options, tmp_path):
    """Compare calls within `memory`; returns the bytes that a refusal names, None if there is none."""
    model, reference = (models.frozen(Model(ODD[name])) for _ in range(2))
    with torch.no_grad():
        try:
            with apply(model, memory, cache=tmp_path, options=options):
                for count in (6, 6, 2, 6, 4, 6):
                    expected = reference(rows(count))
                    assert torch.equal(model(rows(count)), expected)
        except BudgetError as error:
            return error.floor_bytes
        assert torch.equal(model(rows(6)), reference(rows(6)))
    return None


OPTIONS = {"poisoned": POISONED, "default": LoadOptions()}
CASES = [(name, options) for name in ODD for options in OPTIONS]
SAMPLE = [("values choose parameters of lists", "default"), *((name, "poisoned") for name in ODD)]


@pytest.mark.parametrize(("name", "options"), nightly_but(SAMPLE, CASES))
def test_it_computes_what_it_computes_in_memory(name, options, tmp_path):
    for first in (1 << 10, 200_000, 1_000_000):
        memory = first
        while (more := bytes_missing(name, memory, OPTIONS[options], tmp_path)) is not None:
            assert more > memory
            memory = more


class Scales(nn.Linear):
    """It gives its own weight other memory in each call, or writes to it."""

    way = "assigned"

    def forward(self, x):
        if self.way == "assigned":
            self.weight.data = self.weight.data * 0.5
        else:
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("way", ["assigned", "written"])
def test_what_a_layer_gives_its_own_weight_is_kept(way, tmp_path):
    def made():
        torch.manual_seed(0)
        model = models.frozen(nn.Sequential(*(Scales(WIDTH, WIDTH) for _ in range(4))))
        for layer in model:
            layer.way = way
        return model

    model, reference = made(), made()
    with torch.no_grad(), apply(model, "300KB", cache=tmp_path, options=POISONED):
        for count in (6, 6, 2, 6):
            assert torch.equal(model(rows(count)), reference(rows(count)))
    assert torch.equal(model[0].weight, reference[0].weight)


def test_a_parameter_that_is_assigned_between_calls_is_the_models(tmp_path):
    model, reference = (models.frozen(Model(lambda model, x: model.spare(x))) for _ in range(2))
    with torch.no_grad(), apply(model, "200KB", cache=tmp_path, options=POISONED):
        model(rows(6))
        other = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
        for one in (model, reference):
            one.layers[2].weight = other
        for count in (6, 2, 6):
            assert torch.equal(model(rows(count)), reference(rows(count)))
    assert model.layers[2].weight is other
    with torch.no_grad():
        assert torch.equal(model(rows(6)), reference(rows(6)))

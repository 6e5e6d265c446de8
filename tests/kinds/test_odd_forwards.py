"""Forwards that do what nobody expects with modules, weights and state compute what they do in memory."""

import copy
import ctypes
import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertForSequenceClassification, LlamaForSequenceClassification

from penstock import LoadOptions
from penstock.integrations import apply, load
from penstock.schedule.facts.errors import BudgetError, StreamError
from tests.hunt import nightly_but
from tests.integrations import models

pytestmark = [  # torch's own, of backends.mkldnn.flags and of jvp
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

POISONED = LoadOptions(arena="contiguous", poison=True)
WIDTH = 64


class Model(nn.Module):
    """Layers that are called one after another, and `odd`, which is called with the model afterwards.

    `within` is called with the fourth layer in its step, from call number `since` on.
    """

    def __init__(self, odd=lambda model, x: x, within=None, since=1):
        super().__init__()
        torch.manual_seed(0)
        self.odd = odd
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.again, self.spare, self.leaky = self.layers[1], nn.Linear(WIDTH, WIDTH), nn.LeakyReLU()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4))
        self.dict = nn.ParameterDict({f"w{k}": torch.randn(WIDTH, WIDTH) / 8 for k in range(4)})
        self.register_buffer("count", torch.zeros(4))
        self.attribute, self.log, self.numbers, self.calls = torch.zeros(4), [], itertools.count(1), 0
        self.generator, self.own = numpy.random.default_rng(3), torch.Generator().manual_seed(3)
        if within is not None:
            forward = self.layers[3].forward
            layer = self.layers[3]
            layer.forward = lambda x: (forward(x), self.calls < since or within(layer))[0]

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.odd(self, x)


def rows(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


# What it does with modules and weights.


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


def with_a_tangent(model, x):
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(model.spare.weight.detach(), model.layers[0].weight)
        return sum(torch.autograd.forward_ad.unpack_dual(functional.linear(x, weight)))


def shallow(model, x):
    leaky = copy.copy(model.leaky)
    leaky.negative_slope = 3.0
    return nn.Sequential(copy.copy(model.spare), leaky)(x) + model.leaky(x)


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
    "a tangent of a weight": with_a_tangent,
    "a copied part": lambda model, x: copy.deepcopy(model.spare)(x),
    "shallow copies": shallow,
}


def ensemble(model, x):
    weights, buffers = torch.func.stack_module_state(list(model.layers))

    def call(weight, buffer):
        return torch.func.functional_call(model.layers[0], (weight, buffer), (x,))

    return torch.vmap(call)(weights, buffers).sum(0)


TRANSFORMS = {
    "vmap over rows": lambda model, x: torch.vmap(lambda row: row @ model.list[0])(x),
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
        model.layers[1], {"weight": model.list[0] * 0.5}, (x,)
    ),
}


# What it remembers, makes once and draws.


def in_a_closure():
    kept = torch.zeros(4)
    return Model(lambda model, x: x + kept.add_(1).mean())


def in_a_list(model, x):
    model.log.append(float(x[0, 0]))
    return x + sum(model.log)


def in_another_buffer(model, x):
    model.count = model.count + len(x)
    return x + model.count.mean()


def once(model, x):
    if not hasattr(model, "steps"):
        model.steps = torch.arange(WIDTH) / 7
    return x + model.steps


def once_a_size(model, x):
    tables = model.__dict__.setdefault("tables", {})
    if len(x) not in tables:
        tables[len(x)] = torch.arange(WIDTH) / len(x)
    return x + tables[len(x)]


def once_as_a_buffer(model, x):
    if "late" not in model._buffers:
        model.register_buffer("late", x[:1].clone(), persistent=False)
    return x + model.late


def once_of_a_weight(model, x):
    if not hasattr(model, "scaled"):
        model.scaled = model.spare.weight * 0.5
    return x @ model.scaled


@functools.cache
def table(width):
    return torch.arange(width) / 7


STATE = {
    "a buffer": lambda model, x: x + model.count.add_(1).mean(),
    "a tensor of its own": lambda model, x: x + model.attribute.add_(1).mean(),
    "a list": in_a_list,
    "a counter": lambda model, x: x + next(model.numbers),
    "a buffer in place of another": in_another_buffer,
    "made at the first call": once,
    "made at the first call of a size": once_a_size,
    "a buffer made at the first call": once_as_a_buffer,
    "made of a weight": once_of_a_weight,
    "a cached function": lambda model, x: x + table(WIDTH),
    "numbers of torch": lambda model, x: x + torch.rand(WIDTH),
    "numbers of numpy": lambda model, x: x + float(numpy.random.rand()),
    "numbers of Python": lambda model, x: x + random.random(),
    "numbers of a generator of numpy": lambda model, x: x + float(model.generator.random()),
    "numbers of a generator of torch": lambda model, x: x + torch.rand(WIDTH, generator=model.own),
}


def seed():
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)


# Kernels and dtypes that it chooses for a while.


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
    "autocast off": lambda: torch.autocast("cpu", enabled=False),  # within autocast
    "default dtype": wide,
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
}


def attends(way):
    def odd(model, x):
        x = x.float()  # which autocast around the model would have in bfloat16
        with way():
            q, k, v = (part(x)[None].unflatten(-1, (4, 16)).transpose(1, 2) for part in model.layers[:3])
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return model.layers[3](mixed) * torch.tensor(0.1)

    return Model(odd)


@pytest.mark.parametrize("name", ["sdpa_kernel", "autocast"])
def test_the_choice_matters(name):
    with torch.no_grad():
        assert not torch.equal(attends(WAYS[name])(rows(40)), attends(nullcontext)(rows(40)))


# What it writes.


def moving_average(model):
    for mine, other in zip(model.layers[4].parameters(), model.layers[5].parameters(), strict=True):
        mine.mul_(0.9).add_(other * 0.1)


IN_ITS_STEP = {
    "in its step": lambda layer: layer.bias.add_(1),
    "through .data": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "by numpy": lambda layer: layer.bias.numpy()[::2].__iadd__(1),
    "as other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data * 0.5),
}
OUTSIDE = {
    "outside of its step": lambda model: model.layers[2].weight.mul_(0.5),
    "as out=": lambda model: torch.mul(model.layers[1].bias, 1.5, out=model.layers[1].bias),
    "an average": moving_average,
    "a large buffer": lambda model: model.large.mul_(1.5),
    "rows of a large buffer": lambda model: model.large.__setitem__(model.calls, 1.0),
}


def a_fused_step(weights):
    rates = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_(weights, [torch.ones_like(weight) for weight in weights], [], **rates, **flags)


def over_a_weight(register):
    """A model that writes to a weight through a tensor which it made over the memory of that weight."""
    model = Model(lambda model, x: model.spare(x + model.over.mul_(0.5).sum()))
    register(model, "over", model.spare.weight.detach()[:3])
    return model


def writing(write, since):
    """A model that writes from a call on, and reads a large buffer."""

    def odd(model, x):
        if model.calls >= since:
            write(model)
        return x + model.large.sum(0)[:WIDTH]

    model = Model(odd)
    model.register_buffer("large", torch.randn(512, 512))
    return model


FORWARDS = (
    {
        name: functools.partial(Model, odd)
        for name, odd in {
            **ODD,
            **TRANSFORMS,
            **{f"state: {key}": value for key, value in STATE.items()},
        }.items()
    }
    | {"state: a tensor of a closure": in_a_closure}
    | {name: functools.partial(attends, way) for name, way in WAYS.items()}
    | {f"written {name}": functools.partial(Model, within=write) for name, write in IN_ITS_STEP.items()}
    | {f"written {name}": functools.partial(writing, write, 1) for name, write in OUTSIDE.items()}
    | {f"written {name}, late": functools.partial(writing, write, 3) for name, write in OUTSIDE.items()}
    | {
        "written by a fused optimiser": lambda: writing(lambda m: a_fused_step([m.layers[2].weight]), 1),
        "written through a buffer": lambda: over_a_weight(nn.Module.register_buffer),
        "written through an attribute": lambda: over_a_weight(setattr),
    }
    | {
        f"written {name}, late": functools.partial(Model, within=IN_ITS_STEP[name], since=3)
        for name in IN_ITS_STEP
    }
)
"""What makes a model, by what its forward does."""


def bytes_missing(name, memory, options, tmp_path):
    """Compare calls within `memory`; returns the bytes that a refusal names, None if there is none."""
    model, reference = (models.frozen(FORWARDS[name]()) for _ in range(2))
    counts = (40, 40, 2, 40, 9, 40)
    around = WAYS["autocast"] if name == "autocast off" else nullcontext
    with torch.no_grad(), around():
        seed()
        expected = [reference(rows(count)) for count in (*counts, 40)]
        seed()
        try:
            with apply(model, memory, cache=tmp_path, options=options) as applied:
                for k, count in enumerate(counts):
                    assert torch.equal(model(rows(count)), expected[k])
                    if k in (1, 3):
                        applied.idle()
        except BudgetError as error:
            return error.floor_bytes
        assert torch.equal(model(rows(40)), expected[-1])
    for mine, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert torch._C._functorch.maybe_current_level() is None
    return None


OPTIONS = {"poisoned": POISONED, "default": LoadOptions()}
CASES = [(name, options) for name in FORWARDS for options in OPTIONS]
SAMPLE = [("values choose parameters of lists", "default"), ("written an average", "default")]


@pytest.mark.parametrize(
    ("name", "options"), nightly_but(lambda case: case[1] == "poisoned" or case in SAMPLE, CASES)
)
def test_it_computes_what_it_computes_in_memory(name, options, tmp_path):
    for first in (1 << 10, 300_000, 2_000_000) if name in ODD else (400_000 if "large" in name else 300_000,):
        memory = first
        while (more := bytes_missing(name, memory, OPTIONS[options], tmp_path)) is not None:
            assert more > memory
            memory = more


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


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.spare.weight.numpy().fill(0.5),
        lambda model: a_fused_step(list(model.spare.parameters())),
        lambda model: torch.utils.swap_tensors(model.spare.weight, model.layers[2].weight),
    ],
)
def test_what_writes_behind_versions_between_calls_counts_or_is_refused(write, tmp_path):
    model, reference = (models.frozen(Model(lambda model, x: model.spare(x))) for _ in range(2))
    with torch.no_grad(), apply(model, "200KB", cache=tmp_path, options=POISONED):
        for _ in range(2):
            assert torch.equal(model(rows(6)), reference(rows(6)))
        with suppress(RuntimeError):  # of torch, which exchanges no tensors then
            write(model)
            write(reference)
        for count in (6, 2, 6):
            assert torch.equal(model(rows(count)), reference(rows(count)))


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.numpy().fill(0.5),
        lambda weight: weight.data.zero_(),
        lambda weight: ctypes.memset(weight.data_ptr(), 0, 8),
        lambda weight: weight.set_(weight.detach() * 0.5),
    ],
)
def test_a_write_to_memory_that_goes_is_refused(write, tmp_path):
    model = models.frozen(Model(lambda model, x: (write(model.spare.weight), model.spare(x))))
    refused = pytest.raises(StreamError, match=r"writes spare\.weight|hand its memory")
    with torch.no_grad(), apply(model, "200KB", cache=tmp_path, options=POISONED), refused:
        model(rows(6))


TRAINED = [name for name in FORWARDS if "numbers" in name or "closure" in name]
SAMPLE_TRAINED = ["state: numbers of torch", "state: a tensor of a closure"]


@pytest.mark.parametrize("name", nightly_but(SAMPLE_TRAINED, TRAINED))
def test_state_goes_on_in_training(name, tmp_path):
    model, reference = (FORWARDS[name]().requires_grad_(False) for _ in range(2))

    def losses(one):
        one.layers[0].requires_grad_(True)
        seed()
        found = []
        for x in (rows(4), rows(4), rows(2), rows(4)):
            loss = one(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        return [*found, one.layers[0].weight.grad]

    expected = losses(reference)
    model.layers[0].requires_grad_(True)
    with apply(model, "1MB", train=True, cache=tmp_path):
        got = losses(model)
    assert all(torch.equal(*both) for both in zip(got, expected, strict=True))


# Forwards of libraries.


@pytest.mark.nightly
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


def autoencoder():
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    sizes = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return models.frozen(AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True]))


def test_an_autoencoder_makes_its_counters_at_its_first_call(tmp_path):
    latents = torch.randn(1, 16, 1, 2, 2, generator=torch.Generator().manual_seed(2))
    reference, model = autoencoder(), autoencoder()
    reference.save_pretrained(tmp_path / "m")
    with torch.no_grad():
        expected = reference.decode(latents).sample
        with apply(model, "30MB", cache=tmp_path / "c"), load(tmp_path / "m", "30MB") as loaded:
            for one in (model, loaded, model, loaded):
                assert torch.equal(one.decode(latents).sample, expected)


LABELS = {
    "single_label_classification": torch.tensor([0, 2, 1]),
    "multi_label_classification": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 1]]),
    "regression": torch.tensor([0.5, 2.0, -1.0]),
}
CLASSIFIERS = {"Llama": LlamaForSequenceClassification, "Bert": BertForSequenceClassification}
LABELLED = [(family, kind) for family in CLASSIFIERS for kind in LABELS]


@pytest.mark.parametrize(
    ("family", "kind"),
    nightly_but([("Llama", "regression"), ("Bert", "multi_label_classification")], LABELLED),
)
def test_a_classifier_sets_in_its_configuration_what_its_labels_tell(family, kind, tmp_path):
    family = CLASSIFIERS[family]

    def made():
        torch.manual_seed(0)
        count = 1 if kind == "regression" else 3
        return models.frozen(family(family.config_class(**models.SIZES, num_labels=count)))

    model, reference = made(), made()
    given = {"input_ids": torch.randint(3, 99, (3, 6)), "labels": LABELS[kind]}
    with torch.no_grad(), apply(model, "1MB", cache=tmp_path):
        for _ in range(2):
            for call in ({"input_ids": given["input_ids"]}, given):
                got, expected = model(**call), reference(**call)
                assert torch.equal(got.logits, expected.logits)
                assert "labels" not in call or torch.equal(got.loss, expected.loss)
    assert model.config.problem_type == reference.config.problem_type == kind

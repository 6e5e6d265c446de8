"""What a forward remembers, makes once, draws and sets goes on as in memory, whatever calls come between."""

import functools
import itertools
import random

import numpy
import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification, LlamaForSequenceClassification

from penstock.integrations import apply, load
from tests.hunt import nightly_but
from tests.integrations import models

WIDTH = 16


def rows(count, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Two layers, and between them a function of the model and of the input."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.compute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), compute
        self.register_buffer("count", torch.zeros(4))
        self.attribute, self.log, self.numbers = torch.zeros(4), [], itertools.count(1)
        self.generator = numpy.random.default_rng(3)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.second(self.first(x) + self.compute(self, x))


def in_a_closure():
    kept = torch.zeros(4)
    return lambda model, x: kept.add_(1).mean()


def in_a_list(model, x):
    model.log.append(float(x[0, 0]))
    return sum(model.log)


def in_another_buffer(model, x):
    model.count = model.count + len(x)
    return model.count.mean()


def once(model, x):
    if not hasattr(model, "steps"):
        model.steps = torch.arange(WIDTH) / 7
    return model.steps


def once_a_size(model, x):
    tables = model.__dict__.setdefault("tables", {})
    if len(x) not in tables:
        tables[len(x)] = torch.arange(WIDTH) / len(x)
    return tables[len(x)]


def once_as_a_buffer(model, x):
    if "late" not in model._buffers:
        model.register_buffer("late", x[:1].clone(), persistent=False)
    return model.late


def once_of_a_weight(model, x):
    if not hasattr(model, "scaled"):
        model.scaled = model.second.weight * 0.5
    return x @ model.scaled


@functools.cache
def table(width):
    return torch.arange(width) / 7


STATE = {
    "a buffer": lambda: lambda model, x: model.count.add_(1).mean(),
    "a tensor of its own": lambda: lambda model, x: model.attribute.add_(1).mean(),
    "a tensor of a closure": in_a_closure,
    "a list": lambda: in_a_list,
    "a counter": lambda: lambda model, x: next(model.numbers),
    "a buffer in place of another": lambda: in_another_buffer,
    "made at the first call": lambda: once,
    "made at the first call of a size": lambda: once_a_size,
    "a buffer made at the first call": lambda: once_as_a_buffer,
    "made of a weight": lambda: once_of_a_weight,
    "a cached function": lambda: lambda model, x: table(WIDTH),
    "numbers of torch": lambda: lambda model, x: torch.rand(WIDTH),
    "numbers of numpy": lambda: lambda model, x: float(numpy.random.rand()),
    "numbers of Python": lambda: lambda model, x: random.random(),
    "numbers of a generator of numpy": lambda: lambda model, x: float(model.generator.random()),
    "numbers of a generator of torch": lambda: lambda model, x: torch.rand(WIDTH, generator=model.own),
}


def seed():
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)


def answers(model, between=lambda: None):
    """Return what calls of several kinds give, with something between them."""
    given = []
    for x in (rows(2), rows(2), rows(1), rows(2), rows(16), rows(2)):
        given.append(model(x))
        between()
    return given


CASES = [(name, before) for name in STATE for before in (False, True)]
SAMPLE = [("a buffer made at the first call", True), *((name, False) for name in STATE)]


@pytest.mark.parametrize(("name", "called_before"), nightly_but(SAMPLE, CASES))
def test_state_goes_on(name, called_before, tmp_path):
    model, reference = (models.frozen(Model(STATE[name]())) for _ in range(2))
    with torch.no_grad():
        for one in (model, reference) if called_before else ():
            seed()
            one(rows(2))
        seed()
        expected = answers(reference), reference(rows(2))
        seed()
        with apply(model, "1MB", cache=tmp_path) as applied:
            got = answers(model, applied.idle)
        got = got, model(rows(2))
    assert all(torch.equal(*both) for both in zip(got[0], expected[0], strict=True))
    assert torch.equal(got[1], expected[1])
    assert torch.equal(model.count, reference.count)


TRAINED = [name for name in STATE if "numbers" in name or "closure" in name]


@pytest.mark.parametrize("name", nightly_but(["numbers of torch", "a tensor of a closure"], TRAINED))
def test_state_goes_on_in_training(name, tmp_path):
    model, reference = (Model(STATE[name]()).train() for _ in range(2))
    for one in (model, reference):
        one.second.requires_grad_(False)

    def losses(one):
        seed()
        found = []
        for x in (rows(4), rows(4), rows(2), rows(4)):
            loss = one(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        return found

    expected = losses(reference)
    with apply(model, "1MB", train=True, cache=tmp_path):
        got = losses(model)
    assert all(torch.equal(*both) for both in zip(got, expected, strict=True))
    assert torch.equal(model.first.weight.grad, reference.first.weight.grad)


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

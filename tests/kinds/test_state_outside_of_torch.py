"""What a call of a model changes outside of torch: refused by name, or the same in every call."""

import copy
import functools
import itertools
import logging
import random
import time
import uuid
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import penstock

CALLS = 0
GENERATOR = numpy.random.default_rng(3)
TABLES = {}


@dataclass(slots=True)
class Slots:
    calls: int = 0


class Part(nn.Module):
    calls_of_all = 0

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Model(nn.Module):
    calls_of_all = 0

    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute
        self.calls, self.first, self.log, self.table = 0, True, [], {}
        self.queue = deque(maxlen=3)
        self.kept = None
        self.register_buffer("lazy", None)
        self.register_buffer("count", torch.zeros(4))
        self.generator, self.random = numpy.random.default_rng(0), random.Random(0)
        self.old_generator = numpy.random.RandomState(0)
        self.numbers, self.array = itertools.count(1), numpy.zeros(2)
        self.held = SimpleNamespace(parts=[{"slots": Slots()}])
        self.part = Part()

    def forward(self, x):
        return self.compute(self, self.layer(x)).square().mean()


def counts(model, x):
    model.calls += 1
    return x * model.calls


def counts_globally(model, x):
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return x * CALLS


def counts_in_a_class(model, x):
    Model.calls_of_all += 1
    return x * Model.calls_of_all


def counts_in_a_function(model, x):
    counts_in_a_function.calls = getattr(counts_in_a_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * counts_in_a_function.calls  # type: ignore[attr-defined]


def counting_in_a_closure():
    calls = 0

    def compute(model, x):
        nonlocal calls
        calls += 1
        return x * calls

    return compute


def counts_in_an_array(model, x):
    model.array[0] += 1
    return x * float(model.array[0])


def counts_deep_inside(model, x):
    slots = model.held.parts[0]["slots"]
    slots.calls += 1
    return x * slots.calls


def counts_by_name(model, x):
    model.table["calls"] = model.table.get("calls", 0) + 1
    return x * model.table["calls"]


def appends(model, x):
    model.log.append(1)
    model.queue.append(1)
    return x * len(model.log)


def adds_what_it_kept(model, x):
    model.kept = x if model.kept is None else x + model.kept
    return model.kept


def keeps_its_first_input(model, x):
    if model.kept is None:
        model.kept = x * 2
    return x + model.kept


def keeps_random_numbers(model, x):
    if model.kept is None:
        model.kept = torch.rand(4)
    return x + model.kept


def keeps_what_is_trained(model, x):
    if model.kept is None:
        model.kept = model.layer.weight * 2
    return x @ model.kept


def writes_what_it_kept(model, x):
    if model.kept is None:
        model.kept = torch.zeros(4)
    model.kept += 1
    return x + model.kept


def differs_at_first(model, x):
    if model.first:
        model.first = False
        return x * 2
    return x


def switches_its_mode(model, x):
    model.part.train(not model.part.training)
    return x


REFUSED = {
    "numpy": (r"draws numpy's random numbers", lambda model, x: x * numpy.random.rand()),
    "Python": (r"draws Python's random numbers", lambda model, x: x * random.random()),
    "a generator of numpy": (r"changes generator when", lambda model, x: x * model.generator.random()),
    "an old generator": (r"changes old_generator when", lambda model, x: x * model.old_generator.rand()),
    "a generator of Python": (r"changes random when", lambda model, x: x * model.random.random()),
    "a global generator": (r"changes \w+\.GENERATOR when", lambda model, x: x * GENERATOR.random()),
    "a seed": (
        r"sets? .*generator|torch\.random\.manual_seed",
        lambda model, x: x + torch.manual_seed(1).seed(),
    ),
    "a counter": (r"changes calls when", counts),
    "a counter of a part": (r"changes part\.calls when", lambda model, x: model.part(x)),
    "a global counter": (r"changes \w+\.CALLS when", counts_globally),
    "a counter of a class": (r"changes Model\.calls_of_all when", counts_in_a_class),
    "a counter of a function": (r"changes counts_in_a_function\.calls when", counts_in_a_function),
    "a counter of a closure": (r"changes .*compute\.calls when", counting_in_a_closure()),
    "a counter of itertools": (r"changes numbers when", lambda model, x: x * next(model.numbers)),
    "a counter in an array": (r"changes array when", counts_in_an_array),
    "a counter deep inside": (r"changes held\.parts\[0\]\['slots'\]\.calls when", counts_deep_inside),
    "a counter in a dictionary": (r"changes table\['calls'\] when", counts_by_name),
    "a list": (r"changes log\[0\], queue\[0\] when", appends),
    "a tensor of the call before": (r"changes kept when", adds_what_it_kept),
    "a tensor of the first call": (r"changes kept when", keeps_its_first_input),
    "random numbers of the first call": (r"changes kept when", keeps_random_numbers),
    "a tensor that each call writes": (r"changes kept when", writes_what_it_kept),
    "another first call": (r"changes first when", differs_at_first),
    "the mode of a part": (r"changes part\.training when", switches_its_mode),
    "the time": (r"reads time\.time when", lambda model, x: x * (time.time() % 100)),
    "a random name": (r"reads os\.urandom when", lambda model, x: x * (uuid.uuid4().int % 1000)),
}


@functools.lru_cache
def cached_table(size):
    return torch.arange(size) / 7


def global_table(size):
    if size not in TABLES:
        TABLES[size] = torch.arange(size) / 7
    return TABLES[size]


def makes_a_table(model, x):
    if model.kept is None:
        model.kept = torch.arange(4) / 7
    return x + model.kept


def makes_an_item(model, x):
    if "table" not in model.table:
        model.table["table"] = (torch.arange(4) / 7).sin()
    return x + model.table["table"]


def makes_a_buffer(model, x):
    if model.lazy is None:
        model.lazy = torch.arange(4) / 7
    return x + model.lazy


def registers_a_buffer(model, x):
    if not hasattr(model, "late"):
        model.register_buffer("late", torch.arange(4) / 7, persistent=False)
    return x + model.late


def shows_a_value(model, x):
    model.kept = x.mean()
    model.log.clear()
    model.log.append(x.sum())
    return x + model.kept + model.log[0]


def sets_a_flag(model, x):
    model.first = False
    return x


def measures_itself(model, x):
    began = time.perf_counter()
    logging.getLogger(__name__).debug("%s", time.perf_counter() - began)
    return x


def counts_in_a_buffer(model, x):
    model.count = model.count + 1
    return x + model.count


FOLLOWED = {
    "a table": makes_a_table,
    "a table in a dictionary": makes_an_item,
    "a buffer": makes_a_buffer,
    "a new buffer": registers_a_buffer,
    "a cached function": lambda model, x: x + cached_table(4),
    "a global table": lambda model, x: x + global_table(4),
    "values that are shown": shows_a_value,
    "a flag": sets_a_flag,
    "the time that it takes": measures_itself,
    "a buffer that counts": counts_in_a_buffer,
}


def compile_training(build, folder):
    return penstock.compile_training(build(), folder / "p", example=(torch.ones(2, 4),), trainable=["layer*"])


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_a_later_call_reads_is_refused_by_name(name, tmp_path):
    sentence, compute = REFUSED[name]
    with pytest.raises(penstock.PassError, match=sentence):
        compile_training(lambda: Model(compute), tmp_path)
    with pytest.raises(penstock.PassError, match=sentence):
        penstock.fake_export(lambda: Model(compute), (torch.ones(2, 4),))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FOLLOWED)
def test_state_that_no_call_can_tell_is_followed(name, tmp_path):
    model = Model(FOLLOWED[name])
    before = copy.deepcopy(model)
    with compile_training(lambda: model, tmp_path).load("100%") as trained:
        for x in (torch.ones(2, 4), *torch.randn(2, 2, 4)):
            loss, expected = trained(x), before(x)
            assert torch.equal(loss, expected)


@pytest.mark.parametrize("name", FOLLOWED)
def test_fake_export_follows_it_too(name, tmp_path):
    model = Model(FOLLOWED[name]).eval()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    exported = penstock.fake_export(lambda: Model(FOLLOWED[name]), (torch.ones(2, 4),))
    program = penstock.compile(penstock.bind(exported, tmp_path / "w.pt"), tmp_path / "p")
    with torch.no_grad(), program.load("100%") as streamed:
        for x in (torch.ones(2, 4), *torch.randn(2, 2, 4)):
            assert torch.equal(streamed(x), model(x))


def test_what_is_kept_of_weights_that_are_trained_is_refused(tmp_path):
    with pytest.raises(penstock.PassError, match="changes kept when"):
        compile_training(lambda: Model(keeps_what_is_trained), tmp_path)


def test_a_model_that_was_called_before_has_made_its_tables(tmp_path):
    model, x = Model(keeps_its_first_input), torch.randn(2, 4)
    model(x)
    model.kept = model.kept.detach()
    with compile_training(lambda: model, tmp_path).load("100%") as trained:
        assert torch.equal(trained(x.cos()), model(x.cos()))

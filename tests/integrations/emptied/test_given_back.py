"""Memory that is given back, and what comes back: the same objects, ties and buffers, after errors too."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from penstock.integrations import apply, weight_files
from penstock.integrations.called.facts import make_facts
from penstock.integrations.called.measuring import OwnMemory
from penstock.integrations.emptied import hollow
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.cache import Cache
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.integrations import models

X = torch.linspace(-1, 1, 64).reshape(2, 32)
META = torch.device("meta")


def layers():
    torch.manual_seed(0)
    return models.frozen(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))


def quantised():
    """Its second layer has the weight of the first one."""
    model = layers()
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    model[1].weight = model[0].weight
    return model


def test_a_quantised_parameter_is_the_same_object_all_the_time(tmp_path):
    model = quantised()
    weight, kind = model[0].weight, type(model[0].weight)
    parts = plain_tensors("", weight)
    before = {name: part.clone() for name, part in parts.items()}
    with apply(model, "1MB", cache=tmp_path):
        assert type(model[0].weight) is kind
        assert (weight.shape, weight.dtype, weight.device) == ((32, 32), torch.float32, torch.device("cpu"))
        assert "not in memory" in repr(weight)
        assert torch.equal(weight.qdata.float(), before[".qdata"].float())
    assert model[0].weight is model[1].weight is weight
    for name, part in plain_tensors("", weight).items():
        assert part is parts[name]
        assert type(part) is torch.Tensor
        assert not vars(part)
        assert torch.equal(part, before[name])


def test_one_object_is_one_on_another_device_and_the_same_again_after_it(tmp_path):
    model = quantised()
    weight, bias, output = model[0].weight, model[0].bias, model(X)
    kept = weight_files.store(weight_files.stored_tensors(model), Cache(tmp_path), "me")
    facts = make_facts(model, [kept])
    given = hollow.Hollow(model, "restore it", META)
    assert {value.device for value in model.parameters()} == {META}
    assert model[0].weight is model[1].weight
    for one in (weight, model[0].weight):
        with pytest.raises(StreamError, match=r"the parameter 0\.weight\.\w+ is not in memory: restore it"):
            one.scale.sum()
    given.filling(facts, [kept])()
    assert model[0].weight is model[1].weight is weight
    assert model[0].bias is bias
    assert {value.device for value in model.parameters()} == {torch.device("cpu")}
    assert torch.equal(model(X), output)


def test_one_buffer_is_one_on_another_device():
    model = layers()
    model.register_buffer("table", torch.ones(4))
    model[0].register_buffer("same", model.table)
    hollow.Hollow(model, "restore it", META)
    assert model.table.device == META
    assert model[0].same is model.table


class Aliases(nn.Module):
    """Buffers in the memory of parameters: the parameter itself, and views."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("itself", self.first.weight)
        self.register_buffer("row", self.second.weight.detach()[3])
        self.register_buffer("all", self.third.weight.detach(), persistent=False)

    def forward(self, x):
        return self.third(self.second(self.first(x))) + self.itself[0] + self.row + self.all[0]


def test_a_buffer_in_the_memory_of_a_parameter_stays_in_it(tmp_path):
    model = models.frozen(Aliases())
    expected, row, whole = model(X), model.row, model.all.clone()
    with apply(model, "1MB", cache=tmp_path) as applied:
        assert applied.freed_bytes == 32 * 32 * 4 + 3 * 32 * 4  # what buffers have a part of is not
        assert torch.equal(model(X), expected)
        assert torch.equal(model.all, whole)
        assert torch.equal(model.itself.sum(), model.first.weight.sum())
    assert torch.equal(model(X), expected)
    assert model.itself is model.first.weight
    assert model.row is row
    model.second.weight.zero_()
    model.third.weight.zero_()
    assert not model.row.any()
    assert not model.all.any()


def test_a_value_that_is_read_otherwise_than_it_was_is_not_given_back(tmp_path):
    """As from a disk that has lost bits, of which the system says nothing."""
    model = layers()
    kept = weight_files.store(weight_files.stored_tensors(model), Cache(tmp_path), "me")
    facts = make_facts(model, [kept])
    emptied = hollow.Hollow(model, "restore it", torch.device("cpu"))
    with pytest.raises(SourceError, match=r"weight 1\.bias has other bytes than there were"):
        emptied.filling(facts, [replace(kept, digests=kept.digests | {"1.bias": "0" * 64})])
    assert "not in memory" in repr(model[0].weight)
    emptied.filling(facts, [kept])()


def test_what_others_still_hold_of_a_parameter_goes_on(tmp_path):
    model = layers().requires_grad_(True)
    state, output, weight = model.state_dict(), model(X), model[0].weight
    weight.own, values = "attribute", weight.detach().clone()
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(state["0.weight"], values)
        with pytest.raises(RuntimeError):
            output.sum().backward()  # needs values that are not there
    assert (model[0].weight is weight, weight.own, weight.requires_grad) == (True, "attribute", True)
    model(X).sum().backward()
    assert weight.grad is not None


def test_parameters_that_were_made_for_inference_come_back_as_such(tmp_path):
    with torch.inference_mode():
        model = layers()
        expected = model(X)
        applied = apply(model, "1MB", cache=tmp_path)
    assert torch.equal(model(X), expected)
    applied.restore()
    assert torch.equal(model(X), expected)
    assert model[0].weight.is_inference()


# What is refused.


def test_components_that_share_a_parameter_are_named(tmp_path):
    encoder, unet = layers(), layers()
    unet[1].weight = encoder[0].weight
    with pytest.raises(PassError, match=r"encoder\.0\.weight and unet\.1\.weight are one parameter"):
        apply(SimpleNamespace(components={"encoder": encoder, "unet": unet}), "1MB", cache=tmp_path)
    assert type(unet[1].weight) is nn.Parameter


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers()

    def forward(self, x):
        return self.inner(x)


@pytest.fixture(scope="module")
def outer(tmp_path_factory):
    model = models.frozen(Outer())
    with apply(model, "1MB", cache=tmp_path_factory.mktemp("cache")):
        yield model


@pytest.mark.parametrize(
    ("use", "done"),
    [
        (lambda model: model.to(torch.float16), r"the Outer cannot be moved or converted"),
        (copy.deepcopy, r"the Outer cannot be copied"),
        (pickle.dumps, r"the Outer cannot be pickled"),
    ],
)
def test_what_needs_a_module_names_it_by_its_path(outer, use, done):
    with pytest.raises(StreamError, match=rf"^{done}.*, as its parameters are not in memory: call the model"):
        use(outer)


# After errors.


def test_an_error_in_the_body_comes_out_and_the_model_is_whole(tmp_path):
    model = layers()
    expected = model(X)
    with pytest.raises(KeyError, match="body"), apply(model, "1MB", cache=tmp_path):
        raise KeyError("body")
    assert torch.equal(model(X), expected)


def test_a_restore_without_memory_changes_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    read, reads = OwnMemory.read, []

    def once(own, storages):
        reads.append(storages)
        if len(reads) == 2:
            raise MemoryError("no memory")
        return read(own, storages)

    model = layers()
    expected = model(X)
    applied = apply(model, "1MB", cache=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(OwnMemory, "read", once)
        with pytest.raises(MemoryError):
            applied.restore()
    assert all("not in memory" in repr(value) for value in model.parameters())
    assert torch.equal(model(X), expected)
    applied.restore()
    applied.restore()
    assert torch.equal(model(X), expected)


def test_what_is_said_of_grad_while_it_is_away_is_so_afterwards(tmp_path):
    model = layers()
    model[0].weight.requires_grad_(True)
    model[0].bias.requires_grad_(False)
    with apply(model, "1MB", cache=tmp_path):
        assert model[0].weight.requires_grad
        model[0].weight.requires_grad_(False)
        model[0].bias.requires_grad_(True)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad

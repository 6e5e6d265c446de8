"""Parameters that gave their memory back say so, and come back as they were."""

import copy
import io
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from penstock.integrations import apply, load, weight_files
from penstock.integrations.called.facts import make_facts
from penstock.integrations.called.measuring import OwnMemory
from penstock.integrations.emptied import hollow
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.cache import Cache
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.forked import run_forked
from tests.integrations import models


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    before = copy.deepcopy(model)
    with apply(model, "1MB", cache=tmp_path_factory.mktemp("cache")):
        yield model, before


@pytest.mark.parametrize(
    "read",
    [
        *(
            lambda w: w.norm(),
            lambda w: torch.tensor(w.tolist()),
            lambda w: torch.from_numpy(w.numpy().copy()),
        ),
        *(lambda w: w[0], lambda w: w == 1, lambda w: torch.stack([w, w]), lambda w: w.detach().clone()),
        *(lambda w: w.to(torch.float16), lambda w: torch.ones(8, 8).copy_(w), lambda w: w.data + 1),
        *(lambda w: nn.functional.linear(torch.ones(1, 8), w), lambda w: torch.from_dlpack(w) + 1),
        *(lambda w: torch.from_numpy(np.asarray(w).copy()), lambda w: copy.deepcopy(w).detach() + 1),
    ],
)
def test_its_values_are_read_from_the_file_between_calls(applied, read):
    model, before = applied
    assert torch.equal(read(model[0].weight), read(before[0].weight))
    assert torch.equal(model(torch.ones(1, 8)), before(torch.ones(1, 8)))


@pytest.mark.parametrize(
    "use",
    [*(copy.copy, pickle.dumps, lambda w: torch.save(w, io.BytesIO())), lambda w: w.set_(torch.ones(8, 8))],
)
def test_what_would_take_the_object_apart_is_refused(applied, use):
    model, before = applied
    with pytest.raises(StreamError, match=r"the parameter 0\.weight is not in memory: call the model itself"):
        use(model[0].weight)
    assert torch.equal(model(torch.ones(1, 8)), before(torch.ones(1, 8)))


def test_no_tensor_is_made_over_its_empty_storage(applied):
    weight = applied[0][0].weight
    with pytest.raises(RuntimeError, match="storage that is not resizable"):
        torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape)


def test_a_forward_of_the_instance_is_back_after_it(tmp_path):
    model = nn.Linear(8, 8).requires_grad_(False)
    model.forward = lambda x: nn.functional.linear(x, model.weight) + 1
    own = model.forward
    apply(model, "1MB", cache=tmp_path).restore()
    assert model.forward is own


def test_one_that_the_arguments_do_not_show_is_refused_without_its_name(applied):
    with pytest.raises(StreamError, match="a parameter is not in memory: call the model itself"):
        handle_torch_function(torch.add, [applied[0][0].weight], SimpleNamespace(weight=0))


def test_one_that_a_library_makes_of_its_class_is_refused(applied):
    made = type(applied[0][0].weight)(torch.ones(8, 8))  # as accelerate does
    with pytest.raises(StreamError, match="made like a weight which is not in memory"):
        made.to("cpu", torch.float16)


READERS = """
import copy, sys, torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from penstock.integrations import apply
from penstock.schedule.facts.errors import StreamError

model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
quantize_(model[1], Int8WeightOnlyConfig(set_inductor_config=False))
reference = copy.deepcopy(model)
apply(model, "1MB", cache=sys.argv[1])
for read in (
    lambda w, q: torch.vmap(lambda v: v * 2)(w),
    lambda w, q: torch.Tensor(w) + 1,
    lambda w, q: torch.tensor(w),
    lambda w, q: torch.autograd.Variable(w) + 1,
    lambda w, q: torch.func.grad(lambda v: v.sum())(w),
    lambda w, q: torch.func.functionalize(lambda v: v + 1)(w),
    lambda w, q: torch.Tensor._make_subclass(nn.Parameter, w) + 1,
    lambda w, q: copy.deepcopy(q).dequantize(),
    lambda w, q: nn.functional.embedding(torch.tensor([1]), q),
    lambda w, q: nn.functional.linear(torch.ones(1, 32), q),
    lambda w, q: q.qdata.sum(),
    lambda w, q: torch.vmap(lambda v: v * 2)(q.scale),
):
    expected = read(reference[0].weight, reference[1].weight)
    try:
        print("read", torch.equal(read(model[0].weight, model[1].weight), expected))
    except StreamError as error:
        print("refused", "is not in memory" in str(error))
"""


def test_what_reads_it_behind_the_back_of_python_reads_its_values_or_is_refused(tmp_path):
    done = run_forked(READERS, tmp_path, warnings="ignore")
    assert done.status == 0, done.err
    said = done.out.splitlines()
    assert len(said) == 12
    assert set(said) <= {"read True", "refused True"}


def test_its_facts_are(applied):
    weight, other = applied[0][0].weight, applied[1][0].weight
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "nbytes", "is_meta"):
        assert getattr(weight, name) == getattr(other, name), name
    assert (weight.numel(), weight.stride(), weight.dim()) == (other.numel(), other.stride(), 2)
    assert isinstance(weight, nn.Parameter)
    assert repr(weight) == "a parameter of shape (8, 8) that is not in memory"


def test_restored_it_is_what_it_was(tmp_path):
    model = nn.Linear(8, 8).requires_grad_(False)
    weight, values = model.weight, model.weight.clone()
    with apply(model, "1MiB", cache=tmp_path) as applied:
        assert str(model).endswith("bias=True, 288 B of parameters streamed by penstock)")
        assert repr(applied) == "Applied(Linear, streamed within 1.00 MiB on cpu)"
        with pytest.raises(PassError, match=r"a part of it, or another .* streams already: restore"):
            apply(nn.Sequential(model), "1MB", cache=tmp_path)
        assert model.weight is weight
    assert str(model) == "Linear(in_features=8, out_features=8, bias=True)"
    assert repr(applied) == "Applied(Linear, restored)"
    assert type(weight) is nn.Parameter
    assert not vars(weight)
    assert torch.equal(weight, values)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{oops", "config.json is no JSON"),
        ("config.json", b'{"model_type": "llama", "architectures": null}', "names no architectures"),
        ("model.safetensors", b"\x08", "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_its_file(tmp_path, file, content, message):
    models.llama(num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        load(tmp_path, "1MB", cache=tmp_path / "cache")


def test_an_apply_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no memory")

    model = nn.Linear(8, 8).requires_grad_(False)
    values, forward = model.weight.clone(), model.forward
    monkeypatch.setattr("penstock.integrations.applied.CalledModule", fail)
    with pytest.raises(MemoryError):
        apply(model, "1MB", cache=tmp_path)
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, values)
    assert model.forward == forward


X = torch.linspace(-1, 1, 64).reshape(2, 32)


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


META = torch.device("meta")


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

import warnings

import pytest
import torch
from torch import nn
from torch.export.graph_signature import InputKind

from penstock.passes.weights.lifted import storage_identity, with_own_constants
from penstock.schedule.facts.errors import PassError
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, weights_of


def test_tied_and_overlapping_weights_are_one_storage():
    _, exported = export(CASES["OneStorage"])
    found = weights_of(exported)
    assert [w.fqn for w in found.held.values()] == ["a", "b", "c"]
    assert [s.nbytes for s in found.storages] == [800]
    parts = [w.parts[0] for w in found.held.values()]
    assert [(p.offset, p.shape, p.stride) for p in parts] == [
        (0, (8, 8), (8, 1)),
        (256, (8, 8), (16, 2)),
        (768, (8,), (1,)),
    ]


def test_roles_dtypes_and_placeholders():
    _, exported = export(CASES["Dtypes"])
    found = weights_of(exported)
    facts = {w.fqn: (w.role, w.parts[0].dtype) for w in found.held.values()}
    assert facts.pop("fraction") == ("constant", "float32")
    assert facts.pop("lifted_tensor_0") == ("constant", "float32")
    assert facts == {
        "empty": ("parameter", "float32"),
        "waves": ("parameter", "complex64"),
        "turned": ("parameter", "float32"),
        "small": ("buffer", "float8_e4m3fn"),
        "counts": ("buffer", "int16"),
        "mask": ("buffer", "bool"),
    }
    assert found.held["p_turned"].parts[0].stride == (1, 8)
    assert found.storages[found.storage_of("p_empty")].nbytes == 0


def test_two_wrappers_of_the_same_memory_are_one_storage():
    memory = bytearray(64)
    one, other = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert storage_identity(one) == storage_identity(other)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_empty_and_meta_tensors_are_told_apart(device):
    one, other = (torch.empty(0 if device == "cpu" else 4, device=device) for _ in range(2))
    assert storage_identity(one) == storage_identity(one.view(-1))
    assert storage_identity(one) != storage_identity(other)


def test_meta_weights_keep_their_ties():
    with torch.device("meta"):
        model = CASES["TiedEmbedding"].build()
        exported = torch.export.export(model, (torch.zeros(1, 2, dtype=torch.int64),))
    found = weights_of(exported)
    assert len(found.storages) == 1
    assert {w.device for w in found.held.values()} == {"meta"}


def test_fake_weights_keep_their_ties():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = CASES["TiedEmbedding"].build()
        exported = torch.export.export(model, (torch.zeros(1, 2, dtype=torch.int64),))
    assert len(weights_of(exported).storages) == 1


class Wrapped(torch.Tensor):
    pass


def with_value(change):
    """An exported linear layer whose weight has been replaced."""
    exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    exported._state_dict = {**exported.state_dict, "weight": change(exported.state_dict["weight"].detach())}
    return exported


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.as_subclass(Wrapped),
            "parameter 'weight' is a Wrapped, which does not say what it is made of",
        ),
        (lambda t: t.to_sparse(), "parameter 'weight' is sparse"),
        (lambda t: t.to(torch.complex64).conj(), "lazy conjugate"),
        (lambda t: None, "parameter 'weight' has no value"),
    ],
)
def test_what_cannot_be_a_weight_is_refused_by_name(change, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = with_value(change)
    with pytest.raises(PassError, match=words):
        weights_of(exported)


@pytest.mark.parametrize("change", [{"kind": InputKind.CUSTOM_OBJ}, {"target": None}])
def test_an_input_that_is_no_tensor_is_refused(change):
    exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    spec = exported.graph_signature.input_specs[0]
    for name, value in change.items():
        setattr(spec, name, value)
    with pytest.raises(PassError, match="is not a tensor and cannot be a weight"):
        weights_of(exported)


class Shifted(nn.Module):
    """Adds a constant of its own, which export lifts and numbers."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return x + torch.tensor([self.shift, 1.0])


def test_constants_that_methods_number_alike_are_told_apart_by_the_method():
    programs = {
        f"by{shift}": torch.export.export(Shifted(float(shift)), (torch.zeros(2),)) for shift in (1, 2)
    }
    names = {name for exported in programs.values() for name in exported.constants}
    assert len(names) == 1
    (name,) = names
    apart = with_own_constants(programs)
    assert {method: list(exported.constants) for method, exported in apart.items()} == {
        "by1": [f"by1.{name}"],
        "by2": [f"by2.{name}"],
    }
    for method, exported in apart.items():
        assert torch.equal(exported.module()(torch.zeros(2)), programs[method].module()(torch.zeros(2)))
    alone = {"by1": programs["by1"]}
    assert with_own_constants(alone)["by1"] is programs["by1"]


def test_weights_may_stand_behind_the_inputs_of_a_call():
    exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    expected = {name: weight.fqn for name, weight in weights_of(exported).held.items()}
    exported.graph_signature.input_specs.reverse()
    found = {name: weight.fqn for name, weight in weights_of(exported).held.items()}
    assert found == expected == {"p_weight": "weight", "p_bias": "bias"}


def test_a_tensor_hidden_in_the_graph_is_refused():
    exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    exported.graph_module.hidden = torch.zeros(3)
    with pytest.raises(PassError, match="holds the tensor 'hidden' as an attribute"):
        weights_of(exported)

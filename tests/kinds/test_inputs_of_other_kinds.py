"""Inputs that no program was exported for: one sentence of penstock's, or what the model gives."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import penstock

X, AT = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1])


class Wrapped(torch.Tensor):
    """A tensor whose operators run on another one; it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Checked(nn.Module):
    """Reads rows of a table, and checks two numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table = nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x, at, rows, most):
        count = rows.item()
        torch._check(count >= 2)
        torch._check(count <= 4)
        torch._assert_async(most <= 9, "most is nine")
        taken = self.layer(x).narrow(0, 0, count).sum(0)
        return {"rows": taken + self.table(at).sum(0) + most}


@pytest.fixture(scope="module", params=["eager", "inductor"])
def streamed(request, tmp_path_factory):
    if request.param == "inductor":
        request.getfixturevalue("compiler")
    folder = tmp_path_factory.mktemp(request.param)
    exported = torch.export.export(Checked().eval(), given())
    program = penstock.compile(exported, folder / "model.penstock", lowering=request.param)
    with program.load(budget=program.floor_bytes) as module:
        yield request.param, module


def given(x=X, at=AT, rows=3, most=7):
    return x, at, torch.tensor(rows), torch.tensor(most)


def freed():
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


def without_warnings(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what is in beta
        return make()


def is_as_the_model(module):
    with torch.no_grad():
        found, expected = module(*given()), Checked().eval()(*given())
    return torch.allclose(found["rows"], expected["rows"], atol=1e-5)


LAYOUTS = {
    "sparse": X.to_sparse,
    "compressed rows": X.to_sparse_csr,
    "blocks": lambda: X.to_sparse_bsr((2, 2)),
    "a wrapper": lambda: Wrapped(X),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_without_plain_memory_is_as_a_dense_one_or_refused(streamed, name):
    lowering, module = streamed
    x = without_warnings(LAYOUTS[name])
    if lowering == "eager":
        assert torch.allclose(module(*given(x))["rows"], module(*given())["rows"], atol=1e-5)
    else:
        with pytest.raises(penstock.StreamError, match="input x: expected a dense tensor with memory of its"):
            module(*given(x))
    assert is_as_the_model(module)


REFUSED = {
    "nested": lambda: torch.nested.nested_tensor([X, X]),
    "jagged": lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "complex": lambda: X.to(torch.complex64),
    "booleans": lambda: X > 0,
    "one boolean": lambda: True,
    "without values": lambda: X.to("meta"),
    "fake": lambda: FakeTensorMode().from_tensor(X),
    "a list": X.tolist,
    "a dict": lambda: {"x": X},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_of_another_kind_is_refused_in_one_sentence(streamed, name):
    with pytest.raises(penstock.StreamError) as raised:
        streamed[1](*given(without_warnings(REFUSED[name])))
    assert "\n" not in str(raised.value)
    assert is_as_the_model(streamed[1])


def test_freed_memory_is_not_read_by_compiled_code(streamed):
    lowering, module = streamed
    error = RuntimeError if lowering == "eager" else penstock.StreamError  # an operator's own
    with pytest.raises(
        error, match="not allocated" if lowering == "eager" else "x: .*whose memory was freed"
    ):
        module(*given(freed()))
    assert is_as_the_model(module)


CHECKS = {
    "too few": ({"rows": 1}, "u0 >= 2"),
    "too many": ({"rows": 5}, "u0 <= 4"),
    "a check with words": ({"most": 10}, "most is nine"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_program_that_fails_is_an_error_of_penstock(streamed, name):
    call, words = CHECKS[name]
    with pytest.raises(
        penstock.StreamError, match=f"^a check of the program fails .*{words}.*; pass"
    ) as raised:
        streamed[1](*given(**call))
    assert "\n" not in str(raised.value)
    assert is_as_the_model(streamed[1])


def test_what_an_operator_refuses_is_raised_without_calls_in_c(streamed):
    with pytest.raises((IndexError, RuntimeError), match=r"^index out of (range|bounds)") as raised:
        streamed[1](*given(at=AT + 99))
    assert "\n" not in str(raised.value)
    assert is_as_the_model(streamed[1])

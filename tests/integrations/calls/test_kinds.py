"""Calls that one program cannot serve, though their tensors have the same sizes."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError
from tests.integrations import models

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Asks(nn.Module):
    """Asks of its inputs what no shape tells."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("computed", torch.ones(8), persistent=False)

    def forward(self, x, y=None):
        factor = (1 if x.is_contiguous() else 2) + (4 if x is y else 0)
        made = torch.ones(8)
        return (self.linear(x) * factor + self.computed).contiguous().view(-1) + x.contiguous().view(-1), made


class Remembers(nn.Module):
    """Keeps a table in a cache of its class, as models of diffusers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def table(self, size):
        return torch.arange(size) / size

    def forward(self, x):
        return self.linear(x) + self.table(8)


def test_what_an_export_leaves_in_a_cache_is_not_there_for_the_next(tmp_path):
    model = models.frozen(Remembers())
    wanted = [model(x) for x in (X, X[:1])]
    with apply(model, "1MB", cache=tmp_path):
        assert all(torch.equal(model(x), want) for x, want in zip((X, X[:1]), wanted, strict=True))
    assert torch.equal(model(X), wanted[0])


class Lifts(nn.Module):
    """A constant that export calls by the same name for each kind of call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) + torch.tensor(1.0 if x.ndim == 2 else 2.0)


def test_constants_of_one_name_are_each_kinds_own(tmp_path):
    model = models.frozen(Lifts())
    wanted = [model(x) for x in (X, X[0])]
    with apply(model, "1MB", cache=tmp_path):
        assert all(torch.equal(model(x), want) for x, want in zip((X, X[0]), wanted, strict=True))


def applied_and_not(tmp_path, dtype=torch.float32):
    model = models.frozen(Asks()).to(dtype)
    reference = models.twin(model)
    apply(model, "1MB", cache=tmp_path)
    return model, reference


def same(model, reference, *given) -> bool:
    got, want = model(*given), reference(*given)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))


def test_tensors_that_lie_in_memory_in_another_way(tmp_path):
    model, reference = applied_and_not(tmp_path)
    across = X.t().contiguous().t()
    assert all(same(model, reference, one) for one in (X, across, X[:, None].expand(3, 8, 8)[:, 0], X))


def test_one_tensor_given_twice(tmp_path):
    model, reference = applied_and_not(tmp_path)
    assert same(model, reference, X, X)
    assert same(model, reference, X, X.clone())


def test_a_default_dtype(tmp_path):
    model, reference = applied_and_not(tmp_path)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert same(model, reference, X)
        finally:
            torch.set_default_dtype(torch.float32)


def test_buffers_in_bfloat16(tmp_path):
    model, reference = applied_and_not(tmp_path, torch.bfloat16)
    assert same(model, reference, X.bfloat16())


def test_threads_that_call_in_two_kinds_at_once(tmp_path):
    model, reference = applied_and_not(tmp_path)
    given, found = (X, X.t().contiguous().t(), X, X.t().contiguous().t()), []
    threads = [threading.Thread(target=lambda x=x: found.append(same(model, reference, x))) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


class AsksGrad(nn.Module):
    """Asks for the grad mode, also inside of contexts, and whether its weight requires grad."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        factor = 2 if torch.is_grad_enabled() else 3
        with torch.no_grad():
            factor += 10 if torch.is_grad_enabled() else 0
        with torch.enable_grad():
            factor += 20 if torch.is_grad_enabled() else 0
        return (
            self.linear(x)
            * (factor + torch.is_grad_enabled())
            * (5 if self.linear.weight.requires_grad else 1)
        )


def test_a_model_that_asks_for_grad_mode_or_for_requires_grad(tmp_path):
    for model in (AsksGrad(), models.frozen(AsksGrad())):
        with torch.no_grad():
            wanted = model(X)
        with apply(model, "1MB", cache=tmp_path) as applied:
            with torch.no_grad():
                assert torch.equal(model(X), wanted)
            got, again = model(X), model(X)
            assert len(applied.components["AsksGrad"].prepared) == 2
        assert torch.equal(got, model(X))
        assert torch.equal(got, again)


def test_a_model_that_asks_for_nothing_is_exported_once_for_both_grad_modes(tmp_path):
    model = models.frozen(Lifts())
    with apply(model, "1MB", cache=tmp_path) as applied:
        model(X)
        with torch.no_grad():
            model(X)
        assert len(applied.components["Lifts"].prepared) == 1


def test_the_fast_path_of_attention_is_refused_and_the_slow_one_runs(tmp_path, monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.tensor([[False, False, True]])
    wanted = model(X[None], src_key_padding_mask=mask)
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model(X[None], src_key_padding_mask=mask), wanted)
        with torch.no_grad():
            for given in ({}, {"src_key_padding_mask": mask}):
                with pytest.raises(PassError, match=r"takes torch's fast path.*set_fastpath_enabled"):
                    model(X[None], **given)
            monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
            assert torch.equal(model(X[None], src_key_padding_mask=mask), wanted)

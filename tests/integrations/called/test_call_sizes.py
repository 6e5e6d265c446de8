"""Which calls run one module at a time: those that may take more memory than a plan leaves for them."""

import weakref

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.integrations.called.measuring import PeakMeter
from tests.integrations import models


@pytest.fixture
def count(said):
    """Return a function that counts calls that ran one module at a time since it was last called."""
    return lambda: said().count("one module at a time")


def ids(rows, tokens):
    return torch.arange(rows * tokens).reshape(rows, tokens) % 120 + 3


def generate(model, prompt, tokens, **options):
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False} | options
    return model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def test_a_prompt_its_tokens_beams_and_padded_rows_have_one_plan(count, tmp_path):
    model, reference = models.llama(), models.llama()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    with apply(model, "16MB", cache=tmp_path):
        assert torch.equal(generate(model, ids(1, 12), 8), generate(reference, ids(1, 12), 8))
        assert count() == 1
        for prompt, options in ((ids(1, 12), {"num_beams": 3}), (ids(2, 12), {"attention_mask": mask})):
            assert torch.equal(
                generate(model, prompt, 2, **options), generate(reference, prompt, 2, **options)
            )
        assert count() == 0


def test_the_bytes_of_a_cache_say_nothing_of_a_prompt(count, tmp_path):
    model, reference = models.llama(), models.llama()
    with apply(model, "2MB", cache=tmp_path):
        generate(model, ids(1, 4), 60)
        count()
        assert torch.equal(model(ids(1, 1500)).logits, reference(ids(1, 1500)).logits)
        assert count() == 1


class Attention(nn.Module):
    """Takes memory for each pair of tokens in a row; or, if asked, for each pair of all tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, across=False):
        x = x.flatten(0, 1)[None] if across else x
        return (self.query(x) @ self.key(x).transpose(1, 2)).amax(-1)

    def encode(self, x):
        return self.query(x)


def larger(shape, **options):
    return lambda model: model(torch.ones(shape), **options)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(larger((24, 12, 64)), id="more rows"),
        pytest.param(larger((1, 96, 64)), id="the same bytes, as one row"),
        pytest.param(larger((8, 12, 64), across=True), id="the same bytes, and a flag"),
    ],
)
def test_a_call_that_may_take_more_runs_one_module_at_a_time(call, count, tmp_path):
    model, reference = models.frozen(Attention()), models.frozen(Attention())
    with torch.no_grad(), apply(model, "260KB", cache=tmp_path):
        for _ in range(2):
            model(torch.ones(8, 12, 64))
        count()
        assert torch.equal(call(model), call(reference))
        assert count() == 1
        assert torch.equal(call(model), call(reference))
        assert count() == 0


def test_the_weights_of_a_step_are_gone_before_more_is_measured(tmp_path, monkeypatch):
    weights, left = [], []

    class Seen(nn.Linear):
        def forward(self, x):
            weights.append(weakref.ref(self.weight))
            return super().forward(x)

    restart = PeakMeter.restart

    def restarted(meter):
        left.append(sum(weight() is not None for weight in weights))
        restart(meter)

    monkeypatch.setattr(PeakMeter, "restart", restarted)
    model = nn.Sequential(*(Seen(256, 256, bias=False) for _ in range(3))).eval()
    with torch.no_grad(), apply(model, "700KB", cache=tmp_path):
        model(torch.randn(1, 256))
    assert (len(weights), left) == (3, [0] * 3)

"""Calls that may take more than a plan leaves for them, and the largest contexts that fit."""

import re
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from penstock.integrations import apply
from penstock.integrations.called import forwards
from penstock.integrations.called.measuring import PeakMeter
from penstock.integrations.context import largest_context, token_bytes
from penstock.schedule.facts.errors import BudgetError
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


@pytest.mark.parametrize(
    ("memory", "rows", "observed"), [("800KB", range(8, 21, 2), 1), ("118KB", (8, 9, 10), 3)]
)
def test_calls_that_grow_are_planned_anew_where_a_plan_leaves_enough(memory, rows, observed, count, tmp_path):
    model, reference = models.frozen(Attention()), models.frozen(Attention())
    with torch.no_grad(), apply(model, memory, cache=tmp_path):
        for x in map(torch.ones, [(8, 12, 64), *((number, 12, 64) for number in rows)]):
            assert torch.equal(model(x), reference(x))
        assert count() == observed


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


SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def make_llama(**sizes):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | HEADS | sizes, max_position_embeddings=50000)
    return LlamaForCausalLM(config).eval()


def make_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, pad_token_id=0)).eval()


def make_gemma():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=32, sliding_window=8)).eval()


def prompt(length):
    return torch.arange(length)[None] % 100 + 3


def long_cache(model):
    """Return a cache of 160 MB, more than what a process may take beside its memory."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    cache, shape = DynamicCache(), (1, heads, 20_000_000 // (16 * layers * heads), 16)
    for layer in range(layers):
        cache.update(torch.ones(shape), torch.ones(shape), layer)
    return cache


def cache_bytes(model, length):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(length), past_key_values=cache, use_cache=True)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("make", [make_llama, make_gpt2, make_gemma])
def test_bytes_of_a_token_are_those_of_the_librarys_cache(make):
    model = make()
    token = token_bytes(model)
    assert cache_bytes(model, 21) - cache_bytes(model, 20) == token.lasting
    near = cache_bytes(model, 20) - 20 * token.lasting
    assert token.passing * (token.window - 1) <= near <= token.passing * token.window
    assert cache_bytes(model, 4) == 4 * (token.lasting + token.passing)


def test_a_model_that_makes_no_text_one_token_at_a_time_says_nothing():
    t5 = T5Config(vocab_size=64, d_model=32, d_ff=64, num_layers=1, decoder_start_token_id=0)
    assert token_bytes(T5ForConditionalGeneration(t5)) is None
    assert token_bytes(torch.nn.Linear(2, 2)) is None


def test_a_context_beyond_the_window_takes_that_of_the_layers_without_one():
    token = token_bytes(make_gemma())
    ten = 10 * (token.lasting + token.computing) + token.window * token.passing
    assert largest_context(token, ten) == 10


def test_the_context_that_is_said_fits_and_one_beyond_the_memory_is_refused(tmp_path, capsys):
    model = make_llama()
    with apply(model, "2MB", cache=tmp_path, verbose=True):
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "a context of" in line]
        tokens = int(re.search(r"about ([\d,]+) tokens fits 2 MB .*: each takes 512 B", said)[1])
        assert tokens > 100
        cache = DynamicCache(config=model.config)
        for part in prompt(tokens).split(100, 1):
            model(part, past_key_values=cache, use_cache=True)
        cache = long_cache(model)
        with pytest.raises(BudgetError, match=r"give at least .* MiB, or a shorter context$") as refused:
            model(prompt(1), past_key_values=cache, use_cache=True)
        assert "the cache of its context take 152.59 MiB" in str(refused.value)
        model(prompt(10))


@pytest.mark.parametrize("pieces", [0, 200])
def test_the_number_in_the_error_would_do(pieces, tmp_path):
    """Also where the heap has large free pieces: what is freed then stays with the process for a while."""
    blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(pieces)]
    stay, blocks = blocks[::21], None  # noqa: F841 (what is between them is free)
    model = make_llama(num_hidden_layers=8, num_key_value_heads=4)
    with apply(model, "1MB", cache=tmp_path) as applied:
        cache = long_cache(model)
        with pytest.raises(BudgetError) as refused:
            model(prompt(1), past_key_values=cache, use_cache=True)
        applied.memory = refused.value.floor_bytes
        model(prompt(1), past_key_values=cache, use_cache=True)


def test_a_head_that_is_tied_to_a_table_counts_whole(tmp_path):
    model = make_llama(tie_word_embeddings=True, vocab_size=4000, hidden_size=256)
    with apply(model, "1MB", cache=tmp_path) as applied:
        with pytest.raises(BudgetError, match="lm_head reads") as refused:
            model(prompt(1))
        applied.memory = refused.value.floor_bytes
        model(prompt(1))


def test_smaller_caches_are_named_where_they_work(monkeypatch):
    monkeypatch.setattr(forwards.importlib.util, "find_spec", lambda name: None)
    assert forwards.smaller_caches(on_cpu=True) == ["or a shorter context"]
    _, offloaded = forwards.smaller_caches(on_cpu=False)
    assert "offloaded" in offloaded
    monkeypatch.setattr(forwards.importlib.util, "find_spec", lambda name: object())
    assert "quantized" in forwards.smaller_caches(on_cpu=True)[-1]


def test_sizes_that_each_layer_has_of_its_own_count_by_the_largest():
    model = make_llama()
    alike = token_bytes(model)
    vars(model.config)["intermediate_size"] = [64, SIZES["intermediate_size"]]  # as Gemma 3n has them
    assert token_bytes(model) == alike

"""What apply exports and plans before the first real call: the calls of an example, or a tiny one."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
import transformers
from torch import nn

from benchmarks.zoo_transformers import bert, clip, vit, whisper
from penstock.integrations import apply
from penstock.integrations.calls.tiny_calls import tiny_call
from penstock.runtime.program import Program
from penstock.schedule.facts.errors import BudgetError, PassError, StreamError
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])


def linear():
    torch.manual_seed(0)
    return models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A Llama to which penstock was applied, and nothing else done, and its twin."""
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    before = torch.random.get_rng_state()
    applied = apply(model, "400KB", cache=tmp_path_factory.mktemp("cache"))
    assert torch.equal(torch.random.get_rng_state(), before)
    yield model, reference, applied
    applied.close()


def test_a_model_that_generates_has_its_methods_before_it_is_called(prepared, said):
    model, reference, _ = prepared
    said()
    got = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert "exporting" not in said()
    assert torch.equal(got, reference.generate(IDS, max_new_tokens=4, do_sample=False))


def test_padded_calls_are_prepared_where_that_is_chosen(tmp_path, said):
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    with apply(model, "400KB", example="padded", cache=tmp_path) as applied:
        assert [("padded" in text) for text in applied.prepared["LlamaForCausalLM"]].count(True) == 2
        said()
        given = {
            "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
            "max_new_tokens": 4,
            "do_sample": False,
        }
        ids = IDS[:, :3].repeat(2, 1)
        assert torch.equal(model.generate(ids, **given), reference.generate(ids, **given))
        assert "exporting" not in said()
        with pytest.raises(ValueError, match=r"there is no example 'paddled': give 'padded', or inputs"):
            applied.prepare("paddled")


def test_a_rehearsal_reads_no_weights_and_returns_zeros_of_the_sizes_of_the_call(prepared):
    model, reference, applied = prepared
    applied.close()
    logits = []
    applied.prepare(lambda called: logits.append(called(IDS[:, :3], use_cache=False).logits))
    applied.prepare(lambda called: logits.append(called(IDS, use_cache=False).logits))
    assert [tuple(one.shape) for one in logits] == [(1, 3, 128), (1, 5, 128)]
    assert not any(one.any() for one in logits)
    assert applied.components["LlamaForCausalLM"].stats is None  # nothing was loaded
    assert torch.equal(model(IDS, use_cache=False).logits, reference(IDS, use_cache=False).logits)


def test_calls_of_other_threads_wait_for_the_end_of_a_rehearsal(prepared):
    model, reference, applied = prepared
    got = []

    def call():
        with torch.no_grad():
            got.append(model(IDS, use_cache=False).logits)

    thread = threading.Thread(target=call)

    def example(_):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not got

    applied.prepare(example)
    thread.join()
    assert torch.equal(got[0], reference(IDS, use_cache=False).logits)


def test_a_cap_that_is_too_small_is_refused_when_it_is_given(tmp_path):
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    with pytest.raises(BudgetError, match=r"LlamaForCausalLM does not run in .*example=") as caught:
        apply(model, "20KB", cache=tmp_path)
    assert torch.equal(model(IDS).logits, reference(IDS).logits)  # as it was
    with apply(model, caught.value.floor_bytes, cache=tmp_path):
        assert torch.equal(model(IDS[:, :1]).logits, reference(IDS[:, :1]).logits)
        with pytest.raises(BudgetError, match="or call it with smaller inputs"):
            model(IDS.repeat(1, 100))


EXAMPLES = {
    "a tensor": torch.ones(2, 8),
    "positional": [torch.ones(2, 8)],
    "by name": {"input": torch.ones(2, 8)},
    "a function": lambda model: model(model(torch.ones(2, 8))),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_of_any_form_is_exported_and_not_computed(example, tmp_path, said):
    model = linear()
    expected = model(torch.ones(3, 8))
    with apply(model, "1MB", example=example, cache=tmp_path) as applied:
        assert said().count("exporting Sequential.forward for input [2, 8]") == 1
        assert len(list((tmp_path / "programs").iterdir())) == 1
        assert applied.components["Sequential"].stats is None
        assert torch.equal(model(torch.ones(3, 8)), expected)
        assert "exporting" not in said()


def test_an_example_that_fails_leaves_the_model_as_it_was(tmp_path):
    model = linear()
    expected = model(torch.ones(3, 8))
    with pytest.raises(PassError, match="Sequential"):
        apply(model, "1MB", example=torch.ones(3, 7), cache=tmp_path)
    assert torch.equal(model(torch.ones(3, 8)), expected)


def test_sizes_that_values_decide_have_no_zeros(tmp_path):
    class Found(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x).nonzero()

    model = models.frozen(Found())
    with pytest.raises(PassError, match="depends on values"):
        apply(model, "1MB", example=torch.ones(3, 8), cache=tmp_path)
    expected = model(torch.ones(3, 8))
    with apply(model, "1MB", cache=tmp_path):  # no tiny call is known
        assert torch.equal(model(torch.ones(3, 8)), expected)


@pytest.mark.parametrize("entry", [bert(), vit(), clip()], ids=lambda entry: entry.name)
def test_models_that_do_not_generate_have_a_tiny_call(entry):
    model = models.frozen(entry.build())
    tiny_call(model)(model)


WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCK = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "encoder_ffn_dim": 16}

OTHERS = {
    "Wav2Vec2Model": WIDTH,
    "ASTModel": WIDTH | {"max_length": 32, "num_mel_bins": 16},
    "VideoMAEModel": WIDTH | {"image_size": 16, "num_frames": 2},
    "LayoutLMModel": WIDTH | {"vocab_size": 50},
    "ResNetModel": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
    "BartModel": BLOCK | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_sounds_videos_and_pictures_of_any_size_have_a_tiny_call(kind):
    made = getattr(transformers, kind)
    model = models.frozen(made(made.config_class(**OTHERS[kind])))
    tiny_call(model)(model)


def test_what_cannot_be_called_yet_says_so_with_an_example_of_its_own(tmp_path, said):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, left, right, scale=1.0):
            return self.inner(left + right) * scale

    with apply(models.frozen(Sum()), "1MB", cache=tmp_path) as applied:
        line = next(line for line in said().splitlines() if "tiny call" in line)
        assert "LookupError: what a Sum takes is not known" in line
        assert line.endswith("is first called; example={'left': ..., 'right': ...} does so now")
        assert applied.prepared == {"Sum": ()}
        applied.prepare({"left": torch.ones(2, 8), "right": torch.ones(2, 8)})
        assert applied.prepared == {"Sum": ("forward of left [2, 8], right [2, 8]",)}


def test_a_tiny_call_that_fails_says_so_and_prepares_what_it_reached(tmp_path, said):
    model = models.frozen(whisper().build())  # which looks for a time in what it said
    with apply(model, "2MB", cache=tmp_path):
        assert re.search(
            r"a tiny call did not reach its end \(IndexError.*\): .* first called; example=lambda", said()
        )
        assert len(list((tmp_path / "programs").iterdir())) == 1


def test_what_grows_faster_than_its_inputs_is_counted_at_the_sizes_of_the_call(tmp_path):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            x = self.inner(x)
            return (x @ x.t()).softmax(-1).sum()

    model = models.frozen(Scores())
    expected = model(torch.ones(100, 8))
    with apply(model, "100KB", example=torch.ones(4, 8), cache=tmp_path) as applied:
        assert torch.equal(model(torch.ones(100, 8)), expected)  # 80 KB of scores
        with pytest.raises(BudgetError, match="smaller inputs") as caught:
            model(torch.ones(1000, 8))
        assert caught.value.floor_bytes > 2 * 4 * 1000 * 1000
        assert torch.equal(model(torch.ones(100, 8)), expected)
        assert applied.components["Scores"].stats.peak_bytes <= 100_000


# What a rehearsal leaves alone.


def test_a_cache_that_is_given_as_an_example_stays_what_it_is(prepared):
    model, reference, applied = prepared
    cache = reference(IDS).past_key_values
    before = copy.deepcopy(cache)
    applied.prepare({"input_ids": IDS[:, :1], "past_key_values": cache})
    assert cache.get_seq_length() == before.get_seq_length()
    got = model(IDS[:, :1], past_key_values=cache).logits
    assert torch.equal(got, reference(IDS[:, :1], past_key_values=before).logits)


def test_a_generator_that_is_given_as_an_example_draws_what_it_would(tmp_path):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x, generator=None):
            return self.inner(x)

    class Pipeline:
        def __init__(self):
            self.components = {"inner": models.frozen(Takes())}

        def set_progress_bar_config(self, **_):
            """As pipelines of diffusers have it."""

        def __call__(self, generator):
            return self.components["inner"](torch.rand(2, 8, generator=generator))

    generator = torch.Generator().manual_seed(3)
    with apply(Pipeline(), "1MB", example=lambda made: made(generator.clone_state()), cache=tmp_path) as one:
        one.prepare({"generator": generator})
    assert torch.equal(torch.rand(4, generator=generator), torch.rand(4, generator=generator.manual_seed(3)))


def test_hooks_of_the_model_see_no_zeros(tmp_path):
    model, seen = linear(), []
    model.register_forward_hook(lambda _, given, output: seen.append(output))
    with apply(model, "1MB", example=torch.ones(2, 8), cache=tmp_path):
        assert seen == []
        model(torch.ones(2, 8))
    assert len(seen) == 1
    assert seen[0].any()


def test_calls_of_an_example_that_fails_need_no_room(tmp_path):
    def fails(model):
        model(torch.ones(4000, 8))
        raise ValueError("of the example")

    with apply(linear(), "100KB", example=models.nothing, cache=tmp_path) as applied:
        with pytest.raises(ValueError, match="of the example"):
            applied.prepare(fails)
        applied.prepare(torch.ones(3, 8))
    with pytest.raises(StreamError, match="the model was restored: apply penstock to it again"):
        applied.prepare(torch.ones(3, 8))


def test_planning_that_is_interrupted_leaves_no_plan_that_is_too_large(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    model = models.frozen(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with apply(model, "100KB", example=torch.ones(4, 64), cache=tmp_path) as applied:
        model(torch.ones(4, 64))
        assert applied.components["Sequential"].stats.budget > 33_000  # all weights
        with monkeypatch.context() as patch:
            patch.setattr(Program, "plan", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(100, 64))
        model(torch.ones(100, 64))
        beside = 3 * 100 * 64 * 4  # what goes in, between and out
        assert applied.components["Sequential"].stats.budget + beside <= 100_000

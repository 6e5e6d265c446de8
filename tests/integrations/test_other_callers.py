"""What libraries and hooks do with a model that streams, and several models at once."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, TextIteratorStreamer, pipeline

from penstock.integrations import apply, load
from tests.integrations import models
from tests.speaking_models import PROMPT, save_model, tokenizer

TEXTS = [PROMPT, "lado", "mibe koga lado"]
CHAT = [{"role": "user", "content": "lado mibe"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "llama"
    save_model(made)
    return made


def test_a_streamer_has_the_text_token_by_token(folder, tmp_path):
    streamed, words = load(folder, "60%", cache=tmp_path), tokenizer()
    given = words(PROMPT, return_tensors="pt")
    reference = type(streamed).from_pretrained(folder)
    expected = reference.generate(**given, max_new_tokens=8, do_sample=False)[
        0, given["input_ids"].shape[1] :
    ]
    streamer = TextIteratorStreamer(words, skip_prompt=True)  # type: ignore[no-untyped-call]
    options = {**given, "max_new_tokens": 8, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=streamed.generate, kwargs=options)
    thread.start()
    assert "".join(streamer) == words.decode(expected)
    thread.join()


@pytest.mark.parametrize(("asked", "options"), [(PROMPT, {}), (TEXTS, {"batch_size": 3}), (CHAT, {})])
def test_a_pipeline_of_transformers_takes_it(folder, tmp_path, asked, options):
    streamed, words = load(folder, "60%", cache=tmp_path), tokenizer()
    words.pad_token = words.unk_token
    asking = {"max_new_tokens": 8, "do_sample": False, **options}
    reference = type(streamed).from_pretrained(folder)
    found, expected = (
        pipeline("text-generation", model=model, tokenizer=words)(asked, **asking)
        for model in (streamed, reference)
    )
    assert found == expected


@pytest.mark.parametrize("whole", [True, False])
def test_sentences_have_the_same_embeddings(tmp_path, whole):
    why = "sentence-transformers is not installed: pip install sentence-transformers"
    library = pytest.importorskip("sentence_transformers", reason=why)
    parts_of = pytest.importorskip("sentence_transformers.models", reason=why)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=512, **sizes)).save_pretrained(tmp_path / "bert")
    words = tokenizer()
    words.pad_token = words.unk_token
    words.save_pretrained(tmp_path / "bert")
    parts = parts_of.Transformer(str(tmp_path / "bert")), parts_of.Pooling(64)
    model = library.SentenceTransformer(modules=list(parts), device="cpu")
    expected = model.encode(TEXTS)
    with apply(model if whole else parts[0].auto_model, "80%", cache=tmp_path / "cache"):
        for _ in range(2):
            assert numpy.array_equal(model.encode(TEXTS), expected)


def test_models_of_two_threads_stream_at_once(tmp_path):
    ids = torch.arange(6)[None]

    def run(model):
        expected = model(input_ids=ids).logits
        with apply(model, "1MB", cache=tmp_path):
            return all(torch.equal(model(input_ids=ids).logits, expected) for _ in range(3))

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        assert all(pool.map(run, [models.llama(num_hidden_layers=layers) for layers in (1, 2)]))


def test_hooks_run_as_they_do_in_memory(tmp_path):
    """Those of a module, those of all modules, and those that transformers collects hidden states with."""
    model, seen, ids = models.llama(num_hidden_layers=1), [], torch.arange(6)[None]

    def call():
        seen.clear()
        return [*model(ids, output_hidden_states=True).hidden_states, *seen]

    call()
    assert any(child._forward_hooks for child in model.modules())
    handles = [
        model.lm_head.register_forward_hook(functools.partial(lambda _, __, out: seen.append(out))),
        model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        nn.modules.module.register_module_forward_hook(
            lambda part, _, out: seen.append(out) if part is model.lm_head else None
        ),
    ]
    expected = call()
    assert len(seen) == 3
    with apply(model, "1MB", cache=tmp_path):
        for _ in range(3):
            assert all(torch.equal(*both) for both in zip(call(), expected, strict=True))
    for handle in handles:
        handle.remove()

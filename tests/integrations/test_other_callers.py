"""What libraries do with a model that streams: streamers and pipelines of transformers, sentences."""

import threading

import numpy
import pytest
import torch
from transformers import BertConfig, BertModel, TextIteratorStreamer, pipeline

from penstock.integrations import apply, load
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
    models = pytest.importorskip("sentence_transformers.models", reason=why)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=512, **sizes)).save_pretrained(tmp_path / "bert")
    words = tokenizer()
    words.pad_token = words.unk_token
    words.save_pretrained(tmp_path / "bert")
    parts = models.Transformer(str(tmp_path / "bert")), models.Pooling(64)
    model = library.SentenceTransformer(modules=list(parts), device="cpu")
    expected = model.encode(TEXTS)
    with apply(model if whole else parts[0].auto_model, "80%", cache=tmp_path / "cache"):
        for _ in range(2):
            assert numpy.array_equal(model.encode(TEXTS), expected)

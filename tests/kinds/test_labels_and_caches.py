"""Encoders with decoders, and weights that a configuration ties, are as in memory and in files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from penstock.integrations import apply, load
from tests.hunt import nightly_but
from tests.integrations import models

# transformers tells of labels that it treats otherwise since years
pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")

BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DECODER = BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
SPECIAL = {"decoder_start_token_id": 1, "pad_token_id": 0}


def joined():
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**BERT), DECODER, **SPECIAL)
    return EncoderDecoderModel(config=config)


def seeing():
    sizes = {name: BERT[name] for name in BERT if name != "vocab_size"}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**sizes, image_size=16, patch_size=8), DECODER, **SPECIAL
    )
    model = VisionEncoderDecoderModel(config=config)
    model.generation_config.decoder_start_token_id, model.generation_config.pad_token_id = 1, 0
    return model


IDS = {"input_ids": torch.randint(3, 99, (3, 6), generator=torch.Generator().manual_seed(1))}
PIXELS = {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
KINDS = {
    "joined": (joined, IDS),
    "seeing": (seeing, PIXELS),
    "Bart": (models.bart, IDS),
    "T5": (models.t5, IDS),
}


CASES = [(name, memory) for name in KINDS for memory in ("150KB", "4MB")]


@pytest.mark.parametrize(("name", "memory"), nightly_but([("seeing", "150KB"), ("T5", "150KB")], CASES))
def test_labels_and_caches_are_as_in_memory(name, memory, tmp_path):
    make, given = KINDS[name]
    torch.manual_seed(0)
    model = models.frozen(make())
    reference = models.twin(model)
    one = {key: value[:1] for key, value in given.items()}
    labels = torch.randint(3, 99, (3, 4), generator=torch.Generator().manual_seed(2))
    masked = labels.masked_fill(torch.tensor([[False, False, True, True]]), -100)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with torch.no_grad(), apply(model, memory, cache=tmp_path):
        for cache in (None, "static", "dynamic", "static"):
            got, expected = (
                each.generate(**one, cache_implementation=cache, **options) for each in (model, reference)
            )
            assert torch.equal(got, expected)
            for wanted in (labels, masked):
                loss = model(**given, labels=wanted).loss
                assert torch.equal(loss, reference(**given, labels=wanted).loss)


ROW = torch.tensor([[5, 9, 1, 3]])


def saved(model, folder, **tensors):
    """Save a model, with other tensors beside its own."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def check(library, folder, tmp_path, call, *, tied):
    head = library.get_output_embeddings().weight
    assert (head is library.get_input_embeddings().weight) == tied
    models.frozen(library)
    with torch.no_grad():
        want = call(library)
        with apply(library, "4MB", cache=tmp_path / "cache"):
            assert torch.equal(call(library), want)
        for memory in ("300KB", "4MB"):
            with load(folder, memory, cache=tmp_path / "cache") as loaded:
                for _ in range(2):
                    assert torch.equal(call(loaded), want)
                own = loaded.get_output_embeddings().weight
                assert (own is loaded.get_input_embeddings().weight) == tied


def logits(model):
    return model(ROW).logits


def test_files_with_another_head_untie_it(tmp_path):
    saved(models.llama(tie_word_embeddings=True), tmp_path / "m", **{"lm_head.weight": torch.randn(128, 64)})
    check(LlamaForCausalLM.from_pretrained(tmp_path / "m"), tmp_path / "m", tmp_path, logits, tied=False)


@pytest.mark.parametrize("both", nightly_but([True], [True, False]))
def test_files_with_an_equal_head_or_none_leave_it_tied(both, tmp_path):
    model = models.llama(tie_word_embeddings=True)
    head = {"lm_head.weight": model.lm_head.weight.clone()} if both else {}
    saved(model, tmp_path / "m", **head)
    check(LlamaForCausalLM.from_pretrained(tmp_path / "m"), tmp_path / "m", tmp_path, logits, tied=True)


def both(model):
    return model(input_ids=ROW, decoder_input_ids=ROW).logits


OTHERS = {
    "T5": (models.t5, T5ForConditionalGeneration, {"lm_head.weight": (128, 32)}, both),
    "Bart": (models.bart, BartForConditionalGeneration, {"lm_head.weight": (128, 32)}, both),
    "Bert": (
        lambda: BertForMaskedLM(BertConfig(**models.SIZES)),
        BertForMaskedLM,
        {"cls.predictions.decoder.weight": (128, 64)},
        logits,
    ),
}


@pytest.mark.parametrize("name", nightly_but(["T5"], OTHERS))
def test_files_of_other_families_with_another_head(name, tmp_path):
    make, family, shapes, call = OTHERS[name]
    saved(make(), tmp_path / "m", **{head: torch.randn(*shape) for head, shape in shapes.items()})
    library = family.from_pretrained(tmp_path / "m").eval()
    head, table = library.get_output_embeddings().weight, library.get_input_embeddings().weight
    check(library, tmp_path / "m", tmp_path, call, tied=head is table)

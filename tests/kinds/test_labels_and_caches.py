"""Encoders with decoders: static caches, labels, and what a library makes of both, as in memory."""

import pytest
import torch
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from penstock.integrations import apply
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

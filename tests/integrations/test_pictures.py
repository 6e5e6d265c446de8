"""Models that take pictures: equal to the bit, whatever the sizes."""

import pytest
import torch
import transformers

from penstock.integrations import apply
from tests.integrations import models
from tests.integrations.models import SIZES, frozen

NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SEEN = NARROW | {"num_attention_heads": 4, "image_size": 32, "patch_size": 8}
TEXT = SIZES | NARROW
PICTURE, BEGIN, END, VIDEO = 120, 121, 122, 123
"""The numbers of the tokens that stand for a part of a picture, and around it."""
WORDS = [5, 6, 7]


def made(kind, **options):
    """A model of transformers of the configuration that its class names."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    return frozen(model(model.config_class(**options)))


def text(*parts):
    ids = torch.tensor([[one for part in parts for one in part]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pixels(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def gemma3():
    """The parts of a picture see each other, by a mask that transformers makes under `vmap`."""
    options = {
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
        "image_token_id": PICTURE,
        "mm_tokens_per_image": 4,
    }
    language = TEXT | {"head_dim": 8, "sliding_window": 8}
    seen = SEEN | {"vision_use_head": False}
    model = made("Gemma3ForConditionalGeneration", vision_config=seen, text_config=language, **options)
    given = text(WORDS, [BEGIN], [PICTURE] * 4, [END], WORDS)
    kinds = {"token_type_ids": (given["input_ids"] == PICTURE).long()}
    return model, given | kinds | {"pixel_values": pixels(1, 3, 32, 32)}


def qwen2vl(height=8, width=8):
    """Splits patches by the sizes of their pictures; 8 by 8 of them become 16 tokens."""
    ropes = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    seen = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"vision_start_token_id": BEGIN, "vision_end_token_id": END, "video_token_id": VIDEO}
    model = made(
        "Qwen2VLForConditionalGeneration",
        text_config=TEXT | {"rope_parameters": ropes},
        vision_config=seen,
        image_token_id=PICTURE,
        **tokens,
    )
    given = text(WORDS, [BEGIN], [PICTURE] * (height * width // 4), [END], WORDS)
    kinds = {"mm_token_type_ids": (given["input_ids"] == PICTURE).int()}
    patches = {
        "pixel_values": pixels(height * width, 96),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return model, given | kinds | patches


def blip2():
    """Its `generate` calls the parts of the model one by one, and reads a parameter."""
    seen = SEEN | {"image_size": 16}
    asked = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    language = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 32,
    }
    model = made(
        "Blip2ForConditionalGeneration",
        vision_config=seen,
        qformer_config=asked | {"encoder_hidden_size": 32},
        text_config=language | sizes,
        num_query_tokens=4,
        image_token_index=PICTURE,
    )
    return model, text([PICTURE] * 4, WORDS) | {"pixel_values": pixels(1, 3, 16, 16)}


def answered(model, given):
    """Three tokens and their logits."""
    made = model.generate(
        **{name: value.clone() for name, value in given.items()},
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat([made.sequences.flatten().float(), *(one.flatten() for one in made.logits)])


@pytest.mark.parametrize("make", [gemma3, qwen2vl, blip2])
def test_what_a_model_says_of_a_picture_is_what_it_says_in_memory(make, tmp_path):
    model, given = make()
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        for _ in range(2):
            assert torch.equal(answered(model, given), answered(reference, given))


def test_pictures_of_other_sizes_are_seen_as_in_memory(tmp_path):
    model, wide = qwen2vl(4, 16)
    _, square = qwen2vl(8, 8)  # as many patches
    assert wide["pixel_values"].shape == square["pixel_values"].shape
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        for given in (wide, square, wide):
            seen = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
            want = reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
            assert all(
                torch.equal(*pair) for pair in zip(seen.pooler_output, want.pooler_output, strict=True)
            )

"""Tiny models that take pictures, with random weights, and what their processors would give them."""

import torch
import transformers

from tests.integrations.models import SIZES, frozen

SEEN = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
PICTURE, BEGIN, END, VIDEO = 120, 121, 122, 123
"""The numbers of the tokens that stand for a part of a picture, and around it."""
WORDS = [5, 6, 7]

Given = dict[str, torch.Tensor]


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


def internvl():
    """Asks whether the sides of a picture are even."""
    seen = SEEN | {"image_size": [32, 32], "patch_size": [8, 8]}
    options = {"text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": PICTURE}
    model = made("InternVLForConditionalGeneration", vision_config=seen, **options)
    return model, text(WORDS, [PICTURE] * 4, WORDS) | {"pixel_values": pixels(1, 3, 32, 32)}


def smolvlm():
    options = {"text_config": {"model_type": "llama", **TEXT}, "image_token_id": PICTURE, "scale_factor": 2}
    model = made("SmolVLMForConditionalGeneration", vision_config=SEEN, **options)
    seen = {"pixel_values": pixels(1, 2, 3, 32, 32), "pixel_attention_mask": torch.ones(1, 2, 32, 32).long()}
    return model, text(WORDS, [PICTURE] * 8, WORDS) | seen


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

"""Tiny models of any architecture of transformers: its configuration class with every number made small.

The class says which settings there are, and the name of a setting how small it may be. A model that does not
come out of that, or does not run in memory, is no part of the zoo.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

RULES: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads|n_head_kv", 2),
    (r".*(attention_heads|_heads|_head|num_heads|n_heads)", 4),
    (r"(kv_lora|q_lora).*_rank|.*_lora_rank", 16),
    (r"head_dim|.*_head_dim|d_kv|kv_channels", 8),
    (r"vocab_size", 128),
    (r"image_size|input_size", 32),
    (r"patch_size|tubelet_size", 8),
    (r"num_frames|frames_per_clip", 2),
    (
        r"(num_hidden|num|n|encoder|decoder|hidden)_layers?|.*_(encoder|decoder|hidden)_layers|depth|n_blocks",
        2,
    ),
    (r"(num|n)_.*experts|num_experts|moe_num_experts", 4),
    (r".*(experts_per_tok|top_k|topk|experts_per_token)", 2),
    (r".*(intermediate|ffn|feed_forward|mlp|inner).*(size|dim|hidden)?|d_ff|n_inner", 64),
    (r".*(hidden|embed|embedding|model|projection|encoder|decoder|text|vision|output)_(size|dim|dims)", 32),
    (r"d_model|n_embd|dim|d_embed|hidden_dim|embed_dim|embedding_size|width|conv_dim|emb_dim", 32),
    (r"max_position_embeddings|n_positions|max_length|n_ctx", 128),
    (r"num_mel_bins|n_mels", 16),
    (r"max_source_positions|max_target_positions", 64),
    (r"num_queries|num_query_tokens|num_latents", 8),
)
"""The most that a number may be, by the whole name of its setting; the first rule that fits counts."""

KINDS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""What an architecture is tried as: the first of these that it can be."""

LARGEST = 64 << 20
"""Parameters of a model that is still tiny."""


def architectures() -> dict[str, str]:
    """The class of a model for each type of model that the installed transformers has."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind in KINDS:
        for name, made in getattr(modeling_auto, kind).items():
            found.setdefault(name, made if isinstance(made, str) else made[0])
    return dict(sorted(found.items()))


def tiny_model(kind: str) -> nn.Module:
    """A tiny model of a class with random weights. Raises whatever its library does where there is none."""
    import transformers

    made = getattr(transformers, kind)
    torch.manual_seed(0)
    config = made.config_class(**_small(made.config_class()))
    with torch.device("meta"):
        nparameters = sum(one.numel() for one in made(config).parameters())
    if nparameters > LARGEST:
        raise ValueError(f"{nparameters} parameters are not tiny")
    torch.manual_seed(0)
    model: nn.Module = made(config)
    return model.eval().requires_grad_(False)


def _small(config: Any) -> dict[str, Any]:
    """The settings of a configuration that differ from its own, and those of the configurations in it."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "dtype"):
            continue
        if hasattr(value, "to_dict"):
            found[name] = _small(value) | {"model_type": value.model_type}
        elif isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            found[name] = small_list(name, list(value))
        elif type(value) is int and not name.endswith(("_id", "_ids", "_index")):
            found[name] = small_number(name, value)
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int:
            found[name] = value % 97
    return {name: value for name, value in found.items() if value != getattr(config, name, None)}


def small_list(name: str, value: list[int]) -> list[int]:
    """A list of sizes, one for each stage of a model, with as many stages."""
    return [_small_one(name, one) for one in value]


def _small_one(name: str, one: int) -> int:
    if "depth" in name or "layers" in name or "blocks" in name:
        return min(one, 1)
    if "heads" in name:
        return min(one, 2)
    if re.search("size|dim|channel|filters", name) and one > 32:
        return 32
    return one


def small_number(name: str, value: int) -> int:
    """A number, or the most that one of its name may be."""
    return min(value, next((most for pattern, most in RULES if re.fullmatch(pattern, name)), value))

"""Tiny inputs of models of transformers, as their tokenizers and processors would make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_LENGTH, _FRAMES = 7, 40
"""Tokens of a tiny prompt, and frames of a tiny sound."""

_SIDE, _SAMPLES = 64, 8000
"""The side of a picture and the samples of a sound where the configuration does not state them."""

_PARTS = ("vision_config", "backbone_config", "encoder", "audio_config")
"""Configurations within one that may say how large pictures and sounds are."""


def tiny_inputs(model: Any) -> dict[str, torch.Tensor]:
    """What a model is called with, by name: the inputs that its signature names, and what these need.

    Raises LookupError where no input is known.
    """
    name = main_input_of(model)
    if model_generates(model):
        return _with_masks(model, {name: _made(model, name)})
    taken = inspect.signature(model.forward).parameters
    given = {key: make(model) for key, make in _MAKERS.items() if key in taken and key in (name, *_BESIDE)}
    return _with_masks(model, given or {name: _made(model, name)})


def main_input_of(model: Any) -> str:
    """The name of a model's first input."""
    name = model.main_input_name
    return str(name[0] if isinstance(name, list | tuple) else name)


def model_generates(model: Any) -> bool:
    """Whether a model is called by `generate`."""
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    return bool(can_generate())


def _made(model: Any, name: str) -> torch.Tensor:
    if name in _MAKERS:
        return _MAKERS[name](model)
    dummies: dict[str, torch.Tensor] = getattr(model, "dummy_inputs", {})
    if name not in dummies:
        raise LookupError(f"no tiny {name} is known")
    return dummies[name].to(model.device)


def _with_masks(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    taken = inspect.signature(model.forward).parameters
    if (ids := given.get("input_ids")) is not None:
        if "attention_mask" in taken or model_generates(model):
            given["attention_mask"] = torch.ones_like(ids)
        if not model_generates(model):
            if getattr(model.config, "type_vocab_size", 0) > 1 and "token_type_ids" in taken:
                given["token_type_ids"] = torch.zeros_like(ids)
            if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
                given["decoder_input_ids"] = ids.clone()
    return given


def _tokens(model: Any) -> torch.Tensor:
    """A prompt of one token that has no special meaning, several times."""
    config = model.config.get_text_config()
    held = [value for name, value in vars(config).items() if "_token_id" in name or "_token_index" in name]
    special = {number for one in held for number in (one if isinstance(one, list) else [one])}
    token = next(number for number in range(config.vocab_size) if number not in special)
    return torch.full((1, _LENGTH), token, device=model.device)


def _boxes(model: Any) -> torch.Tensor:
    return torch.zeros((1, _LENGTH, 4), dtype=torch.long, device=model.device)


def _picture(model: Any) -> torch.Tensor:
    side = _stated(model.config, "image_size", "input_size") or _SIDE
    sides = (side["height"], side["width"]) if isinstance(side, dict) else side
    height, width = sides if isinstance(sides, list | tuple) else (sides, sides)
    channels = _stated(model.config, "num_channels", "in_channels", "in_chans") or 3
    frames = getattr(model.config, "num_frames", None)  # of models of videos
    shape = (1, channels, height, width) if frames is None else (1, frames, channels, height, width)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _video(model: Any) -> torch.Tensor:
    frames = _stated(model.config, "frames_per_clip", "num_frames") or 2
    picture = _picture(model)
    return picture if picture.ndim > 4 else picture[:, None].repeat(1, frames, 1, 1, 1)


def _sound(model: Any) -> torch.Tensor:
    """Features of sound: half a minute for Whisper, which takes no other length."""
    config = model.config
    bands = _stated(config, "feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins") or 80
    if hasattr(config, "max_source_positions") and not hasattr(config, "input_feat_per_channel"):
        shape = (1, bands, 2 * config.max_source_positions)
    else:
        shape = (1, _FRAMES, bands)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _wave(model: Any) -> torch.Tensor:
    """A sound as samples, or as a spectrogram for models whose configuration says how long that is."""
    config = model.config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length") and hasattr(config, "patch_size"):
        shape: tuple[int, ...] = (1, config.max_length, config.num_mel_bins)
    elif not hasattr(config, "conv_stride") and hasattr(config, "audio_channels"):
        shape = (1, config.audio_channels, _SAMPLES)
    else:
        shape = (1, _SAMPLES)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _stated(config: Any, *names: str) -> Any:
    """The first of these settings that a configuration, or one of its parts, has."""
    parts = [config, *(part for name in _PARTS if (part := getattr(config, name, None)) is not None)]
    for part in parts:
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return None


_MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _picture,
    "pixel_values_videos": _video,
    "input_features": _sound,
    "input_values": _wave,
    "bbox": _boxes,
}

_BESIDE = ("input_ids", "pixel_values", "bbox")
"""Inputs that are given beside the first one to models that do not generate."""

"""Tiny calls of models and pipelines, made as users make them, so that programs exist before a real call."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.calls.arguments import is_state

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[Any], object]
"""A tensor, positional arguments, arguments by name, or a function that calls the model it is given."""

_LENGTH, _NEW_TOKENS = 7, 3
"""Tokens of a tiny prompt, and tokens that are generated."""

_STEPS, _FRAMES, _SAMPLE = 2, 5, 64
"""Denoising steps, frames of a video, and the side of latents where a pipeline does not state it."""


def make_call(model: Any, example: Example) -> None:
    """Call a model as an example says, without gradients; random number generators stay as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        if isinstance(example, torch.Tensor):
            model(example)
        elif callable(example):
            example(model)
        else:
            called = model if isinstance(model, nn.Module) else _undisturbed(model)
            given = pytree.tree_map(_copied, example, is_leaf=is_state)
            called(**given) if isinstance(example, Mapping) else called(*given)


def _copied(leaf: Any) -> Any:
    """A copy of an argument that the call would change, else the argument."""
    if is_state(leaf):
        return copy.deepcopy(leaf)
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf


def tiny_call(model: Any) -> Callable[[Any], object]:
    """A function that makes a tiny call of a transformers model or a diffusers pipeline, or none."""
    if not isinstance(model, nn.Module):
        return _draw
    if not hasattr(model, "main_input_name") or not hasattr(model, "config"):
        return lambda _: None
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    return _generate if can_generate() else _look


def _draw(pipeline: Any) -> None:
    """Run a pipeline with its own settings in few steps, and with images where it does not run without."""
    taken = inspect.signature(pipeline.__call__).parameters
    strength = taken["strength"].default if "strength" in taken else 1
    given = {"prompt": "a", "class_labels": [0], "num_frames": _FRAMES, "generator": torch.Generator()}
    given["num_inference_steps"] = math.ceil(_STEPS / strength)  # pipelines run that part of them
    copied = _undisturbed(pipeline)
    try:
        copied(**{name: value for name, value in given.items() if name in taken})
    except (AttributeError, TypeError, ValueError):  # raised where None is not what it needs
        if not (pictures := _pictures(pipeline, taken)):
            raise
        copied(**{name: value for name, value in {**given, **pictures}.items() if name in taken})


def _undisturbed(pipeline: Any) -> Any:
    """A pipeline of the same components but copied schedulers, without a progress bar."""
    from diffusers import DiffusionPipeline, SchedulerMixin

    copied = copy.copy(pipeline)
    for name, held in vars(pipeline).items():
        if isinstance(held, SchedulerMixin):
            vars(copied)[name] = copy.deepcopy(held)
        elif isinstance(held, DiffusionPipeline):
            vars(copied)[name] = _undisturbed(held)
    copied.set_progress_bar_config(disable=True)
    return copied


def _pictures(pipeline: Any, taken: Mapping[str, inspect.Parameter]) -> dict[str, object]:
    """Black images of the size that a pipeline draws, and a mask that hides nothing, by argument."""
    from PIL import Image

    size = _size(pipeline, taken)
    picture = Image.new("RGB", size)
    found: dict[str, object] = {"image": picture, "mask_image": Image.new("L", size, 255)}
    nets = getattr(getattr(pipeline, "controlnet", None), "nets", None)
    control = "control_image" if "control_image" in taken else "image"
    found |= {control: [picture] * len(nets) if nets else picture, "video": [picture] * _FRAMES}
    return {name: value for name, value in found.items() if name in taken}


def _size(pipeline: Any, taken: Mapping[str, inspect.Parameter]) -> tuple[int, int]:
    """Width and height of what a pipeline draws by default."""
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    configured = getattr(getattr(denoiser, "config", None), "sample_size", None)
    sample = getattr(pipeline, "default_sample_size", None) or configured or _SAMPLE
    sides = (sample, sample) if isinstance(sample, int) else (sample[1], sample[0])
    scale = getattr(pipeline, "vae_scale_factor", 1)
    own = [taken[name].default if name in taken else None for name in ("width", "height")]
    width, height = (given or side * scale for given, side in zip(own, sides, strict=True))
    return width, height


def _tokens(model: Any) -> torch.Tensor:
    """A prompt of one token that has no special meaning, several times."""
    config = model.config.get_text_config()
    held = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")]
    special = {number for one in held for number in (one if isinstance(one, list) else [one])}
    token = next(number for number in range(config.vocab_size) if number not in special)
    return torch.full((1, _LENGTH), token, device=model.device)


def _picture(model: Any) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    side, channels = config.image_size, getattr(config, "num_channels", 3)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.zeros((1, channels, height, width), dtype=model.dtype, device=model.device)


def _sound(model: Any) -> torch.Tensor:
    """Features of half a minute, the only length that Whisper takes."""
    shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


_INPUTS = {"input_ids": _tokens, "pixel_values": _picture, "input_features": _sound}


def _generate(model: Any) -> None:
    """Generate a few tokens with the model's own settings."""
    name = model.main_input_name
    given = {name: _INPUTS[name](model)}
    if name == "input_ids":
        given["attention_mask"] = torch.ones_like(given[name])
    model.generate(**given, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS)


def _look(model: Any) -> None:
    """Call a model with what a tokenizer or an image processor would give it."""
    taken = inspect.signature(model.forward).parameters
    given = {name: make(model) for name, make in _INPUTS.items() if name in taken}
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if getattr(model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    model(**given)

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

from benchmarks.zoo_inputs import (
    main_input_of,
    model_generates,
    padded_inputs,
    tiny_inputs,
)
from penstock.integrations.calls.arguments import is_state

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[Any], object]
"""A tensor, positional arguments, arguments by name, or a function that calls the model it is given; or
`"padded"`, for a tiny call and then one of two rows, of which one is padded."""

PADDED = "padded"
"""The example that `tiny_call` knows."""

_NEW_TOKENS = 3
"""Tokens that are generated behind a tiny prompt."""

_STEPS, _FRAMES, _SAMPLE = 2, 5, 64
"""Denoising steps, frames of a video, and the side of latents where a pipeline does not state it."""


def make_call(model: Any, example: Example) -> None:
    """Call a model as an example says, without gradients; random number generators stay as they were."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.accelerator.current_device_index()] if accelerator else []
    kind = accelerator.type if accelerator else "cuda"
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=kind):
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


def tiny_call(model: Any, *, padded: bool = False) -> Callable[[Any], object]:
    """A function that makes a tiny call of a transformers model or a diffusers pipeline.

    With `padded`, a model that takes a mask is called again, with two rows. It raises LookupError where no
    tiny call is known.
    """
    if not isinstance(model, nn.Module):
        return _draw
    if not hasattr(model, "main_input_name") or not hasattr(model, "config"):
        return _unknown
    ways = [tiny_inputs, padded_inputs] if padded else [tiny_inputs]
    make = _generate if model_generates(model) else _look
    return lambda called: [make(called, given) for way in ways if (given := way(model))]


def _unknown(model: Any) -> None:
    raise LookupError(f"what a {type(model).__name__} takes is not known")


def example_for(model: Any) -> str:
    """How `example=` looks for a model, in code; `inputs` are what its processor makes."""
    if not isinstance(model, nn.Module):
        given = _required(model.__call__) if callable(model) else ()
        return f"example=lambda pipeline: pipeline({', '.join(given) or '...'})"
    if hasattr(model, "main_input_name") and model_generates(model):
        return "example=lambda model: model.generate(**inputs, max_new_tokens=3)"
    names = dict.fromkeys(_required(model.forward))
    if hasattr(model, "main_input_name"):
        names = {main_input_of(model): None} | names
    return f"example={{{', '.join(f'{name!r}: ...' for name in names)}}}"


def _required(function: Any) -> list[str]:
    taken = inspect.signature(function).parameters.values()
    named = [one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [one.name for one in named if one.default is one.empty]


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


def _generate(model: Any, given: Mapping[str, torch.Tensor]) -> None:
    """Generate a few tokens with the model's own settings."""
    model.generate(**given, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS)


def _look(model: Any, given: Mapping[str, torch.Tensor]) -> None:
    """Call a model with what a tokenizer or an image processor would give it."""
    model(**given)

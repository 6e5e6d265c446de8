"""What penstock knows of transformers and diffusers: their flags, masks, components and methods."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import nn

from penstock.integrations.calls.assumptions import AskedMask, Assumptions
from penstock.integrations.emptied.watch import REMOVE_GLOBAL_HOOK, global_hook, name_of
from penstock.passes.building.refusals import refuse_scripted
from penstock.runtime.files.safetensors_file import reading
from penstock.schedule.bounded_file import open_bounded
from penstock.schedule.facts.errors import PassError

_MASKS = "transformers.masking_utils"
_DECISIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")

_PACKED = "find_packed_sequence_indices"
"""What finds sequences behind one another in a row, where there is neither a mask nor a cache."""

_UNDER_VMAP = "_vmap_expansion_sdpa"
"""What transformers makes masks with where a model gives functions of its own."""

_CALLED = ("encode", "decode", "post_process_latents")
"""Methods besides `forward` that pipelines of diffusers call and that read parameters."""

_EXPERTS = "is_concatenated"
"""What a module of transformers has that computes experts in a way which its configuration names."""

_CASTING = "layerwise_casting"
"""The name of a hook of diffusers that converts a part's weights before each call, and back after it."""

_LIBRARIES_WITH_HOOKS = ("torch", "transformers", "peft")

EXPORTING = threading.RLock()
"""Held while a model is exported, lowered or compiled. torch's tracing state and the libraries' caches belong
to the whole process: two threads at once would fail, or leave behind what the other one has set."""


@contextmanager
def as_when_called(decisions: Assumptions) -> Iterator[None]:
    """Export what a call of the model runs, and not what its library would rather have exported.

    Libraries ask whether they are compiled, and transformers whether a padding mask is all ones, which
    decides between kernels with other last bits. Inside, this thread is told that it is not compiled, and
    `decisions` answer for its masks; masks of other threads are looked at as ever. torch's flags hold for
    the whole process, though: another thread that compiles or exports code of its own meanwhile is told too
    that it does not. Threads that export through penstock take turns (`EXPORTING`).
    """
    with EXPORTING, _answered(decisions), _not_compiling():
        yield


@contextmanager
def _not_compiling() -> Iterator[None]:
    flags: Any = torch.compiler
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = False
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before


@contextmanager
def _answered(decisions: Assumptions) -> Iterator[None]:
    """Let `decisions` answer what transformers asks about padding masks and positions in this thread.

    Masks that it makes under `vmap` are made by broadcasting meanwhile, which gives the same ones.
    """
    thread = threading.get_ident()
    masks: Any = sys.modules.get(_MASKS)
    originals = {name: getattr(masks, name) for name in (*_DECISIONS, _PACKED, _UNDER_VMAP)} if masks else {}

    def decided(original: Any) -> Any:
        def decide(padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
            if padding_mask is not None and threading.get_ident() == thread:
                padding_mask = AskedMask(padding_mask, decisions)
            return original(padding_mask, *args, **kwargs)

        return decide

    def packed(position_ids: torch.Tensor) -> torch.Tensor | None:
        made: torch.Tensor | None = originals[_PACKED](position_ids)
        asked = made is not None and threading.get_ident() == thread
        return None if asked and decisions.all(made[:, -1] == 0) else made  # type: ignore[index]

    for name in _DECISIONS if masks else ():
        setattr(masks, name, decided(originals[name]))
    if masks:
        setattr(masks, _UNDER_VMAP, _broadcast(masks))
        setattr(masks, _PACKED, packed)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masks, name, original)


def _broadcast(masks: Any) -> Any:
    """What makes a mask of a function of indices by broadcasting, as a trace of `vmap` is no program."""

    def expansion(function: Any) -> Any:
        def expanded(*indices: Any) -> Any:
            made = function(*masks._non_vmap_expansion_sdpa(*indices))
            return made.expand([one.shape[0] for one in indices])

        return expanded

    return expansion


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Take a module's own hooks away inside, where calls are not real ones."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    held = {name: dict(vars(module)[name]) for name in names}
    try:
        for name in names:
            vars(module)[name].clear()
        yield
    finally:
        for name in names:
            vars(module)[name].update(held[name])


def refuse_wrapped(module: nn.Module, name: str) -> None:
    """Raise PassError for a module that is on several devices, or that another tool streams or compiles.

    Hooks on all modules, which would not be called for parts, are refused too.
    """
    refuse_scripted(module, name)
    refuse_global_hooks()
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if attention == "flex_attention":
        raise PassError(
            f"{name} uses flex_attention, which torch compiles by itself and cannot export: load "
            'it with attn_implementation="sdpa" or "eager"'
        )
    for child in module.modules():
        if hasattr(child, _EXPERTS) and getattr(child.config, "_experts_implementation", None) == "eager":
            raise PassError(
                f"{name} computes its experts one after another, as values decide, which cannot be exported: "
                'load it with experts_implementation="grouped_mm", or call '
                'set_experts_implementation("grouped_mm")'
            )
        if hasattr(child, "_hf_hook"):
            raise PassError(
                f"{name} was wrapped by accelerate: remove its hooks first "
                "(accelerate.hooks.remove_hook_from_module(model, recurse=True)), or load it without "
                "device_map"
            )
        _refuse_hooks_of_diffusers(child, name)
    _refuse_hooks(module, name)
    devices = sorted({str(p.device) for p in module.parameters()})
    if len(devices) > 1:
        raise PassError(f"{name} lies on several devices, {', '.join(devices)}: move it to one")


def refuse_global_hooks() -> None:
    """Raise PassError where a hook on all modules is registered. See `global_hook`."""
    if hook := global_hook():
        raise PassError(
            f"{hook} is a hook on all modules, which a program would not run for parts: {REMOVE_GLOBAL_HOOK}"
        )


def _refuse_hooks_of_diffusers(module: nn.Module, name: str) -> None:
    """Raise PassError for a part whose `forward` diffusers has replaced, to offload, cast or cache."""
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    if _CASTING in hooks:
        raise PassError(
            f"{name} has layerwise casting of diffusers, which converts weights in each call: load it again, "
            "without enable_layerwise_casting(), in the dtype that it computes in"
        )
    if hooks:
        raise PassError(f"{name} has hooks of diffusers ({', '.join(hooks)}): load it without them")


def _refuse_hooks(module: nn.Module, name: str) -> None:
    """Raise PassError for a hook on a part of the module, which a program would never call.

    Hooks of these libraries belong to the computation: they normalise weights, or collect hidden states
    within a call.
    """
    for path, child in module.named_modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks) if path else ():
            for hook in hooks.values():
                if _library_of(hook) == "penstock":
                    raise PassError(
                        f"{name} streams already: call restore() on what apply returned before it is applied "
                        "again; what load returned is loaded again with the other cap"
                    )
                if _library_of(hook) not in _LIBRARIES_WITH_HOOKS:
                    raise PassError(
                        f"{path} in {name} has the hook {name_of(hook)}, which a program would not run: "
                        "remove it (remove() of what registered it), and hook the whole model, or ask for "
                        "output_hidden_states; what computes something belongs into a module"
                    )


def _library_of(hook: Any) -> str:
    made = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(made, "__module__", None) or type(made).__module__).partition(".")[0]


def components_of(model: Any) -> dict[str, nn.Module]:
    """The modules that a model or a pipeline consists of, by name. Raises PassError where there are none."""
    if isinstance(model, nn.Module):
        _refuse_virtual_tokens(model)
        get_base: Any = getattr(model, "get_base_model", lambda: model)  # whose own methods peft calls
        module: nn.Module = get_base()
        return {type(module).__name__: module}
    held = getattr(model, "components", None)
    if not isinstance(held, dict):
        raise PassError(
            f"expected a module, a transformers model or a diffusers pipeline, got {type(model).__name__}"
        )
    _refuse_stand_ins(model, held)
    modules = dict(_streamed(name, one) for name, one in held.items() if isinstance(one, nn.Module))
    found = {names[0]: modules[names[0]] for names in _by_object(modules).values()}
    if not found:
        raise PassError(f"the {type(model).__name__} has no component that is a module")
    _refuse_shared(found)
    return found


def owner_of(name: str, module: nn.Module) -> str:
    """A component for people: its name, its class, and where its library loaded it from, if that is known."""
    kind, origin = type(module).__name__, origin_of(module)
    return (kind if name == kind else f"{name} ({kind})") + (f" of {origin}" if origin else "")


def origin_of(module: nn.Module) -> str:
    """The folder or the name that a library loaded a module from; empty where it does not say."""
    origin = getattr(getattr(module, "config", None), "_name_or_path", None)
    return str(origin) if isinstance(origin, str | PathLike) else ""


def _streamed(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The component, or the vision model of a safety checker, which decides in Python about pictures."""
    if type(module).__name__.endswith("SafetyChecker") and hasattr(module, "vision_model"):
        return f"{name}.vision_model", module.get_submodule("vision_model")
    return name, module


def _refuse_virtual_tokens(model: Any) -> None:
    """Raise PassError for an adapter that peft's own code runs around parts of the model."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
        raise PassError(
            f"the adapter is of the kind {config.peft_type.value}, which adds virtual tokens to each call in "
            "code of peft's own: it cannot be streamed; use an adapter of weights, such as LoRA"
        )


def _refuse_stand_ins(pipeline: Any, held: Mapping[str, Any]) -> None:
    """Raise PassError for a component of another type than a module, which would silently stay in memory."""
    for name, hint in _hints(type(pipeline).__init__).items():
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
        given = held.get(name)
        modules = any(issubclass(kind, nn.Module) for kind in kinds)
        if modules and given is not None and not isinstance(given, (nn.Module, *kinds)):
            raise PassError(
                f"component {name} is a {type(given).__name__} and no module, so that it cannot stream: give "
                "the pipeline the module of its library, or apply penstock to single components"
            )


def _hints(function: Any) -> dict[str, Any]:
    """The type hints of a function, or none where they cannot be resolved."""
    try:
        return get_type_hints(function)
    except Exception:
        return {}


def _refuse_shared(modules: Mapping[str, nn.Module]) -> None:
    """Raise PassError for a parameter that two components share, as each streams by itself."""
    seen: dict[int, tuple[str, str]] = {}
    for name, module in modules.items():
        for fqn, value in module.named_parameters():
            other, path = seen.setdefault(id(value), (name, fqn))
            if other != name:
                raise PassError(
                    f"{other}.{path} and {name}.{fqn} are one parameter: components stream one at a time, so "
                    f"give {name} a copy of it, {name}.{fqn} = nn.Parameter({name}.{fqn}.detach().clone())"
                )


def _by_object(modules: dict[str, nn.Module]) -> dict[int, list[str]]:
    """The names of each module; a pipeline may hold one under several names."""
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    return names


def entries_of(module: nn.Module) -> list[str]:
    """The methods through which a library calls a module: `forward`, and for some modules others."""
    entries = ["forward"]
    entries += [name for name in _CALLED if _is_diffusers(module) and hasattr(module, name)]
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        get_encoder: Any = getattr(module, "get_encoder", lambda: None)
        encoder = get_encoder()
        entries += [f"{name}.forward" for name, child in module.named_modules() if child is encoder and name]
    return list(dict.fromkeys([*entries, *_embedding_of(module), *_features_of(module)]))


def _embedding_of(module: nn.Module) -> list[str]:
    """The `forward` of the embedding of tokens, which users and other models call to make `inputs_embeds`."""
    get_embedding: Any = getattr(module, "get_input_embeddings", lambda: None)
    try:
        embedding = get_embedding()
    except NotImplementedError:  # of models without one
        return []
    kinds = torch.nn.Embedding
    found = [
        name for name, child in module.named_modules() if child is embedding and isinstance(child, kinds)
    ]
    return [f"{name}.forward" for name in found if name]


def _features_of(module: nn.Module) -> list[str]:
    """The methods that encode images, videos, audio or text, which `generate` and users call."""
    base: Any = getattr(module, "base_model", None)
    paths = [path for path, child in module.named_modules() if child is base]
    made = [f"get_{kind}_features" for kind in ("image", "video", "audio", "text")]
    found = [name for name in made if callable(getattr(base, name, None))]
    return [f"{path}.{name}".removeprefix(".") for path in paths for name in found]


def _is_diffusers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("diffusers.")


def add_generation_config(model: nn.Module, folder: Path) -> None:
    """Give a transformers model the settings for `generate` of its folder. Raises SourceError."""
    with reading(folder):
        path = folder / "generation_config.json"
        if hasattr(model, "generation_config") and path.is_file():
            from transformers import GenerationConfig

            with open_bounded(path, "a configuration"):
                pass
            model.generation_config = GenerationConfig.from_pretrained(folder)


def closing(target: Any) -> Any:
    """Let an object of a library, which stays what it is, be a context manager that closes what it runs on.

    `with` asks the class and not the object, so the object gets a class that says nothing else. Its name is
    that of its own class, by which libraries look it up.
    """
    own = type(target)
    facts = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    closing_class: Any = types.new_class(own.__name__, (own,), exec_body=lambda held: held.update(facts))
    closing_class.__enter__, closing_class.__exit__ = _enter, _exit
    target.__class__ = closing_class
    return target


def _enter(target: Any) -> Any:
    return target


def _exit(target: Any, *_: object) -> None:
    target.penstock_applied.close()

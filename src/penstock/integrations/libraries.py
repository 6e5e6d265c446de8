"""What penstock knows of transformers and diffusers: their components and methods."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch import nn

from penstock.runtime.files.safetensors_file import reading
from penstock.schedule.bounded_file import open_bounded
from penstock.schedule.facts.errors import PassError

_CALLED = ("encode", "decode", "post_process_latents")
"""Methods besides `forward` that pipelines of diffusers call and that read parameters."""

_FEATURES = ("get_image_features", "get_video_features", "get_audio_features", "get_text_features")
"""Methods of transformers models that encode inputs; `generate` and users call them."""


def components_of(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a model or a pipeline by name. Raises PassError where there are none."""
    if isinstance(model, nn.Module):
        if hasattr(model, "get_base_model"):  # peft wraps a model, and calls the model's own methods
            model = model.get_base_model()  # type: ignore[operator]
        return {type(model).__name__: model}
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        hint = ": give its model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        if isinstance(model, str | PathLike):
            hint = ": folders and names are for penstock.integrations.load"
        expected = "expected a module, a transformers model or a diffusers pipeline"
        raise PassError(f"{expected}, got a {type(model).__name__}{hint}")
    _refuse_stand_ins(model, components)
    modules: dict[str, nn.Module] = {}
    for name, component in components.items():
        if isinstance(component, nn.Module):
            path, module = _streamed(name, component)
            if module not in modules.values():  # a pipeline may hold a module under several names
                modules[path] = module
    if not modules:
        raise PassError(f"the {type(model).__name__} has no component that is a module")
    _refuse_shared(modules)
    return modules


def owner_of(name: str, module: nn.Module) -> str:
    """Return for people a component's name, its class, and where its library loaded it from, if known."""
    kind, origin = type(module).__name__, origin_of(module)
    return (kind if name == kind else f"{name} ({kind})") + (f" of {origin}" if origin else "")


def origin_of(module: nn.Module) -> str:
    """Return the folder or the name that a library loaded a module from; empty where it does not say."""
    origin = getattr(getattr(module, "config", None), "_name_or_path", None)
    return str(origin) if isinstance(origin, str | PathLike) else ""


def _streamed(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return a component, or the vision model of a safety checker, which decides in Python about pictures."""
    if type(module).__name__.endswith("SafetyChecker") and hasattr(module, "vision_model"):
        return f"{name}.vision_model", module.get_submodule("vision_model")
    return name, module


def _refuse_stand_ins(pipeline: Any, components: Mapping[str, Any]) -> None:
    """Raise PassError for a component of another type than a module, which would silently stay in memory."""
    for name, hint in _hints(type(pipeline).__init__).items():
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
        component = components.get(name)
        modules = any(issubclass(kind, nn.Module) for kind in kinds)
        if modules and component is not None and not isinstance(component, (nn.Module, *kinds)):
            raise PassError(
                f"component {name} is a {type(component).__name__} and no module, so that it cannot stream: "
                "give the pipeline the module of its library, or apply penstock to single components"
            )


def _hints(function: Any) -> dict[str, Any]:
    """Return the type hints of a function, or none where they cannot be resolved."""
    try:
        return get_type_hints(function)
    except Exception:
        return {}


def _refuse_shared(modules: Mapping[str, nn.Module]) -> None:
    """Raise PassError for a parameter that two components share, as each streams by itself."""
    seen: dict[int, tuple[str, str]] = {}
    for name, module in modules.items():
        for fqn, value in module.named_parameters():
            first, path = seen.setdefault(id(value), (name, fqn))
            if first != name:
                raise PassError(
                    f"{first}.{path} and {name}.{fqn} are one parameter: components stream one at a time, so "
                    f"give {name} a copy of it, {name}.{fqn} = nn.Parameter({name}.{fqn}.detach().clone())"
                )


def entries_of(module: nn.Module) -> list[str]:
    """Return the methods other than `forward` through which a module and its parts are called."""
    is_diffusers = type(module).__module__.startswith("diffusers.")
    methods = [name for name in _CALLED if is_diffusers and hasattr(module, name)]
    base: Any = getattr(module, "base_model", None)
    features = [name for name in _FEATURES if callable(getattr(base, name, None))]
    paths = [path for path, child in module.named_modules() if child is base]
    return methods + [f"{path}.{name}".removeprefix(".") for path in paths for name in features]


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
    kind: Any = type(target)

    def reduce(target: Any, _: object) -> Any:  # a pickle or a copy has the library's class
        function, (_, *arguments), *state = kind.__reduce_ex__(target, 1)
        return function, (kind, *arguments), *state

    facts = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {
        "__enter__": lambda target: target,
        "__exit__": lambda target, *_: target.penstock_applied.close(),
        "__reduce_ex__": reduce,
    }
    target.__class__ = type(kind)(kind.__name__, (kind,), facts | methods)
    return target

"""Adapters of peft: which parameters of a model belong to one, and how it gets the values of another.

Another adapter fits where only values differ. Layers, ranks, scaling and settings are part of the exported
program, so an adapter that differs in those is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.runtime.files.safetensors_file import TensorEntry, is_safetensors, reading
from penstock.runtime.files.tensor_file import TensorFile, open_tensors
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import PassError, SourceError, StreamError

_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""Names of an adapter's file in its folder: of peft and transformers, and of diffusers."""

_SETTINGS, _METADATA = "adapter_config.json", "lora_adapter_metadata"
"""Where an adapter's settings are: in a file beside it, or in its metadata."""

_PEFT = "base_model.model."
"""The prefix of every name that peft writes."""

_BESIDE = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
        "lora_dropout", "megatron_core", "peft_type", "runtime_config",
        "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
        "alpha_pattern", "lora_alpha", "r", "rank_pattern",
    }
)  # fmt: skip
"""Settings that are not compared: they do nothing in a call, the tensors or the kind of adapter tell them, or
they are scalings, which are compared layer by layer."""

_MAGNITUDE = "lora_magnitude_vector"
"""DoRA's module with one parameter, whose name is not written into files."""

_START, _OWN_STARTS = "init_lora_weights", (True, False, "gaussian", "orthogonal", "eva")
"""The setting of how an adapter's values began, and its values that leave the model's own weights alone."""

_AGAIN = "restore() the model, load that adapter with its library, and apply penstock again"


@dataclass(frozen=True)
class _Stored:
    """A tensor of an adapter in its file, which is read once its shape is known to be the model's."""

    file: Path
    name: str
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, opened: TensorFile) -> torch.Tensor:
        """Return the values. Raises SourceError where the file has changed."""
        if opened.entries.get(self.name) != self.entry:
            raise SourceError(f"{self.file} was written to while it was read: try again")
        return opened.get_tensor(self.name)


@dataclass(frozen=True)
class Adapter:
    """An adapter in a file: its tensors by name, and its settings, or None where the file does not state
    them."""

    source: Path
    tensors: Mapping[str, _Stored]
    settings: Mapping[str, Any] | None

    @classmethod
    def read(cls, source: Path) -> Adapter:
        """Read the adapter of a folder or of a safetensors file. Raises SourceError where there is none."""
        files = [source, *(source / name for name in _FILES)]
        with reading(source):
            file = next((one for one in files if one.is_file() and is_safetensors(one)), None)
            if file is None:
                raise SourceError(
                    f"{source} holds no adapter: give a safetensors file, or a folder with {_FILES[0]}"
                )
            with open_tensors(file) as opened:
                written: str | bytes | None = opened.metadata.get(_METADATA)
                tensors = {
                    name.removeprefix(_PEFT): _Stored(file, name, entry)
                    for name, entry in opened.entries.items()
                }
            place, beside = file, file.parent / _SETTINGS
            if written is None and os.path.lexists(beside):
                place, written = beside, read_bounded(beside, "a configuration")
        return cls(source, tensors, None if written is None else _parsed(written, place))

    def part(self, prefix: str) -> Adapter:
        """The part for the component whose names begin with `prefix`, without that prefix."""
        tensors = {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}
        settings = {
            k.removeprefix(prefix): v for k, v in (self.settings or {}).items() if k.startswith(prefix)
        }
        return Adapter(self.source, tensors, settings or None)


def _parsed(written: str | bytes, place: Path) -> dict[str, Any]:
    try:
        settings = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"the adapter's settings in {place} are no JSON ({error}): get an intact copy"
        ) from error
    if not isinstance(settings, dict):
        raise SourceError(
            f"the adapter's settings in {place} are a {type(settings).__name__} and no object: "
            "get an intact copy"
        )
    return settings


def adapters_of(module: nn.Module) -> list[str]:
    """The names of the adapters that a module has."""
    return list(getattr(module, "peft_config", ()))


def names_in_files(module: nn.Module, adapter: str) -> dict[str, str]:
    """Map the names that the library writes for an adapter's parameters to their FQNs."""
    found: dict[str, str] = {}
    for path, layer in _layers(module):
        kinds = {*layer.adapter_layer_names, *layer.other_param_names}  # the latter are in no file
        for name, _ in layer.named_parameters():
            kind, *rest = name.split(".")
            if kind in kinds and rest[0] == adapter:
                inside = rest[1:] if kind != _MAGNITUDE else []
                found[".".join([path, kind, *inside])] = f"{path}.{name}"
    return found


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that adapters replaced, by path."""
    return ((path, one) for path, one in module.named_modules() if hasattr(one, "adapter_layer_names"))


def by_adapter(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a module's tensors by the file that each goes to: the module's own, and those of each adapter."""
    own = dict(tensors)
    groups = [
        {fqn: own.pop(fqn) for fqn in names_in_files(module, adapter).values() if fqn in own}
        for adapter in adapters_of(module)
    ]
    return [own, *filter(None, groups)]


def adapted_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of peft that can merge adapters into a weight."""
    return [one for one in module.modules() if hasattr(one, "merged_adapters")]


def unmerge_disabled(layers: Sequence[Any]) -> bool:
    """Unmerge adapters that are disabled, as peft does within the next call of their layers; say if any was."""
    unmerged = [one for one in layers if one.merged_adapters and one.disable_adapters]
    for one in unmerged:
        one.unmerge()
    return bool(unmerged)


def refuse_transposed(name: str, value: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """Raise PassError for a weight that is not contiguous and shares the memory of another one."""
    storage = value.untyped_storage()._cdata
    for other, tensor in others.items():
        if tensor is not value and tensor.untyped_storage()._cdata == storage:
            raise PassError(
                f"weight {name} has strides {list(value.stride())} in the memory of {other}, to which it is "
                "tied, and a contiguous copy would untie it: where an adapter ties them "
                "(ensure_weight_tying of peft), merge it first (merge_and_unload), or add it without that"
            )


def named_adapter(modules: Mapping[str, nn.Module], adapter: str | None) -> str:
    """The name of the adapter to work on: `adapter`, or the only one. Raises StreamError where none fits."""
    names = list(dict.fromkeys(name for module in modules.values() for name in adapters_of(module)))
    if not names:
        raise StreamError(
            "there is no adapter whose values could be replaced: load the model and that adapter with their "
            "library, and apply penstock to that"
        )
    chosen = names[0] if adapter is None and len(names) == 1 else adapter
    if chosen not in names:
        found = f"there is no adapter {chosen!r}" if chosen else f"there are {len(names)} adapters"
        raise StreamError(f"{found}: name one of {', '.join(names)}")
    return chosen


def by_prefix(modules: Mapping[str, nn.Module], given: Adapter, *, alone: bool) -> dict[str, nn.Module]:
    """Key the components by the prefix that their names have in the adapter's file.

    In the file of a pipeline it is the component's name. A component that is `alone` may have none, or that
    of the pipeline for which the file was made.
    """
    if not alone:
        return {f"{name}.": module for name, module in modules.items()}
    (module,) = modules.values()
    head, dot, _ = next(iter(given.tensors), "").partition(".")
    return {"" if hasattr(module, head) else head + dot: module}


def other_values(
    modules: Mapping[str, nn.Module], given: Adapter, adapter: str
) -> dict[str, dict[str, torch.Tensor]]:
    """The values of the adapter in the file for each component that has it, by FQN.

    `modules` and the result are keyed by prefix. Raises StreamError where more than values differs.
    """
    having = {prefix: module for prefix, module in modules.items() if adapter in adapters_of(module)}
    others = [name for name in given.tensors if not name.startswith(tuple(having))]
    if others:
        raise StreamError(
            f"{given.source} has {others[0]}, for which there is no adapter {adapter!r}: {_AGAIN}"
        )
    return {prefix: _values(module, given.part(prefix), adapter) for prefix, module in having.items()}


def _values(module: Any, given: Adapter, adapter: str) -> dict[str, torch.Tensor]:
    fqns, parameters = names_in_files(module, adapter), dict(module.named_parameters(remove_duplicate=False))
    kind = module.peft_config[adapter].peft_type
    if (found := (given.settings or {}).get("peft_type", kind)) != kind:
        raise StreamError(
            f"{given.source} says that it is {found}, and adapter {adapter!r} of the model is {kind.value}: "
            f"{_AGAIN}"
        )
    for name in sorted(fqns.keys() ^ given.tensors.keys()):
        has, lacks = ("the model", given.source) if name in fqns else (given.source, "the model")
        raise StreamError(f"adapter {adapter!r} has {name} in {has} and not in {lacks}: {_AGAIN}")
    for name, fqn in fqns.items():
        shapes = [list(one.shape) for one in (parameters[fqn], given.tensors[name])]
        if shapes[0] != shapes[1]:
            raise StreamError(
                f"{name} is {shapes[0]} in the model and {shapes[1]} in {given.source}: another rank needs "
                f"another program, so {_AGAIN}"
            )
    _refuse_damaged_pattern(given)
    for what, here, there in _differing(module, given.settings, adapter):
        raise StreamError(
            f"{what} of adapter {adapter!r} is {here} in the model and {there} in {given.source}; it is part "
            f"of the program: {_AGAIN}"
        )
    values: dict[str, torch.Tensor] = {}
    for file in {one.file for one in given.tensors.values()}:  # one at most
        with open_tensors(file) as opened:
            values = {name: one.read(opened) for name, one in given.tensors.items()}
    _refuse_other_ties(fqns, parameters, values, given.source)
    own = {fqn for fqn, _ in module.named_parameters()}  # named once where they are tied
    return {fqn: values[name].to(parameters[fqn].dtype) for name, fqn in fqns.items() if fqn in own}


_LONGEST, _REPEATS = 2000, 3
"""The most characters of a regular expression for the names of layers, and the most repetitions in it."""


def _refuse_damaged_pattern(given: Adapter) -> None:
    """Raise SourceError where `alpha_pattern` does not map regular expressions."""
    pattern = (given.settings or {}).get("alpha_pattern") or {}
    said = f"alpha_pattern in the settings of {given.source} is"
    if not isinstance(pattern, dict):
        raise SourceError(f"{said} a {type(pattern).__name__} and no object: get an intact copy")
    for key in pattern:
        try:
            re.compile(key)
        except (re.error, RecursionError, OverflowError) as error:
            raise SourceError(
                f"{said} for {key!r:.200}, which is no regular expression ({error}): get an intact copy"
            ) from error
        # Matched by backtracking: what repeats a group, or much, could take for ever.
        if len(key) > _LONGEST or re.search(r"\)[*+?{]", key) or len(re.findall(r"[*+{]", key)) > _REPEATS:
            raise SourceError(
                f"{said} for {key!r:.200}, which repeats more than names of layers need: name the layers"
            )


def _refuse_other_ties(
    fqns: Mapping[str, str],
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    source: Path,
) -> None:
    """Raise StreamError where parameters that are tied in the model differ in the file."""
    tied: dict[tuple[int, int], str] = {}
    for name, fqn in fqns.items():
        place = parameters[fqn].untyped_storage()._cdata, int(parameters[fqn].storage_offset())
        first = tied.setdefault(place, name)
        if not torch.equal(values[first], values[name]):
            raise StreamError(
                f"{first} and {name} are tied in the model and have different values in {source}: {_AGAIN}"
            )


def _differing(
    module: Any, settings: Mapping[str, Any] | None, adapter: str
) -> Iterator[tuple[str, object, object]]:
    """Every setting that computes something else: its name, its value in the model, and that in the file."""
    config = module.peft_config[adapter]
    here, there = config.to_dict(), {**_defaults(config), **(settings or {})}
    for key in sorted(here.keys() - _BESIDE if settings else {_START, "use_rslora"} & here.keys()):
        values = here.get(key), there.get(key)
        own = key == _START and all(value in _OWN_STARTS for value in values)
        if _as_read(values[0]) != _as_read(values[1]) and not own:
            yield key, *values
    for path, layer in _layers(module):
        if adapter in getattr(layer, "merged_adapters", ()):
            yield f"{path}, into whose weight it is merged,", "merged", "not"
        yield from _differing_alpha(path, layer, adapter, there if settings else None)


def _defaults(config: Any) -> dict[str, Any]:
    """The values of the settings that a file may leave out."""
    return {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(config)
    }


def _as_read(value: object) -> object:
    """A setting as it is after JSON, which has no sets."""
    return sorted(value) if isinstance(value, set) else value


def _differing_alpha(
    path: str, layer: Any, adapter: str, settings: Mapping[str, Any] | None
) -> Iterator[tuple[str, object, object]]:
    """As `_differing`, for one layer. Without settings alpha is the rank, as in diffusers."""
    from peft.utils.other import get_pattern_key

    name = "lora_alpha" if hasattr(layer, "lora_alpha") else "alpha"
    ranks, alphas = getattr(layer, "r", {}), getattr(layer, name, {})
    if adapter not in ranks or adapter not in alphas:
        return
    alpha = ranks[adapter]
    if settings is not None:
        patterns = settings.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(list(patterns), path), settings.get(name))
    if alphas[adapter] != alpha:
        yield f"{name} ({path})", alphas[adapter], alpha

"""Merge a LoRA adapter of peft into the checkpoint of its model, one weight at a time."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.applied import load
from penstock.integrations.emptied.absent import value_of
from penstock.integrations.saved import refuse_folder, refuse_model, save_model, write_folder
from penstock.integrations.training.adapting import refuse_folder_without, refuse_other_model, refusing
from penstock.runtime.checkpoint.convert import Converted
from penstock.runtime.files.artifact_files import Progress
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.sizes import parse_size

_NAME = "default"
"""What peft calls an adapter that is the only one."""

_BESIDE = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.jinja", "*.model", "*processor_config.json"),
)
"""Files of a model's folder that texts and pictures need, and that its library does not save with it."""


def merge(
    folder: Path,
    adapter: Path,
    target: Path,
    *,
    shard_size: int | str = "5GB",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write a model of transformers with a LoRA adapter merged into it, as `merge_and_unload` of peft does.

    peft itself merges, one layer at a time, with the base weight of that layer in memory, so the bits are
    those that it gives. Tokenizers are copied. Memory is that of the adapter and a few weights.

    Args:
        folder: The model's folder.
        adapter: The folder that `save_pretrained` of peft wrote.
        target: A folder that does not exist, or is empty.
        shard_size: Bytes of a file of weights at most.
        dtype: What `from_pretrained` takes, such as `"bfloat16"`.
        progress: What is told how many bytes are written.

    Raises:
        SourceError: The adapter is none of LoRA, is not for this model, or cannot be merged layer by layer;
            or there is something at `target`, or it cannot be written. Nothing is written then.
    """
    refuse_folder(target)
    _refuse_kind(adapter)
    most = parse_size(shard_size, name="shard_size")
    written: list[Converted] = []
    with load(folder, dtype=dtype) as model, torch.no_grad():
        refuse_model(model)
        merged, layers = _unloaded(_adapted(model, folder, adapter))

        def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name not in layers:
                return value_of(tensor)
            return _merged(merged.get_parameter(name), layers[name])

        def build(unfinished: Path) -> None:
            written.append(save_model(merged, unfinished, most, read, progress))
            for path in folder.iterdir():
                if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _BESIDE):
                    shutil.copyfile(path, unfinished / path.name)

        write_folder(target, build)
    return replace(written[0], files=tuple(target / path.name for path in written[0].files))


def _refuse_kind(adapter: Path) -> None:
    """Raise SourceError for a folder that holds no LoRA adapter of peft in safetensors."""
    from peft import PeftConfig, PeftType

    refuse_folder_without(adapter, "adapter_config.json", "adapter_model.safetensors")
    with refusing(f"{adapter}/adapter_config.json cannot be read"):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != PeftType.LORA:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise SourceError(f"{adapter} is an adapter of kind {kind}, and only LoRA is merged here: use peft")
    if config.layer_replication:
        raise SourceError(f"{adapter} replicates layers, which peft cannot merge: train one that does not")


def _adapted(model: nn.Module, folder: Path, adapter: Path) -> Any:
    """Return the model with its adapter. Raises SourceError where one has weights that the other has not."""
    from peft import PeftModel

    with refusing(f"{adapter} cannot be put on {folder}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
        names = adapted.load_adapter(str(adapter), _NAME, torch_device="cpu")
    refuse_other_model(adapter, folder, names)
    return adapted


@dataclass(frozen=True)
class _Merge:
    """A layer of peft that merges its adapters into the parameters of its base layer."""

    layer: Any
    run: Callable[[], None]

    @property
    def keys(self) -> list[str]:
        """The keys of those parameters in the base layer."""
        only = getattr(self.layer, "parameter_name", None)  # of a stack of experts
        return [only] if only else list(self.layer.get_base_layer()._parameters)


def _unloaded(adapted: Any) -> tuple[nn.Module, dict[str, list[_Merge]]]:
    """Take peft's layers out of a model; return it, and by parameter what is to be merged, in order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merges: list[_Merge] = []
    for path, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            if hasattr(layer, "unload_and_optionally_merge_module") and not hasattr(layer, "parameter_name"):
                raise SourceError(
                    f"the layer {path} ({type(layer).__name__}) cannot be merged by itself: merge with peft"
                )
            vars(layer)["merge"] = _deferred(layer, merges)
    with refusing("peft cannot merge this adapter"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted.merge_and_unload()
    by_parameter: dict[int, list[_Merge]] = {}
    for merge in merges:
        for key in merge.keys:
            by_parameter.setdefault(id(merge.layer.get_base_layer()._parameters[key]), []).append(merge)
    named = model.named_parameters(remove_duplicate=False)
    return model, {name: by_parameter[id(value)] for name, value in named if id(value) in by_parameter}


def _deferred(layer: Any, merges: list[_Merge]) -> Callable[..., None]:
    """Return what stands for a layer's `merge`: it notes that it was called."""
    merge = layer.merge

    def defer(*args: Any, **kwargs: Any) -> None:
        merges.append(_Merge(layer, lambda: merge(*args, **kwargs)))

    return defer


def _merged(parameter: nn.Parameter, merges: list[_Merge]) -> torch.Tensor:
    """Return the values of a parameter with adapters merged into it; it keeps its own."""
    value = _copied(parameter)
    for merge in merges:
        parameters = merge.layer.get_base_layer()._parameters
        before = {key: parameters[key] for key in merge.keys if parameters[key] is not None}
        try:
            for key, other in before.items():
                parameters[key] = value if other is parameter else _copied(other)
            merge.run()
        finally:
            parameters.update(before)
            merge.layer.merged_adapters.clear()
    return value.data


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value_of(parameter).detach().clone(), requires_grad=False)

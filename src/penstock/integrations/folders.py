"""Models and pipelines in folders: modules made without memory, whose weights stay in their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from penstock._extras import require
from penstock.integrations.quantised import with_quantised_weights
from penstock.models.checkpoint_names import names_in_checkpoint
from penstock.models.configuration import builder, default_dtype, model_class, read_config
from penstock.passes.building.deferred import Deferred, deferred_init, join
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.subclasses import has_parts
from penstock.passes.weights.values import storage_identity
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES, index_files
from penstock.schedule.facts.errors import SourceError

_PIPELINE, _CONFIG = "model_index.json", "config.json"

_NAMED = 3

_ADAPTER = "adapter_config.json"
"""In a folder with this file, transformers loads another model and puts the adapter into it."""

_ADAPTERS = (_ADAPTER, "adapter_model.safetensors", "pytorch_lora_weights.safetensors")

_AGAIN = (
    "load it with its library, and save it again with save_pretrained, or give it to "
    "penstock.integrations.apply"
)


@dataclass(frozen=True)
class Stored:
    """A module in a folder: the function that builds it, and the files of its weights."""

    name: str
    folder: Path
    build: Callable[[], nn.Module]
    files: tuple[Path, ...]

    def make(self) -> nn.Module:
        """Make the module: buffers have values, parameters only shapes.

        Raises SourceError where the files do not hold the parameters.
        """
        deferred = deferred_init(self.build)
        self._check(deferred.module)
        _fill_buffers(deferred, self)
        return deferred.module.eval()

    def _check(self, module: nn.Module) -> None:
        names, stored = self.names(module), open_checkpoint(self.files).tensors
        # A quantised parameter was made from what the files hold, so it needs no comparison.
        plain = [
            (fqn, value, names.get(fqn, (fqn,)))
            for fqn, value in module.named_parameters(remove_duplicate=False)
            if not has_parts(value)
        ]
        found = {storage_identity(value) for _, value, own in plain if all(name in stored for name in own)}
        missing = [fqn for fqn, value, _ in plain if storage_identity(value) not in found]
        if missing:
            named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise SourceError(
                f"{self.folder} does not hold {named} ({len(missing)} in all) of the {self.name}: get its "
                f"other files, or if its library finds everything, {_AGAIN}"
            )
        for fqn, value, (name, *others) in plain:
            if name in stored and not others:
                _refuse_other(self.folder, fqn, value, stored[name])

    def names(self, module: nn.Module) -> dict[str, tuple[str, ...]]:
        """The names that the files have for weights, for those that the module calls otherwise."""
        return names_in_checkpoint(module, open_checkpoint(self.files).tensors)


def _refuse_other(folder: Path, fqn: str, value: torch.Tensor, stored: StoredTensor) -> None:
    """Raise SourceError where a parameter has another shape or dtype than its tensor in the files."""
    where = f"{folder} has {fqn} as"
    here, there = dtype_name(value.dtype), TORCH_NAMES.get(stored.dtype, stored.dtype)
    if stored.shape != tuple(value.shape):
        raise SourceError(
            f"{where} {list(stored.shape)} in its files and {list(value.shape)} by its {_CONFIG}: they are "
            "of two models, so get both from one"
        )
    if here != there:
        other = "".join(f"load it with variant={name!r}, or " for name in _variants(folder))
        raise SourceError(f"{where} {there} in its files and {here} by its {_CONFIG}: {other}{_AGAIN}")


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder, or the one that the local cache of the hub has for a model's name, and its revision.

    Nothing is downloaded. Raises SourceError where there is none.
    """
    if Path(source).is_dir():
        return Path(source)
    with suppress(Exception):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), revision=revision, local_files_only=True))
    raise SourceError(
        f"{source} is neither a folder nor a model in the local cache: download it first, penstock does not"
    )


def is_pipeline(folder: Path) -> bool:
    """Whether a folder holds a diffusers pipeline. Raises SourceError where it holds no model either."""
    if (folder / _PIPELINE).is_file():
        return True
    if (folder / _CONFIG).is_file():
        return False
    _refuse_adapter(folder)
    tokenizer = any(folder.glob("tokenizer*.json"))
    raise SourceError(
        f"{folder} holds {'a tokenizer and no model' if tokenizer else 'no model'}: give the folder that has "
        f"{_CONFIG} or {_PIPELINE}"
    )


def _refuse_adapter(folder: Path) -> None:
    """Raise SourceError where a folder holds an adapter."""
    found = next((name for name in _ADAPTERS if (folder / name).is_file()), None)
    if found:
        raise SourceError(
            f"{folder} holds an adapter ({found}): load its model with the library of that, the adapter into "
            "it, and give it to penstock.integrations.apply"
        )


def open_model(folder: Path, variant: str | None = None) -> Stored:
    """Find a module that transformers or diffusers saved: its class by the configuration, and its files.

    Of weights that have the variant (`fp16`) those files are taken, and the dtype in them.
    """
    if (folder / _ADAPTER).is_file():
        _refuse_adapter(folder)
    pickled = sorted(path.name for path in folder.glob("*model*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise SourceError(f"{folder} has its weights in {pickled[0]} and in no safetensors file: {_AGAIN}")
    weights = _weights(folder, variant)
    files = tuple(path.resolve() for path in index_files(weights))
    open_checkpoint(files)  # parses every header before anything else
    try:
        facts = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{folder / _CONFIG} is no JSON: {error}") from error
    if "_class_name" in facts:
        kind = _class(folder, "diffusers", facts["_class_name"])
        name, build = kind.__name__, _in_own_dtype(files, lambda: kind.from_config(facts))
    else:
        config = read_config(folder)
        dtype = _dtype(files) if variant and variant in weights.name.split(".") else None
        name = model_class(config, str(folder)).__name__
        build = builder(config, str(folder), dtype_name(dtype) if dtype else None)
    return Stored(name, folder, with_quantised_weights(build, facts, files, folder), files)


def _weights(folder: Path, variant: str | None) -> Path:
    """The weights that libraries read for a variant, else those that they read for none, else the folder."""
    names = ("model", "diffusion_pytorch_model")
    ends = ("safetensors.index.json", "safetensors")
    of_variant = ((f"safetensors.index.{variant}.json", f"{variant}.safetensors"),) if variant else ()
    own = [folder / f"{name}.{end}" for both in (*of_variant, ends) for end in both for name in names]
    return next((one for one in own if one.is_file()), folder)


def weight_sets(folder: Path) -> list[tuple[Path, ...]]:
    """The files of a folder's weights, and those of each variant of them. SourceError where it has none."""
    found = dict.fromkeys(_weights(folder, variant) for variant in (None, *_variants(folder)))
    return [tuple(path.resolve() for path in index_files(weights)) for weights in found]


def _variants(folder: Path) -> list[str]:
    """The names of the variants of its weights that a folder has."""
    return sorted({path.suffixes[-2][1:].split("-")[0] for path in folder.glob("*model.*.safetensors")})


def refuse_variant(folder: Path, variant: str | None) -> None:
    """Raise SourceError where neither the folder nor a component in it has the variant."""
    found = sorted({name for one in (folder, *folder.iterdir()) for name in _variants(one)})
    if variant and variant not in found:
        has = f"has {', '.join(found)}" if found else "has none"
        raise SourceError(f"{folder} has no variant {variant!r} of its weights: it {has}")


def open_pipeline(
    folder: Path, variant: str | None = None
) -> tuple[dict[str, Stored], Callable[[dict[str, nn.Module]], Any]]:
    """Find the modules of a pipeline by name; returned with them is what assembles the pipeline."""
    require("diffusers", purpose="a pipeline")
    index = json.loads((folder / _PIPELINE).read_text(encoding="utf-8"))
    kind = _class(folder, "diffusers", index.pop("_class_name"))
    stored: dict[str, Stored] = {}
    others: dict[str, Any] = {}
    for name, value in index.items():
        if not isinstance(value, list):
            others |= {} if name.startswith("_") else {name: value}
        elif value[0] is None:
            others[name] = None
        elif (folder / name / _CONFIG).is_file() and _is_module(folder, *value):
            stored[name] = open_model(folder / name, variant)
            _refuse_several(folder, name, value, stored[name])
        else:
            others[name] = _class(folder, *value).from_pretrained(folder / name, local_files_only=True)
    return stored, lambda modules: kind(**others, **modules)


def _refuse_several(folder: Path, name: str, value: list[str], found: Stored) -> None:
    """Raise SourceError for a component that consists of the modules of several folders."""
    library, kind = value
    if library == "diffusers" and kind != found.name:
        raise SourceError(
            f"{folder / name} holds a {found.name}, and {_PIPELINE} says {kind}, which may be several: "
            "load the pipeline with its library, and give it to penstock.integrations.apply"
        )


def _class(folder: Path, library: str, name: str) -> Any:
    """Look up a class of transformers or diffusers by name; a model's own code is not run."""
    found = getattr(import_module(library), name, None) if library in ("transformers", "diffusers") else None
    if found is None:
        raise SourceError(
            f"{folder} needs {library}.{name}, which is not a class of transformers or diffusers here: "
            "load it with its own code, and give the result to penstock.integrations.apply"
        )
    return found


def _is_module(folder: Path, library: str, name: str) -> bool:
    return issubclass(_class(folder, library, name), nn.Module)


def _dtype(files: tuple[Path, ...]) -> torch.dtype | None:
    """The first floating-point dtype in the files."""
    tensors = open_checkpoint(files).tensors.values()
    dtypes = [getattr(torch, TORCH_NAMES[one.dtype]) for one in tensors if one.dtype in TORCH_NAMES]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _in_own_dtype(files: tuple[Path, ...], build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Let a module be built in the dtype of its files, which its configuration does not state."""
    found = _dtype(files)

    def build_in_dtype() -> nn.Module:
        with default_dtype(found or torch.get_default_dtype()):
            return build()

    return build_in_dtype


def _fill_buffers(deferred: Deferred, stored: Stored) -> None:
    """Give a module's buffers the values in the files, or else those that the module computes.

    A buffer that is made of several tensors has their rows, one tensor after another.
    """
    names = stored.names(deferred.module)
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in stored.files]
        where = {name: one for one in opened for name in one.keys()}  # noqa: SIM118
        for path, child in deferred.module.named_modules():
            for key, value in child._buffers.items():
                if value is None:
                    continue
                own = names.get(fqn := join(path, key), (fqn,))
                found = [where[name].get_tensor(name) for name in own if name in where]
                if len(found) < len(own):
                    child._buffers[key] = deferred.values(value)
                else:
                    rows = [one.flatten() for one in found]
                    child._buffers[key] = found[0] if len(own) == 1 else torch.cat(rows).view(value.shape)

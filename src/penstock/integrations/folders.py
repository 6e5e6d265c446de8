"""Models and pipelines in folders: modules made without memory, whose weights stay in their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from penstock._extras import ADAPTER, CONFIG, PIPELINE, is_pipeline, local_folder, refuse_adapter, require
from penstock.integrations.formats.packed import names_of_packed
from penstock.integrations.formats.quantised import quantised_weights
from penstock.integrations.kept import KeptWeights
from penstock.integrations.libraries import owner_of
from penstock.integrations.weight_files import is_converted, keep_converted
from penstock.models.configuration import (
    DTYPES,
    builder,
    default_dtype,
    model_class,
    names_in_checkpoint,
    read_config,
)
from penstock.passes.building.deferred import Deferred, deferred_init, join
from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.lifted import storage_identity
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.cache import Cache
from penstock.runtime.checkpoint.binding import listed
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES, index_files, own_place, reading
from penstock.runtime.files.tensor_file import open_tensors
from penstock.schedule.bounded_file import open_bounded, read_bounded
from penstock.schedule.facts.errors import PassError, SourceError

_AGAIN = (
    "load it with its library, and save it again with save_pretrained, or give it to "
    "penstock.integrations.apply"
)


@dataclass(frozen=True)
class Stored:
    """A module in a folder: what builds it, the files of its weights, what gives it quantised ones."""

    name: str
    folder: Path
    build: Callable[[], nn.Module]
    files: tuple[Path, ...]
    quantise: Callable[[nn.Module], None] = lambda module: None

    def make(self) -> tuple[nn.Module, dict[str, tuple[str, ...]]]:
        """Make the module: buffers have values, parameters only shapes.

        Returned with it are the names that the files have for weights, for those that it calls otherwise.
        Raises SourceError where the files do not hold the parameters.
        """
        deferred = deferred_init(self.build)
        self.quantise(deferred.module)
        names = self.names(deferred.module)
        _untie(deferred.module, self.checkpoint, names)
        self._check(deferred.module, names)
        _fill_buffers(deferred, self.files, names)
        return deferred.module.eval(), names

    def _check(self, module: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
        stored = self.checkpoint.tensors
        # A quantised parameter was made from what the files hold, so it needs no comparison.
        plain = [
            (fqn, value, names.get(fqn, (fqn,)))
            for fqn, value in module.named_parameters(remove_duplicate=False)
            if not has_parts(value)
        ]
        there = {
            storage_identity(value) for _, value, parts in plain if all(name in stored for name in parts)
        }
        missing = [fqn for fqn, value, _ in plain if storage_identity(value) not in there]
        if missing:
            raise SourceError(
                f"{self.folder} does not hold {listed(missing, 3)} ({len(missing)} in all) of the "
                f"{self.name}: get its other files, or if its library finds everything, {_AGAIN}"
            )
        for fqn, value, (name, *rows) in plain:
            if name in stored and not rows:
                _refuse_other(self.folder, fqn, value, stored[name])

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The tensors in the files."""
        return open_checkpoint(self.files)

    def names(self, module: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the names that the files have for weights, for those that the module calls otherwise."""
        return names_in_checkpoint(module, self.checkpoint.tensors) | names_of_packed(module)

    def kept(
        self, module: nn.Module, names: Mapping[str, tuple[str, ...]], cache: Cache
    ) -> list[KeptWeights]:
        """Return the files of the module's weights, and what is converted of them into the cache."""
        made_for = owner_of(self.name, module)
        return keep_converted(module, self.checkpoint, names, cache, made_for)


def _untie(module: nn.Module, checkpoint: Checkpoint, names: Mapping[str, tuple[str, ...]]) -> None:
    """Take apart what a configuration ties and the files have with different values, as libraries do."""
    first: dict[int, str] = {}
    for path, child in module.named_modules():
        for key, value in child._parameters.items():
            name, *rows = names.get(fqn := join(path, key), (fqn,))
            if value is None or has_parts(value) or rows or name not in checkpoint.tensors:
                continue
            tied = first.setdefault(id(value), name)
            if tied != name and not checkpoint.are_equal(tied, name):
                child._parameters[key] = nn.Parameter(torch.empty_like(value), value.requires_grad)


def _refuse_other(folder: Path, fqn: str, value: torch.Tensor, stored: StoredTensor) -> None:
    """Raise SourceError where a parameter has another shape or dtype than what its tensor gives."""
    here, there = dtype_name(value.dtype), TORCH_NAMES.get(stored.dtype, stored.dtype)
    if stored.shape != tuple(value.shape):
        _refuse_shape(folder, fqn, stored.shape, value)
    if here != there and not is_converted(stored, value):
        raise SourceError(f"{folder} has {fqn} as {there} in its files and {here} by its {CONFIG}: {_AGAIN}")


def _refuse_shape(folder: Path, fqn: str, shape: tuple[int, ...], value: torch.Tensor) -> NoReturn:
    raise SourceError(
        f"{folder} has {fqn} as {list(shape)} in its files and {list(value.shape)} by its {CONFIG}: they "
        "are of two models, so get both from one"
    )


def asked_dtype(dtype: torch.dtype | str | None) -> str | None:
    """The name of the dtype asked for; None for the files' own. Raises SourceError for no dtype."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise SourceError(f"there is no dtype {dtype!r} for weights: give auto, {', '.join(DTYPES)}")
    return name


def open_folder(
    source: object, variant: str | None, dtype: str | None, *, train: bool
) -> Stored | tuple[dict[str, Stored], Callable[[dict[str, nn.Module]], Any]]:
    """Return what `open_model` finds in a local folder, or `open_pipeline`, which cannot be trained.

    Raises SourceError for what is missing, damaged or not read by the system, and PassError with `train`.
    """
    with reading(folder := local_folder(source)):
        refuse_variant(folder, variant)
        if not is_pipeline(folder):
            return open_model(folder, variant, dtype)
        if train:
            raise PassError(f"train=True takes a model, and {folder} has a pipeline of several")
        return open_pipeline(folder, variant, dtype)


def open_model(
    folder: Path, variant: str | None = None, dtype: str | None = None, *, as_stored: bool = False
) -> Stored:
    """Find a module that transformers or diffusers saved: its class by the configuration, and its files.

    Its dtype is `dtype`, or else that of the configuration. Where this states none, where weights have the
    variant (`fp16`), and with `as_stored`, it is that of the files.
    """
    if (folder / ADAPTER).is_file():
        refuse_adapter(folder)
    pickled = sorted(path.name for path in folder.glob("*model*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise SourceError(
            f"{folder} has its weights in {pickled[0]} and in no safetensors file: "
            f"`penstock convert {folder}` writes one beside it"
        )
    weights = _weights(folder, variant)
    files = tuple(own_place(path) for path in index_files(weights))
    checkpoint = open_checkpoint(files)  # parses every header before anything else
    facts = _facts(folder / CONFIG)
    if dtype and facts.get("quantization_config"):
        raise SourceError(
            f"{folder} was saved quantised, in dtypes that fit together: load it without dtype="
        )
    if "_class_name" in facts:
        kind = _class(folder, "diffusers", facts["_class_name"])
        name, build = kind.__name__, _diffusers_builder(kind, facts, checkpoint, dtype or _most(checkpoint))
    else:
        config = read_config(folder)
        as_stored = as_stored or bool(variant and variant in weights.name.split("."))
        dtype = dtype or (_most(checkpoint) if as_stored else _first(files, config))
        name = model_class(config, str(folder)).__name__
        build = builder(config, str(folder), dtype)
    return Stored(name, folder, build, files, quantised_weights(facts, files, folder))


def _weights(folder: Path, variant: str | None) -> Path:
    """Return the weights that libraries read for a variant, else those for none, else the folder."""
    names = ("model", "diffusion_pytorch_model")
    ends = ("safetensors.index.json", "safetensors")
    of_variant = ((f"safetensors.index.{variant}.json", f"{variant}.safetensors"),) if variant else ()
    paths = [folder / f"{name}.{end}" for both in (*of_variant, ends) for end in both for name in names]
    return next(filter(Path.is_file, paths), folder)


def weight_sets(folder: Path) -> list[tuple[Path, ...]]:
    """Return the files of a folder's weights, and of each variant. Raises SourceError where it has none."""
    sets = dict.fromkeys(_weights(folder, variant) for variant in (None, *_variants(folder)))
    return [tuple(own_place(path) for path in index_files(weights)) for weights in sets]


def _variants(folder: Path) -> list[str]:
    return sorted({path.suffixes[-2][1:].split("-")[0] for path in folder.glob("*model.*.safetensors")})


def refuse_variant(folder: Path, variant: str | None) -> None:
    """Raise SourceError where neither the folder nor a component in it has the variant."""
    variants = sorted({name for place in (folder, *folder.iterdir()) for name in _variants(place)})
    if variant and variant not in variants:
        has = f"has {', '.join(variants)}" if variants else "has none"
        raise SourceError(f"{folder} has no variant {variant!r} of its weights: it {has}")


def open_pipeline(
    folder: Path, variant: str | None = None, dtype: str | None = None
) -> tuple[dict[str, Stored], Callable[[dict[str, nn.Module]], Any]]:
    """The modules of a pipeline by name, in `dtype` or their files', and what assembles the pipeline."""
    require("diffusers", purpose="a pipeline")
    index = _facts(folder / PIPELINE)
    kind = _class(folder, "diffusers", index.pop("_class_name", None))
    stored: dict[str, Stored] = {}
    arguments: dict[str, Any] = {}
    for name, value in index.items():
        if isinstance(value, list) and (len(value) != 2 or not name.isidentifier()):
            raise SourceError(f"{folder / PIPELINE} says that {name!r} is {value!r:.80}: get an intact copy")
        if not isinstance(value, list):
            arguments |= {} if name.startswith("_") else {name: value}
        elif value[0] is None:
            arguments[name] = None
        elif (folder / name / CONFIG).is_file() and issubclass(_class(folder, *value), nn.Module):
            stored[name] = open_model(folder / name, variant, dtype, as_stored=True)
            _refuse_several(folder, name, value, stored[name])
        else:
            arguments[name] = _part(folder, name, *value)
    return stored, lambda modules: kind(**arguments, **modules)


def _facts(path: Path) -> dict[str, Any]:
    """Return the JSON of a configuration. Raises SourceError for a file that is none."""
    try:
        facts = json.loads(read_bounded(path, "a configuration").decode())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is no JSON: {error}") from error
    if not isinstance(facts, dict):
        raise SourceError(f"{path} is a {type(facts).__name__} and no object: get an intact copy")
    return facts


def _part(folder: Path, name: str, library: str, kind: str) -> Any:
    """Return a part of a pipeline that has no weights, such as a tokenizer; a model's own code is not run."""
    part_class = _class(folder, library, kind)
    for path in (folder / name).glob("*.json"):
        with open_bounded(path, "a file of a tokenizer"):
            pass
    options = {"trust_remote_code": False} if library == "transformers" else {}
    try:
        return part_class.from_pretrained(folder / name, local_files_only=True, **options)
    except Exception as error:
        raise SourceError(
            f"{folder / name} is no {kind} that {library} can read ({sentence(error)}): get an intact copy"
        ) from error


def _refuse_several(folder: Path, name: str, value: list[str], stored: Stored) -> None:
    """Raise SourceError for a component that consists of the modules of several folders."""
    library, kind = value
    if library == "diffusers" and kind != stored.name:
        raise SourceError(
            f"{folder / name} holds a {stored.name}, and {PIPELINE} says {kind}, which may be several: "
            "load the pipeline with its library, and give it to penstock.integrations.apply"
        )


def _class(folder: Path, library: object, name: object) -> Any:
    """Look up a class of transformers or diffusers by name; a model's own code is not run."""
    with suppress(ImportError, RuntimeError):  # a class may need what is not installed
        if library in ("transformers", "diffusers") and isinstance(name, str) and name.isidentifier():
            kind = getattr(import_module(str(library)), name, None)
            if isinstance(kind, type) and hasattr(kind, "from_pretrained"):
                return kind
    raise SourceError(
        f"{folder} needs {library}.{name}, which is not a class of transformers or diffusers here: "
        "load it with its own code, and give the result to penstock.integrations.apply"
    )


def _most(checkpoint: Checkpoint) -> str | None:
    """Return the floating-point dtype that most bytes of a checkpoint have."""
    nbytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        nbytes[TORCH_NAMES.get(tensor.dtype, "")] += tensor.nbytes
    return next((dtype for dtype, _ in nbytes.most_common() if dtype in DTYPES), None)


def _first(files: tuple[Path, ...], config: Any) -> str | None:
    """Return the floating-point dtype that transformers takes where a configuration states none."""
    if getattr(config, "dtype", None):
        return None
    with open_tensors(files[0]) as opened:  # safetensors sorts names, and transformers takes the first
        dtypes = (TORCH_NAMES.get(opened.entries[name].dtype) for name in sorted(opened.entries))
        return next((dtype for dtype in dtypes if dtype in DTYPES), None)


def _diffusers_builder(
    kind: Any, facts: dict[str, Any], checkpoint: Checkpoint, dtype: str | None
) -> Callable[[], nn.Module]:
    """Return a function that builds a module of diffusers in a dtype; the library keeps some in float32."""
    wanted = torch.get_default_dtype() if dtype is None else getattr(torch, dtype)
    names: Any = getattr(kind, "_keep_in_fp32_modules", None) or ()
    in_float32 = (names,) if isinstance(names, str) else names

    def build() -> nn.Module:
        with default_dtype(wanted):
            module: nn.Module = kind.from_config(facts)
        for name, value in module.state_dict(keep_vars=True).items():
            if name in checkpoint.tensors and value.is_floating_point():
                stays = any(part in in_float32 for part in name.split("."))
                value.data = value.data.to(torch.float32 if stays else wanted)
        return module

    return build


def _fill_buffers(deferred: Deferred, files: tuple[Path, ...], names: Mapping[str, tuple[str, ...]]) -> None:
    """Give a module's buffers the values in the files, in rows of several tensors, or those it computes."""
    with ExitStack() as stack:
        opened = [stack.enter_context(open_tensors(file)) for file in files]
        where = {name: file for file in opened for name in file.entries}
        for path, child in deferred.module.named_modules():
            for key, value in child._buffers.items():
                if value is None:
                    continue
                stored = names.get(fqn := join(path, key), (fqn,))
                entries = [where[name].entries[name] for name in stored if name in where]
                fits = sum(prod(tensor.shape) for tensor in entries) == value.numel()
                if len(entries) < len(stored) or (not fits and key in child._non_persistent_buffers_set):
                    child._buffers[key] = deferred.values(value)
                elif not fits:
                    _refuse_shape(files[0].parent, fqn, entries[0].shape, value)
                else:
                    parts = [_converted(where[name].get_tensor(name), value) for name in stored]
                    rows = [part.flatten() for part in parts]
                    child._buffers[key] = parts[0] if len(parts) == 1 else torch.cat(rows).view(value.shape)


def _converted(stored: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    floats = stored.is_floating_point() and value.is_floating_point()
    return stored.to(value.dtype) if floats else stored

"""Write a transformers model whose weights are not in memory to a folder, one weight at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.emptied.absent import value_of
from penstock.integrations.kept import bytes_of
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.checkpoint.convert import Converted, write_shards
from penstock.runtime.files.artifact_files import Progress, count_bytes
from penstock.runtime.files.pack import Chunk, PackEntry, check_space, tensor_chunks
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.system.atomic import write_artifact
from penstock.schedule.facts.errors import PassError, SourceError

_log = logging.getLogger(__name__)

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The path of a layer at the beginning of a weight's name."""

_NO_MARKER = "nothing is overwritten"
"""A file that no folder has: `write_artifact` replaces nothing but an empty folder then."""

Read = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the values of a tensor of a state dict, which is given with its name."""


def write_folder(folder: str | PathLike[str], build: Callable[[Path], None]) -> None:
    """Make a folder of what `build` writes, all or nothing. Raises SourceError if something is there."""
    path = Path(folder)
    refuse_folder(path)
    with torch.no_grad():
        write_artifact(path, force=path.is_dir(), build=build, marker=_NO_MARKER)


def refuse_folder(path: Path) -> None:
    """Raise SourceError for a path at which there is a file, or a folder that is not empty."""
    with reading(path):
        if path.is_dir() and any(path.iterdir()):
            raise SourceError(f"{path} is a folder with files in it, which stay as they are: choose another")
        if path.exists() and not path.is_dir():
            raise SourceError(f"{path} is a file: choose a folder that is new or empty")


def save_model(
    model: Any, folder: Path, shard_size: int, read: Read | None = None, progress: Progress | None = None
) -> Converted:
    """Write weights, configuration and generation settings into an empty folder, as `save_pretrained` does.

    One weight is in memory at a time, or those that the library makes one tensor of the files from. `read`
    is for values other than those of the model, and `progress` is told how many bytes are written.

    Raises PassError for a model of another library, and for a quantised one.
    """
    refuse_model(model)
    with _no_bars():  # the library writes all but the weights
        type(model).save_pretrained(model, folder, state_dict={})
    entries = _entries(model, read or (lambda name, tensor: value_of(tensor)))
    nbytes = sum(packed.nbytes for packed in entries)
    check_space(folder, nbytes, dense=True)
    _log.info("writing %s bytes of weights", f"{nbytes:,}")
    names = write_shards(folder, entries, shard_size, count_bytes(progress, "writing", nbytes))
    return Converted(tuple(folder / name for name in names), len(entries), nbytes)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Have transformers show no progress bars, which would count its files of no weights."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def refuse_model(model: Any) -> None:
    """Raise PassError for what `save_model` does not write."""
    kind = type(model).__name__
    if not (isinstance(model, nn.Module) and hasattr(model, "_keys_to_ignore_on_save")):
        raise PassError(
            f"the {kind} is no model of transformers, and only these are saved while they stream: save it "
            "with its library after restore(), or copy the folder that load read"
        )
    quantised = getattr(model.config, "quantization_config", None) or any(map(has_parts, model.parameters()))
    if quantised:
        raise PassError(f"the {kind} is quantised, and is not saved while it streams: copy its folder")


@dataclass(frozen=True, eq=False)
class _Group:
    """Names of a state dict, and the tensors of files that are made from just these, without values."""

    names: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]


def _entries(model: Any, read: Read) -> list[PackEntry]:
    """Return what is to be written of a model, those tensors first that fill whole blocks."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    state = {name: value for name, value in model.state_dict().items() if name not in ignored}
    shapes = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in state.items()}
    shapes = remove_tied_weights_from_state_dict(shapes, model)
    last: list[tuple[_Group, Mapping[str, torch.Tensor]]] = []

    def chunks(group: _Group, name: str) -> Iterator[Chunk]:
        if not last or last[0][0] is not group:
            last.clear()  # before another group takes memory
            values = {fqn: read(fqn, state[fqn]).detach() for fqn in group.names}
            last.append((group, revert_weight_conversion(model, values)))
        yield from tensor_chunks(bytes_of(last[0][1][name].contiguous()))

    def entry(group: _Group, name: str) -> PackEntry:
        tensor = group.tensors[name]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        return PackEntry(name, dtype, shape, tensor.nbytes, lambda: chunks(group, name))

    groups = _groups(shapes, lambda named: revert_weight_conversion(model, named))
    return [entry(group, name) for group in sorted(groups, key=_order) for name in group.tensors]


def _order(group: _Group) -> tuple[bool, bool]:
    sizes = [tensor.nbytes for tensor in group.tensors.values()]
    return any(size % 4096 for size in sizes), any(size % 64 for size in sizes)


def _groups(
    shapes: Mapping[str, torch.Tensor], revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> list[_Group]:
    """The smallest groups of a state dict that convert by themselves. Raises PassError if no layer does."""
    whole, groups, left = revert(dict(shapes)), list[_Group](), dict[str, list[str]]()

    def add(names: Sequence[str]) -> bool:
        try:
            tensors = revert({name: shapes[name] for name in names})
        except Exception:  # a rule that needs other weights too may raise anything
            return False
        if not tensors or any(n not in whole or whole[n].shape != t.shape for n, t in tensors.items()):
            return False
        groups.append(_Group(tuple(names), tensors))
        return True

    for name in shapes:
        if not add([name]):
            layer = _LAYER.match(name)
            left.setdefault(layer[0] if layer else "", []).append(name)
    refused = [names for names in left.values() if not add(names)]
    if refused or sum(len(group.tensors) for group in groups) != len(whole):
        names = ", ".join(refused[0][:3]) if refused else "weights"
        raise PassError(
            f"the library writes {names} together with weights of other layers: load the "
            "model with the library, and save it with that"
        )
    return groups

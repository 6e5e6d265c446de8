"""Opens the checkpoints of several formats as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from penstock.runtime.distributed_file import METADATA, is_distributed, read_tensors
from penstock.runtime.safetensors_file import index_files, read_header
from penstock.runtime.stored_tensor import StoredTensor, from_entry
from penstock.runtime.torch_file import SUFFIXES, read_entries
from penstock.schedule.errors import SourceError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of some files by name; their boxes number the files."""

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(paths: Paths) -> Checkpoint:
    """A checkpoint's tensors: of safetensors, an index, a folder, several of them, or what torch wrote.

    SourceError for what cannot be read, and for a tensor that two files hold.
    """
    given = [paths] if isinstance(paths, str | PathLike) else paths
    folders = [path for path in map(Path, given) if is_distributed(path)]
    found: dict[Path, None] = {}
    for path in map(Path, given):
        if path not in folders:
            own = (path,) if path.suffix in SUFFIXES and path.is_file() else index_files(path)
            found |= dict.fromkeys(file.resolve() for file in own)
    files = {path: number for number, path in enumerate(found)}
    tensors: dict[str, StoredTensor] = {}
    for path, number in list(files.items()):
        entries = read_entries(path) if path.suffix in SUFFIXES else read_header(path).entries
        _add(tensors, {name: from_entry(path, number, entry) for name, entry in entries.items()})
    for folder in folders:
        if any(folder.glob("*.safetensors")):
            raise SourceError(
                f"{folder} holds {METADATA} and safetensors files: name the files of one checkpoint"
            )
        _add(tensors, read_tensors(folder.resolve(), files))
    return Checkpoint(tuple(files), tensors)


def _add(tensors: dict[str, StoredTensor], more: Mapping[str, StoredTensor]) -> None:
    for name, tensor in more.items():
        if name in tensors:
            raise SourceError(
                f"tensor {name!r} is in {tensors[name].origin} and in {tensor.origin}: "
                "give the shards of one checkpoint only"
            )
        tensors[name] = tensor

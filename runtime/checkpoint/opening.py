"""Opens the checkpoints of several formats as tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path

from penstock.runtime.checkpoint.distributed_file import METADATA, is_distributed, read_tensors
from penstock.runtime.checkpoint.shards import check_names, find_index, note_total
from penstock.runtime.checkpoint.stored_tensor import StoredTensor, from_entry
from penstock.runtime.checkpoint.torch_file import SUFFIXES, read_entries
from penstock.runtime.files.pack import PAD_PREFIX
from penstock.runtime.files.safetensors_file import index_files, read_header
from penstock.schedule.facts.errors import SourceError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of some files by name; their boxes number the files."""

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(paths: Paths, only: str | Sequence[str] = ()) -> Checkpoint:
    """A checkpoint's tensors: of safetensors, an index, a folder, several of them, or what torch wrote.

    `only` has patterns of names; files that hold no such tensor may be missing where an index says so.
    SourceError for what cannot be read, for a tensor that two files hold, and for a pattern of no tensor.
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    given = [Path(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
    folders = [path for path in given if is_distributed(path)]
    others = [path for path in given if path not in folders]
    named: dict[Path, Path] = {}
    for path in others:
        for file in _files(path, wanted):
            # By its own name: the hub's cache links names to files that have none.
            named.setdefault(file.resolve(), file.absolute())
    files = {path: number for number, path in enumerate(named.values())}
    tensors: dict[str, StoredTensor] = {}
    nbytes: dict[Path, int] = {}
    for path, number in list(files.items()):
        entries = read_entries(path) if path.suffix in SUFFIXES else read_header(path).entries
        nbytes[path.resolve()] = sum(entry.nbytes for entry in entries.values())
        own = {name: from_entry(path, number, entry) for name, entry in entries.items() if wanted(name)}
        _add(tensors, own)
    if not patterns:
        _check_shards(others, nbytes)
    for folder in folders:
        if any(folder.glob("*.safetensors")):
            raise SourceError(
                f"{folder} holds {METADATA} and safetensors files: name the files of one checkpoint"
            )
        _add(tensors, read_tensors(folder.resolve(), files, wanted))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            where = ", ".join(map(str, given))
            raise SourceError(f"no tensor of {where} is called {pattern!r} (only=): correct the pattern")
    return Checkpoint(tuple(files), tensors)


def _files(path: Path, wanted: Callable[[str], bool] | None = None) -> tuple[Path, ...]:
    return (path,) if path.suffix in SUFFIXES and path.is_file() else index_files(path, wanted)


def _check_shards(given: Sequence[Path], nbytes: Mapping[Path, int]) -> None:
    check_names(file for path in given if not find_index(path) for file in _files(path))
    for path in given:
        if index := find_index(path):
            note_total(index, nbytes)


def _add(tensors: dict[str, StoredTensor], more: Mapping[str, StoredTensor]) -> None:
    for name, tensor in more.items():
        if name.startswith(PAD_PREFIX):  # fills a hole of a packed file
            continue
        if name in tensors:
            raise SourceError(
                f"tensor {name!r} is in {tensors[name].origin} and in {tensor.origin}: "
                "give the shards of one checkpoint only"
            )
        tensors[name] = tensor

"""Opens checkpoints of several formats as tensors by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TypeVar

from penstock.runtime.checkpoint.foreign_files import (
    METADATA,
    is_distributed,
    is_torch_file,
    read_entries,
    read_tensors,
)
from penstock.runtime.checkpoint.stored_tensor import Reading, StoredTensor, from_entry
from penstock.runtime.files.pack import PAD_PREFIX
from penstock.runtime.files.safetensors_file import (
    index_files,
    indexed_files,
    own_place,
    read_header,
    read_index,
    reading,
)
from penstock.schedule.facts.errors import SourceError

_log = logging.getLogger(__name__)

_INDEX, _TORCH_INDEX = ".safetensors.index.json", "pytorch_model.bin.index.json"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")

FileState = tuple[int, int, int, int]
"""Size, modification time, inode and ctime of a file."""

_ATTEMPTS = 3
"""How often a checkpoint is read, if the ctime of its files changes whenever it is."""

T = TypeVar("T")

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A file, an index, a folder, or several files."""


class TouchedError(SourceError):
    """Nothing but the ctime of a file has changed while it was read."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and the files that their boxes refer to by number.

    `states` are what the system said of the files before they were looked into.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    states: tuple[FileState, ...] = ()

    def are_equal(self, first: str, second: str) -> bool:
        """Tell whether two tensors have the same dtype, shape and bytes."""
        pair = self.tensors[first], self.tensors[second]
        if pair[0].dtype != pair[1].dtype or pair[0].shape != pair[1].shape:
            return False
        chunks = [Reading(tensor, tensor.whole).chunks(self.files) for tensor in pair]
        return all(bytes(chunk) == bytes(other) for chunk, other in zip(*chunks, strict=True))

    def check_unchanged(self, tensor: StoredTensor | None = None) -> None:
        """Raise SourceError if a file (of a tensor) was changed or replaced since it was opened.

        What was read of it meanwhile may be another checkpoint's.
        """
        for number in {box.file for box in tensor.boxes} if tensor else range(len(self.files)):
            path = self.files[number]
            with reading(path):
                now, before = _state_of(path), self.states[number]
            if now != before:
                kind = TouchedError if now[:-1] == before[:-1] else SourceError
                raise kind(
                    f"{path} was written to or replaced while it was read: leave it as it is, and try again"
                )

    @property
    def ctimes(self) -> dict[str, int]:
        """The ctime of each file before it was looked into, by path."""
        return {str(path): state[-1] for path, state in zip(self.files, self.states, strict=True)}

    def read(self, work: Callable[[Checkpoint], T]) -> T:
        """Return what `work` makes of this checkpoint, again where the ctime of a file changes meanwhile.

        A changed ctime may be that of a write whose other traces were put back, or of no write at all.
        """
        checkpoint = self
        for _ in range(_ATTEMPTS - 1):
            try:
                return work(checkpoint)
            except TouchedError:
                checkpoint = replace(checkpoint, states=tuple(_state_of(path) for path in self.files))
        return work(checkpoint)


def open_checkpoint(paths: Paths, only: str | Sequence[str] = ()) -> Checkpoint:
    """Open safetensors files, an index, a folder, several of these, or a checkpoint that torch wrote.

    `only` has patterns of tensor names; files of an index that hold no matching tensor may be missing. Raises
    SourceError for a file that cannot be read, for a tensor that two files hold, and for a pattern that
    matches no tensor.
    """
    paths_given = [Path(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
    with reading(paths_given[0] if paths_given else Path()):
        return _open(paths_given, (only,) if isinstance(only, str) else tuple(only))


def _open(paths: Sequence[Path], patterns: Sequence[str]) -> Checkpoint:
    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    folders = [path for path in paths if is_distributed(path)]
    singles = [path for path in paths if path not in folders]
    named: dict[Path, Path] = {}
    for path in singles:
        for file in _files(path, wanted):
            named.setdefault(file.resolve(), own_place(file))
    files = {path: number for number, path in enumerate(named.values())}
    states = {path: _state_of(path) for path in files}
    tensors: dict[str, StoredTensor] = {}
    nbytes: dict[Path, int] = {}
    for path, number in list(files.items()):
        entries = read_entries(path) if is_torch_file(path) else read_header(path).entries
        nbytes[path.resolve()] = sum(tensor.nbytes for tensor in entries.values())
        in_file = {name: from_entry(path, number, tensor) for name, tensor in entries.items() if wanted(name)}
        _add(tensors, in_file)
    if not patterns:
        _check_shards(singles, nbytes)
    for folder in folders:
        if any(folder.glob("*.safetensors")):
            raise SourceError(
                f"{folder} holds {METADATA} and safetensors files: name the files of one checkpoint"
            )
        states |= {path: _state_of(path) for path in folder.resolve().rglob("*") if path.is_file()}
        _add(tensors, read_tensors(folder.resolve(), files, wanted))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            where = ", ".join(map(str, paths))
            raise SourceError(f"no tensor of {where} is called {pattern!r} (only=): correct the pattern")
    return Checkpoint(tuple(files), tensors, tuple(states[path] for path in files))


def _state_of(path: Path) -> FileState:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_ctime_ns


def _files(path: Path, wanted: Callable[[str], bool] | None = None) -> tuple[Path, ...]:
    """The files that a path stands for; of a folder without safetensors those that torch.save wrote."""
    if path.is_file() and is_torch_file(path):
        return (path,)
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        index = path / _TORCH_INDEX
        files = indexed_files(index, wanted) if index.is_file() else tuple(sorted(path.glob("*model*.bin")))
        if files:
            return files
    return index_files(path, wanted)


def _check_shards(paths: Sequence[Path], nbytes: Mapping[Path, int]) -> None:
    _check_names(file for path in paths if not _find_index(path) for file in _files(path))
    for path in paths:
        if index := _find_index(path):
            _note_total(index, nbytes)


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


def _find_index(path: Path) -> Path | None:
    """Returns the index that `path` is, or that the folder `path` has."""
    if path.is_dir():
        return next(iter(sorted(path.glob(f"*{_INDEX}"))), None)
    return path if path.name.endswith(_INDEX) else None


def _check_names(files: Iterable[Path]) -> None:
    """Refuse shards without an index whose names say that some are missing, or contradict each other."""
    sets: dict[tuple[Path, str, str], dict[int, list[tuple[int, Path]]]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match:
            name, number, count, suffix = match.groups()
            counts = sets.setdefault((file.parent, name, suffix), {})
            counts.setdefault(int(count), []).append((int(number), file))
    for counts in sets.values():
        (count, shards), *unexpected = counts.items()
        if unexpected:
            raise SourceError(
                f"{shards[0][1]} and {unexpected[0][1][0][1].name} are shards of different checkpoints "
                f"(of {count} and of {unexpected[0][0]}): give the files of one"
            )
        numbers = {number for number, _ in shards}
        first = 0 if 0 in numbers else 1
        missing = (number for number in range(first, first + count) if number not in numbers)
        named = ", ".join(map(str, islice(missing, 5)))
        if named:
            raise SourceError(
                f"{shards[0][1]} is one of {count} shards, of which are not given: {named}; complete the "
                "checkpoint, or name the tensors that are needed (only=)"
            )


def _note_total(index: Path, bytes_by_file: Mapping[Path, int]) -> None:
    """Warn of an index whose `total_size` is not that of its tensors, as in many published ones.

    Raises SourceError if the index names files that `bytes_by_file` has not, because it was written to.
    """
    fields = read_index(index)
    metadata = fields.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    files = {(index.parent / name).resolve() for name in fields["weight_map"].values()}
    if files - bytes_by_file.keys():
        raise SourceError(f"{index} was written to while it was read: leave it as it is, and try again")
    nbytes = sum(bytes_by_file[file] for file in files)
    if isinstance(claimed, int) and claimed != nbytes:
        _log.warning(
            "%s gives total_size as %s bytes and its files hold %s: the index is wrong, as many are, or they "
            "are not of one checkpoint",
            index,
            f"{claimed:,}",
            f"{nbytes:,}",
        )

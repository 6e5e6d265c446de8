"""Finds the bytes of a program's weights in safetensors files, by FQN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path

from penstock.runtime.safetensors_file import TORCH_NAMES, TensorEntry, index_files, read_header
from penstock.runtime.stamp import file_chunks
from penstock.runtime.torch_file import SUFFIXES, read_entries
from penstock.schedule.errors import SourceError
from penstock.schedule.model import Extent, Part, Storage, Weight
from penstock.schedule.payload_checks import part_nbytes

Rename = Callable[[str], str] | Mapping[str, str] | None
"""How an FQN of the program becomes a tensor's name in the files: a function, or a table of exceptions."""

_NAMED = 5


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of some safetensors files: their names, and for each its file number and place."""

    files: tuple[Path, ...]
    tensors: Mapping[str, tuple[int, TensorEntry]]


def open_checkpoint(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Checkpoint:
    """A checkpoint's files: safetensors, an index, a folder, several of them, or what torch.save wrote."""
    given = [paths] if isinstance(paths, str | PathLike) else paths
    files: dict[Path, None] = {}
    for path in map(Path, given):
        found = (path,) if path.suffix in SUFFIXES and path.is_file() else index_files(path)
        files |= dict.fromkeys(file.resolve() for file in found)
    return read_checkpoint(tuple(files))


def read_checkpoint(files: Sequence[Path]) -> Checkpoint:
    """The headers of `files`, strictly parsed. SourceError for a tensor that two files hold."""
    tensors: dict[str, tuple[int, TensorEntry]] = {}
    for number, path in enumerate(files):
        entries = read_entries(path) if path.suffix in SUFFIXES else read_header(path).entries
        for name, entry in entries.items():
            if name in tensors:
                raise SourceError(
                    f"tensor {name!r} is in {files[tensors[name][0]]} and in {path}: "
                    "give the shards of one checkpoint only"
                )
            tensors[name] = (number, entry)
    return Checkpoint(tuple(files), tensors)


def bind(
    weights: Sequence[Weight], storages: Sequence[Storage], checkpoint: Checkpoint, rename: Rename = None
) -> tuple[Storage, ...]:
    """`storages` with the extents that the checkpoint gives them.

    Tied weights need one of their names in the files, and the same bytes under all that are there. A
    parameter that no file has is an error, as is one of another dtype, shape or order of elements; a
    buffer or constant may be missing with all of its storage, which then has no extents. Raises
    SourceError naming what is wrong, all missing ones counted.
    """
    found: dict[int, dict[tuple[int, int], Extent]] = {}
    absent: list[Weight] = []
    for weight in weights:
        for part in weight.parts:
            name = tensor_name(weight.fqn, rename) + part.name
            if name not in checkpoint.tensors:
                absent.append(weight)
                continue
            number, entry = checkpoint.tensors[name]
            _check_tensor(weight, part, name, entry, checkpoint.files[number])
            extent = Extent(number, entry.start, part.offset, entry.nbytes)
            first = found.setdefault(part.storage, {}).setdefault((part.offset, entry.nbytes), extent)
            if first != extent:
                _check_tie(weight, name, (first, extent), checkpoint)
    bound = tuple(
        replace(storage, extents=_disjoint(found[index].values())) if index in found else storage
        for index, storage in enumerate(storages)
    )
    missing = [w for w in absent if not _covered(w, bound)]
    # What shares a storage with a weight from the files has no other place to come from.
    _refuse_missing(
        [w for w in missing if w.role == "parameter" or any(p.storage in found for p in w.parts)], checkpoint
    )
    return bound


def tensor_name(fqn: str, rename: Rename) -> str:
    """What a weight is called in the files."""
    if rename is None:
        return fqn
    return rename.get(fqn, fqn) if isinstance(rename, Mapping) else rename(fqn)


def _check_tensor(weight: Weight, part: Part, name: str, entry: TensorEntry, path: Path) -> None:
    if (TORCH_NAMES.get(entry.dtype), entry.shape) != (part.dtype, part.shape):
        raise SourceError(
            f"weight {weight.fqn} is {part.dtype} {list(part.shape)} in the program and tensor {name!r} of "
            f"{path} is {TORCH_NAMES.get(entry.dtype, entry.dtype)} {list(entry.shape)}: "
            "give the checkpoint that belongs to the program"
        )
    dense = [prod(part.shape[i + 1 :]) for i in range(len(part.shape))]
    if any(size > 1 and a != b for size, a, b in zip(part.shape, part.stride, dense, strict=True)):
        raise SourceError(
            f"weight {weight.fqn} has strides {list(part.stride)} in the program, but safetensors files hold "
            "dense tensors: make it contiguous before the export, or compile without weights="
        )


def _check_tie(weight: Weight, name: str, places: tuple[Extent, Extent], checkpoint: Checkpoint) -> None:
    """Compare the bytes of two tensors of the files that are one weight of the program."""
    first, second = (
        file_chunks(checkpoint.files[e.file], e.file_offset, e.file_offset + e.nbytes) for e in places
    )
    if any(a != b for a, b in zip(first, second, strict=True)):
        raise SourceError(
            f"weight {weight.fqn} is tied to another in the program, but tensor {name!r} holds other values "
            "than that one's: export it with the checkpoint loaded, or rename one of them"
        )


def _disjoint(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Extents by place in the storage, without the bytes that an earlier one holds as well."""
    result: list[Extent] = []
    end = 0
    for extent in sorted(extents, key=lambda e: (e.storage_offset, -e.nbytes)):
        known = max(end - extent.storage_offset, 0)
        if known < extent.nbytes:
            start = extent.storage_offset + known
            result.append(Extent(extent.file, extent.file_offset + known, start, extent.nbytes - known))
            end = start + extent.nbytes - known
    return tuple(result)


def _covered(weight: Weight, storages: Sequence[Storage]) -> bool:
    """Whether the bytes of every part were found under another weight's name."""
    for part in weight.parts:
        position = part.offset
        stop = part.offset + part_nbytes(part)
        for extent in storages[part.storage].extents:
            if extent.storage_offset <= position < extent.storage_offset + extent.nbytes:
                position = extent.storage_offset + extent.nbytes
        if position < stop:
            return False
    return True


def _refuse_missing(absent: Sequence[Weight], checkpoint: Checkpoint) -> None:
    missing = [w.fqn for w in absent]
    if missing:
        named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        files = ", ".join(str(p) for p in checkpoint.files[:2]) + (
            ", ..." if len(checkpoint.files) > 2 else ""
        )
        raise SourceError(
            f"{len(missing)} of the program's weights are not in {files}: {named}; "
            "give the missing shards, or say with rename= what they are called there"
        )

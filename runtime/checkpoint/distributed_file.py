"""Finds the tensors in a checkpoint of torch.distributed, without running code from its files.

Such a checkpoint is a folder: `.metadata`, a pickle that says which chunk of which tensor is in which
range of which file, and files in which each range is what torch.save wrote of one chunk (or the whole
file is safetensors). Only the pickle's own classes are admitted, and inert ones take their place.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from penstock.runtime.checkpoint.pickles import load
from penstock.runtime.checkpoint.stored_tensor import Box, StoredTensor
from penstock.runtime.checkpoint.torch_file import read_tensor
from penstock.runtime.files.safetensors_file import (
    ITEM_BITS,
    SAFETENSORS_NAMES,
    TensorEntry,
    read_header,
    reading,
    refuse,
)
from penstock.schedule.bounded_file import open_regular, read_bounded
from penstock.schedule.facts.errors import SourceError

METADATA = ".metadata"
_ZIP = b"PK\x03\x04"
_MOST_COMPARED = 4_000_000
"""The most pairs of a tensor's chunks that are compared, which takes seconds."""
_HOME = "torch.distributed.checkpoint."


class _Record:
    """Holds the arguments with which a pickle would make an object, without running any code of its class."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if not isinstance(state, Mapping) or name not in state:
            raise AttributeError(f"a record has no {name!r}")
        return state[name]


class _Tensor(_Record):
    """A record of a tensor, in contrast to those of other values."""


_ADMITTED: Mapping[tuple[str, str], Callable[..., object]] = {
    **{
        (_HOME + "metadata", name): _Record
        for name in (
            "Metadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    (_HOME + "metadata", "TensorStorageMetadata"): _Tensor,
    (_HOME + "filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    **{
        (home, name): _Record
        for home in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


class _Place(NamedTuple):
    """The place of a chunk: the relative path of its file, and a range of bytes."""

    file: str
    start: int
    nbytes: int


def _admitted(module: str, name: str) -> Any:
    if module == "torch" and name in SAFETENSORS_NAMES:
        return name  # a dtype
    if (module, name) not in _ADMITTED:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
    return _ADMITTED[module, name]


class _Range(io.RawIOBase):
    """A range of an open file, as a file."""

    def __init__(self, file: IO[bytes], start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._position = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._nbytes - self._position), 0)
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def is_distributed(path: Path) -> bool:
    """Tells whether a folder is a checkpoint of torch.distributed."""
    return (path / METADATA).is_file()


def read_tensors(
    folder: Path, files: dict[Path, int], wanted: Callable[[str], bool]
) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name (flattened as torch does: `model.layers.0.weight`).

    Files that hold those that are `wanted` are added to `files`, which numbers them. Values that are no
    tensors are left out.
    Raises SourceError naming what cannot be trusted: classes that are not admitted, ranges outside their
    file or the folder, chunks that leave a hole or overlap.
    """
    path = folder / METADATA
    try:
        described, places = _described(path)
    except SourceError:
        raise
    except Exception as error:
        _refuse_part(path, f"it cannot be read ({type(error).__name__}: {error})")
    tensors = {}
    for name, (dtype, shape, chunks) in described.items():
        if not wanted(name):
            continue
        _check_cover(path, name, shape, chunks)
        boxes = [
            _box(folder, name, (dtype, *chunk), places.get((name, chunk[0])), files)
            for chunk in chunks
            if prod(chunk[1])
        ]
        nbytes = prod(shape) * ITEM_BITS[dtype] // 8
        tensors[name] = StoredTensor(path, dtype, shape, nbytes, tuple(boxes))
    if not described:
        raise SourceError(f"{folder} holds no tensors; give the folder of a checkpoint")
    return tensors


Chunk = tuple[tuple[int, ...], tuple[int, ...]]
Described = dict[str, tuple[str, tuple[int, ...], list[Chunk]]]


def _described(path: Path) -> tuple[Described, dict[tuple[str, tuple[int, ...]], _Place]]:
    """Returns the content of `.metadata`: dtype, shape and chunks of each tensor, and each chunk's place."""
    metadata: Any = load(io.BytesIO(read_bounded(path, "a pickle of a checkpoint")), _admitted)
    described: Described = {}
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, _Tensor):
            stated = value.properties.state[0]
            dtype = SAFETENSORS_NAMES.get(stated) if isinstance(stated, str) else None
            if dtype is None:
                _refuse_part(path, f"tensor {_text(path, name)!r} has the dtype {reprlib.repr(stated)}")
            chunks = dict.fromkeys((_sizes(path, c.offsets), _sizes(path, c.sizes)) for c in value.chunks)
            described[_text(path, name)] = (dtype, _sizes(path, value.size), list(chunks))
    places = {
        (_text(path, index.fqn), _sizes(path, index.offset)): _place(path, info)
        for index, info in metadata.storage_data.items()
        if index.state.get("offset") is not None  # other entries are no tensors
    }
    return described, places


def _place(path: Path, info: Any) -> _Place:
    start, nbytes = _sizes(path, (info.offset, info.length))
    place = _Place(_text(path, info.relative_path), start, nbytes)
    if transforms := info.state.get("transform_descriptors"):
        raise SourceError(
            f"{path} says that {place.file} is stored as {reprlib.repr(transforms)}: "
            "save it again without extensions"
        )
    return place


def _text(path: Path, value: object) -> str:
    if not isinstance(value, str):
        _refuse_part(path, f"{reprlib.repr(value)} is no name")
    return value


def _sizes(path: Path, value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        _refuse_part(path, f"{reprlib.repr(value)} is no size of a tensor")
    return value


def _check_cover(path: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Refuse chunks that do not hold every element of a tensor exactly once."""
    for offsets, sizes in chunks:
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            _refuse_part(
                path,
                f"tensor {name!r} of shape {list(shape)} has a chunk of {list(sizes)} at {list(offsets)}",
            )
    ordered = sorted(chunk for chunk in chunks if prod(chunk[1]))
    compared = 0
    for k, box in enumerate(ordered):
        for j in range(k + 1, len(ordered)):
            other = ordered[j]
            if other[0] and other[0][0] >= box[0][0] + box[1][0]:
                break  # all other chunks begin behind it
            compared += 1
            if compared > _MOST_COMPARED:
                _refuse_part(path, f"tensor {name!r} has {len(ordered)} chunks beside one another")
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other, strict=True)):
                _refuse_part(
                    path, f"the chunks of tensor {name!r} at {list(box[0])} and {list(other[0])} overlap"
                )
    if sum(prod(sizes) for _, sizes in ordered) != prod(shape):
        _refuse_part(path, f"the chunks of tensor {name!r} leave a hole in its shape {list(shape)}")


def _box(
    folder: Path,
    name: str,
    wanted: tuple[str, tuple[int, ...], tuple[int, ...]],
    place: _Place | None,
    files: dict[Path, int],
) -> Box:
    dtype, offsets, sizes = wanted
    if place is None:
        _refuse_part(
            folder / METADATA, f"it does not say where the chunk of tensor {name!r} at {list(offsets)} is"
        )
    file = _file(folder, name, place)
    placed = _entry(file, name, place)
    if (placed.dtype, placed.shape) != (dtype, sizes):
        _refuse_part(
            file,
            f"the chunk of tensor {name!r} at {list(offsets)} is {placed.dtype} {list(placed.shape)} "
            f"where {dtype} {list(sizes)} was expected",
        )
    return Box(files.setdefault(file, len(files)), placed.start, offsets, sizes)


def _file(folder: Path, name: str, place: _Place) -> Path:
    """Returns the path of a chunk's file, once it is known to be in the folder and long enough."""
    relative = Path(place.file)
    if relative.is_absolute() or ".." in relative.parts or "\0" in place.file:
        _refuse_part(folder / METADATA, f"it names {place.file!r}, which is outside its folder")
    file = folder / relative
    if not file.is_file():
        raise SourceError(f"{file}, which holds tensor {name!r}, is missing: complete the checkpoint")
    nbytes = file.stat().st_size
    if place.start + place.nbytes > nbytes:
        raise SourceError(
            f"{file} has {nbytes} bytes where tensor {name!r} is at {place.start} to "
            f"{place.start + place.nbytes}: it has been truncated; restore the file"
        )
    return file


def _entry(file: Path, name: str, place: _Place) -> TensorEntry:
    """Tells where the values of a chunk lie in a file of torch.save's, or of safetensors."""
    with reading(file), open(open_regular(file), "rb") as opened:
        opened.seek(place.start)
        if opened.read(len(_ZIP)) == _ZIP:
            window = _Range(opened, place.start, place.nbytes)
            tensor = read_tensor(window, file, name)
            return TensorEntry(
                tensor.dtype, tensor.shape, place.start + tensor.start, place.start + tensor.stop
            )
    entries = read_header(file).entries
    if name not in entries:
        _refuse_part(file, f"it does not hold tensor {name!r}")
    return entries[name]


def _refuse_part(path: Path, reason: str) -> NoReturn:
    refuse(path, reason, title="part of a checkpoint")

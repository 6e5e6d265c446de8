"""Finds tensors in files of torch.save and of torch.distributed, without running code from them."""

from __future__ import annotations

import io
import pickle
import re
import reprlib
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.building.refusals import sentence
from penstock.runtime.checkpoint.stored_tensor import Box, StoredTensor
from penstock.runtime.files.safetensors_file import (
    ITEM_BITS,
    SAFETENSORS_NAMES,
    TensorEntry,
    read_header,
    reading,
    refuse,
)
from penstock.schedule.bounded_file import open_regular, open_zip, read_bounded, refuse_larger
from penstock.schedule.facts.errors import SourceError

_DEEPEST, _LARGEST = 3, 512
"""The most levels of a tuple, and the most leaves of it."""

Name = Callable[[str, str], Any]
"""What stands for a name in a module; raises pickle.UnpicklingError for one that is not admitted."""


def load(file: IO[bytes], find: Name) -> Any:
    """The object that a pickle describes, made of what `find` returns for each name.

    Raises whatever error there is for bytes that are no pickle, or one that is not admitted.
    """
    return _Unpickler(file, find).load()


def check(file: IO[bytes]) -> None:
    """Raises whatever error there is for a pickle that could not be read in time."""
    _Unpickler(file, lambda module, name: Inert).load()


class Inert(dict[Any, Any]):
    """Stands for any object of a pickle, and takes whatever state that gives it."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Takes an item, and forgets it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


# Python's own unpickler in Python: that in C makes its table of values as large as a pickle says.
_Base: Any = pickle._Unpickler


class _Unpickler(_Base):  # type: ignore[misc]
    dispatch: ClassVar = dict(_Base.dispatch)

    def __init__(self, file: IO[bytes], find: Name) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: object) -> Any:
        return Inert()

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"it names the extension {code}")


def _limited(opcode: int) -> Callable[[Any], None]:
    make = _Base.dispatch[opcode]

    def load_tuple(self: Any) -> None:
        make(self)
        if _leaves(self.stack[-1], _DEEPEST) > _LARGEST:
            raise pickle.UnpicklingError("it nests tuples as no checkpoint does")

    return load_tuple


def _leaves(value: tuple[Any, ...], levels: int) -> int:
    """The leaves of a tuple; more than any may have, if it has more levels."""
    if levels == 0:
        return _LARGEST + 1
    count = len(value)
    for element in value:
        if type(element) is tuple:
            count += _leaves(element, levels - 1)
            if count > _LARGEST:
                break
    return count


def _refused(self: Any) -> None:
    raise pickle.UnpicklingError("it takes memory as no checkpoint does")


for _opcode in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
    _Unpickler.dispatch[_opcode[0]] = _refused
for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Unpickler.dispatch[_opcode[0]] = _limited(_opcode[0])


SUFFIXES = (".pt", ".pth", ".bin")

_MAGIC = b"PK\x03\x04"

_HEADER = 30
_NAME_LENGTHS = 26
"""Bytes of a record's own header in a zip without name and extra field, and where their lengths are."""


_LONGEST_ORDER = 8
"""More bytes than any name of a byte order has."""


def is_torch_file(path: Path) -> bool:
    """Tell whether torch.save wrote a file, by its name, or by its first bytes if the name has no suffix."""
    return path.suffix in SUFFIXES or (not path.suffix and _is_zip(path))


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a state dict in a file, by name: dtype, shape and bytes.

    Raises SourceError for a file that is not a zip of torch.save, that holds anything but a mapping of dense
    tensors, or that would have to run code to be read.
    """
    if not _is_zip(path):
        raise SourceError(f"{path} is not a file that torch.save wrote (a zip): convert it with torch first")
    with reading(path), open(open_regular(path), "rb") as file:
        records = _records(file, path)
        file.seek(0)
        loaded = _load(file, path)
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    return {name: _entry(path, name, value, records) for name, value in loaded.items()}


def read_tensor(file: Any, path: Path, name: str) -> TensorEntry:
    """Returns the place of the one tensor that torch.save wrote to `file`; messages name `path`, `name`."""
    records = _records(file, path)
    file.seek(0)
    return _entry(path, name, _load(file, path), records)


def _is_zip(path: Path) -> bool:
    """Tells whether a file is a zip, for torch too: others may have one at their end."""
    with reading(path), open(open_regular(path), "rb") as file:
        begins = file.read(len(_MAGIC)) == _MAGIC
        try:
            return begins and zipfile.is_zipfile(file)
        except zipfile.BadZipFile:
            return False


def _load(file: Any, path: Path) -> Any:
    try:
        with FakeTensorMode():  # in this mode tensors have no memory, and know their place in the file
            return torch.load(file, weights_only=True)
    except Exception as error:
        raise SourceError(
            f"{path} cannot be read without running code in it ({_reason(error)}): load it with "
            "torch.load where you trust it, and save its state dict"
        ) from error


def _reason(error: Exception) -> str:
    if refused := re.search(r"GLOBAL (\S+) was not an allowed", str(error)):
        return f"it calls {refused[1]}"
    reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return sentence(ValueError(reason))


def _records(file: Any, path: Path) -> Mapping[int, int]:
    """Returns the bytes of each record of a zip that is stored as it is, by where they begin.

    torch computes the places from the layout that torch.save uses, without checking that the file has it, and
    it crashes if it has to swap the bytes of tensors without memory.
    """
    records = {}
    try:
        with open_zip(file, path) as archive:
            for info in archive.infolist():
                if info.filename.split("/")[1:2] != ["data"]:  # the bytes of tensors are not read here
                    _check_record(archive, info, path)
                if info.compress_type == zipfile.ZIP_STORED and archive.fp is not None:
                    archive.fp.seek(info.header_offset + _NAME_LENGTHS)
                    start = info.header_offset + _HEADER + sum(struct.unpack("<HH", archive.fp.read(4)))
                    records[start] = info.file_size
    except SourceError:
        raise
    except Exception as error:  # of names, sizes and codes in the zip, and of the pickle in it
        reason = str(error) or type(error).__name__
        raise SourceError(f"{path} is no intact file of torch.save ({reason:.200}); restore it") from error
    return records


def _check_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    """Raise an error for a record that torch would read whole in too much memory or time, in any case."""
    name = info.filename.lower()
    if info.compress_type != zipfile.ZIP_STORED:
        raise SourceError(f"{path} has {info.filename} compressed: load it with torch and save it again")
    refuse_larger(f"{info.filename} of {path}", info.file_size, "a pickle of a checkpoint")
    with archive.open(info) as record:
        if name.endswith("/byteorder") and record.read(_LONGEST_ORDER) != b"little":
            raise SourceError(f"{path} was saved on a big-endian machine: save it again on this one")
        if name.endswith(".pkl"):
            check(record)


def _entry(path: Path, name: object, value: object, records: Mapping[int, int]) -> TensorEntry:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        named = reprlib.repr(name)
        raise SourceError(f"{path} holds {type(value).__name__} {named} in its state dict, expected tensors")
    dense = value.layout is torch.strided and not value.is_quantized
    offset = getattr(value.untyped_storage(), "_checkpoint_offset", None) if dense else None
    dtype = SAFETENSORS_NAMES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or offset is None or not value.is_contiguous():
        raise SourceError(
            f"tensor {name!r} of {path} is not dense, or of the dtype {value.dtype}: load it, make "
            "it contiguous and save it again"
        )
    start = int(offset) + int(value.storage_offset()) * value.itemsize
    stop = start + value.numel() * value.itemsize
    if value.numel() and stop > int(offset) + records.get(int(offset), 0):
        raise SourceError(
            f"tensor {name!r} of {path} is not where torch.save puts it: the file was packed again, or "
            "damaged; load it with torch and save it again"
        )
    return TensorEntry(dtype, tuple(value.shape), start, stop)


METADATA = ".metadata"
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
    placed = _placed_entry(file, name, place)
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


def _placed_entry(file: Path, name: str, place: _Place) -> TensorEntry:
    """Tells where the values of a chunk lie in a file of torch.save's, or of safetensors."""
    with reading(file), open(open_regular(file), "rb") as opened:
        opened.seek(place.start)
        if opened.read(len(_MAGIC)) == _MAGIC:
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

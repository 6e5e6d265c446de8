"""Reads the headers of safetensors files that are not trusted."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.schedule.bounded_file import CEILINGS, open_regular, read_bounded
from penstock.schedule.facts.errors import SourceError

ELSEWHERE = "name a file that is there"
"""What to do about a missing file that somebody has named."""

RECOMPILE = "put the file back, or compile again from where it is now"
"""What to do about a missing file of an artifact."""

PREFIX_BYTES = 8
HEADER_LIMIT = CEILINGS["a header of weights"]

ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one element of every dtype that safetensors 0.8 knows, by the format's own names."""

TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""torch's name (without prefix) of each dtype whose elements are whole bytes."""

FLOATS = frozenset(
    name for key, name in TORCH_NAMES.items() if key.startswith(("F", "BF")) and key != "F8_E8M0"
)
"""The floating-point dtypes that torch converts into one another, by torch's name."""

SAFETENSORS_NAMES: Mapping[str, str] = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""safetensors' name of each torch dtype. One that is missing (complex128, packed float4) is stored as U8."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's safetensors dtype and shape, and the half-open range of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """A checked header. `entries` are in file order; `raw` is length prefix and JSON as found."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    raw: bytes
    file_nbytes: int

    @property
    def data_start(self) -> int:
        return len(self.raw)


def read_header(path: Path) -> Header:
    """Returns the checked header of a safetensors file; SourceError says what is wrong with the file."""
    with open_for_reading(path) as fd:
        return read_open_header(fd, path)


def read_open_header(fd: int, path: Path) -> Header:
    """Reads the header as `read_header` does, from a file that is open. `path` is for messages."""
    return parse_header(read_raw_header(fd, path), os.fstat(fd).st_size, path)


def parse_header(raw: bytes, file_nbytes: int, path: Path) -> Header:
    """Returns the checked header in `raw` (length prefix and JSON) of a file of `file_nbytes`."""
    fields = _parse_json(raw[PREFIX_BYTES:], path)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(path, "__metadata__ is not an object of strings")
    for name in fields:
        if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
            refuse(path, f"the name {name!r} is no text")
    entries = {name: _parse_entry(name, value, len(raw), path) for name, value in fields.items()}
    ordered = dict(sorted(entries.items(), key=lambda named: (named[1].start, named[1].stop)))
    _check_tiling(ordered, len(raw), file_nbytes, path)
    return Header(ordered, metadata, raw, file_nbytes)


def read_raw_header(fd: int, path: Path) -> bytes:
    """Returns length prefix and JSON of a file that is open, unparsed, once the length is checked."""
    file_nbytes = os.fstat(fd).st_size
    prefix = read_exactly(fd, 0, PREFIX_BYTES, path) if file_nbytes >= PREFIX_BYTES else b""
    if not prefix:
        refuse(path, f"it has {file_nbytes} bytes, too few for the length of a header")
    length = int.from_bytes(prefix, "little")
    room = min(HEADER_LIMIT, file_nbytes - PREFIX_BYTES)
    if length > room:
        refuse(path, f"the header's length is given as {length} bytes where at most {room} are possible")
    return prefix + read_exactly(fd, PREFIX_BYTES, length, path)


def read_exactly(fd: int, offset: int, nbytes: int, path: Path) -> bytes:
    """Return `nbytes` of an open file from `offset` on. Raises SourceError if they cannot be read."""
    parts = []
    while nbytes:
        try:
            part = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise SourceError(
                f"reading bytes {offset} to {offset + nbytes} of {path} failed: {error.strerror}; "
                "check the disk, then try again"
            ) from error
        if not part:
            raise SourceError(
                f"{path} ends at byte {offset} where {nbytes} more were expected: it has been truncated; "
                "restore the file"
            )
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return b"".join(parts)


def index_files(path: Path | Sequence[Path], wanted: Callable[[str], bool] | None = None) -> tuple[Path, ...]:
    """Returns the safetensors files that `path` stands for, in order, each once.

    `path` is a `.safetensors` file, several, a checkpoint's `*.safetensors.index.json`, or a folder
    (its index if it has one, else all its `.safetensors` files by name). Of an index, only files that hold a
    tensor whose name is `wanted` are taken. SourceError names what is missing, or an index that reaches
    outside its own folder.
    """
    if not isinstance(path, Path):
        return tuple(dict.fromkeys(file for each in path for file in index_files(each, wanted)))
    if path.is_dir():
        return _folder_files(path, wanted)
    if not path.is_file():
        raise SourceError(f"{path} is not a file or folder that exists; give a checkpoint's path")
    if re.search(r"\.safetensors\.index(\.\w+)?\.json$", path.name):
        return indexed_files(path, wanted)
    if not is_safetensors(path):
        raise SourceError(f"{path} is neither a .safetensors file nor a .safetensors.index.json")
    return (path,)


def is_safetensors(path: Path) -> bool:
    """Tell whether a file is safetensors, by its name or else by its first bytes.

    A file of the hub's cache is a link to a blob, whose name has no suffix.
    """
    if path.suffix == ".safetensors":
        return True
    with open_for_reading(path) as fd, suppress(SourceError):
        begin = read_exactly(fd, 0, PREFIX_BYTES + 1, path)
        return begin.endswith(b"{") and int.from_bytes(begin[:PREFIX_BYTES], "little") <= HEADER_LIMIT
    return False


def own_place(path: Path) -> Path:
    """Return the absolute path of a file under its own name, in the folder to which links of folders lead.

    The file itself may be a link to one of another name, which says less to whoever reads a message.
    """
    return path.parent.resolve() / path.name


@contextmanager
def open_for_reading(path: Path, otherwise: str = ELSEWHERE) -> Iterator[int]:
    """Yield a descriptor of a weight file. Raises SourceError for what the system refuses meanwhile."""
    with reading(path):
        fd = open_descriptor(path, otherwise)
        try:
            yield fd
        finally:
            close_read(fd)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SourceError for what the system refuses while `path` is read, or files in it.

    What is named is the path in the system's own error, if it has one.
    """
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else os.fsdecode(error.filename)
        # Libraries raise it as well, without a number, for what is wrong in a file.
        advice = ": check its permissions and the disk, then try again" if error.errno else ""
        raise SourceError(f"{where} cannot be read ({error.strerror or error}){advice}") from error


def close_read(fd: int) -> None:
    """Close a descriptor that was read from: where the system complains of it, nothing can be lost."""
    with suppress(OSError):
        os.close(fd)


def open_descriptor(path: Path, otherwise: str = ELSEWHERE) -> int:
    """A descriptor of a weight file, or SourceError; `otherwise` says what to do if it is missing."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing: {otherwise}") from error
    except OSError as error:
        raise SourceError(
            f"{path} cannot be opened ({error.strerror}); check its permissions and the disk"
        ) from error


def _folder_files(folder: Path, wanted: Callable[[str], bool] | None) -> tuple[Path, ...]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise SourceError(f"{folder} holds several checkpoints ({names}); name the index of one")
    files = indexed_files(indices[0], wanted) if indices else tuple(sorted(folder.glob("*.safetensors")))
    if not files and (wanted is None or not indices):
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        advice = f"name its files ({pickled[0]}, ...)" if pickled else "give the folder of a checkpoint"
        raise SourceError(f"{folder} holds no .safetensors file; {advice}")
    return files


def read_index(index: Path) -> dict[str, Any]:
    """Returns what an index says, whose `weight_map` has names of files. Raises SourceError if it is none."""
    with reading(index):
        fields = _parse_json(read_bounded(index, "an index"), index, title=_INDEX)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        refuse(index, "weight_map is not an object that gives each tensor its file", title=_INDEX)
    return fields


def indexed_files(index: Path, wanted: Callable[[str], bool] | None) -> tuple[Path, ...]:
    """Return the files that an index names, in order, each once. Raises SourceError as `index_files` does."""
    weight_map = read_index(index)["weight_map"]
    names = dict.fromkeys(file for name, file in weight_map.items() if wanted is None or wanted(name))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise SourceError(f"{index} names {name!r}, which is outside its folder; correct the index")
        if not (index.parent / name).is_file():
            raise SourceError(f"{index} names {name!r}, which is missing; complete the checkpoint's download")
    return tuple(index.parent / name for name in names)


_FILE, _INDEX = "a safetensors file", "an index"


def _parse_json(text: bytes, path: Path, title: str = _FILE) -> dict[str, object]:
    if not text.startswith(b"{"):
        refuse(path, f"a JSON object was expected, and the text begins with {text[:8]!r}", title)
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(path, f"its JSON cannot be read ({error})", title)
    assert isinstance(fields, dict)
    return fields


def _without_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the name {name!r} occurs twice")
        fields[name] = value
    return fields


def _parse_entry(name: str, value: object, data_start: int, path: Path) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"tensor {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        refuse(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        refuse(path, f"tensor {name!r} has the shape {shape!r}, which is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(path, f"tensor {name!r} has the data_offsets {offsets!r}, which are not a begin and an end")
    # Python integers do not overflow, so the product is exact whatever the shape.
    bits, nbytes = math.prod(shape) * ITEM_BITS[dtype], offsets[1] - offsets[0]
    if bits != nbytes * 8:
        refuse(path, f"tensor {name!r} of {dtype} {shape} needs {bits / 8:g} bytes and is given {nbytes}")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: object) -> bool:
    # bool is an int to Python, and `true` is no size.
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _check_tiling(entries: Mapping[str, TensorEntry], data_start: int, file_nbytes: int, path: Path) -> None:
    position = data_start
    for name, tensor in entries.items():
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            refuse(path, f"tensor {name!r} at byte {tensor.start} {kind}, which ends at {position}")
        position = tensor.stop
    if position != file_nbytes:
        refuse(path, f"its tensors end at byte {position} and the file has {file_nbytes}: it is incomplete")


def refuse(path: Path, reason: str, title: str = _FILE) -> NoReturn:
    """Raise SourceError: the file at `path` is not `title`, for a reason."""
    raise SourceError(f"{path} is not {title} that can be trusted: {reason}; get an intact copy")

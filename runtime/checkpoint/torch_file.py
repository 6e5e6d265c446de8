"""Finds the tensors in a file that torch.save wrote, without reading them or running code from the file."""

from __future__ import annotations

import re
import reprlib
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.building.refusals import sentence
from penstock.runtime.checkpoint import pickles
from penstock.runtime.files.safetensors_file import SAFETENSORS_NAMES, TensorEntry, reading
from penstock.schedule.bounded_file import open_regular, open_zip, refuse_larger
from penstock.schedule.facts.errors import SourceError

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
    """Returns the reason of an error, without torch's advice to run the code."""
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
                if not _is_tensor(info.filename):
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


def _is_tensor(record: str) -> bool:
    """Tell whether a record of a zip has the bytes of a tensor, which are not read here, by its name."""
    return record.split("/")[1:2] == ["data"]


def _check_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    """Raise an error for a record that torch reads as a whole, if that takes too much memory or time.

    torch finds records whatever the case of their names.
    """
    name = info.filename.lower()
    if info.compress_type != zipfile.ZIP_STORED:
        raise SourceError(f"{path} has {info.filename} compressed: load it with torch and save it again")
    refuse_larger(f"{info.filename} of {path}", info.file_size, "a pickle of a checkpoint")
    with archive.open(info) as record:
        if name.endswith("/byteorder") and record.read(_LONGEST_ORDER) != b"little":
            raise SourceError(f"{path} was saved on a big-endian machine: save it again on this one")
        if name.endswith(".pkl"):
            pickles.check(record)


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

"""Where the tensors of a file written by torch.save lie, without reading them or running code of the file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.runtime.safetensors_file import SAFETENSORS_NAMES, TensorEntry
from penstock.schedule.errors import SourceError

SUFFIXES = (".pt", ".pth", ".bin")


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a state dict in a file, by name: dtype, shape and bytes.

    Raises SourceError for a file that is not a zip of torch.save, that holds anything but a mapping of dense
    tensors, or that would have to run code to be read.
    """
    if not zipfile.is_zipfile(path):
        raise SourceError(f"{path} is not a file that torch.save wrote (a zip): convert it with torch first")
    found = _load(path, path)
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise SourceError(f"{path} holds a {type(found).__name__}, expected a state dict")
    nbytes = path.stat().st_size
    return {name: _entry(path, name, value, nbytes) for name, value in found.items()}


def read_tensor(file: Any, path: Path, name: str, nbytes: int) -> TensorEntry:
    """Where the one tensor that torch.save wrote to `file` lies; `path` and `name` are for messages."""
    return _entry(path, name, _load(file, path), nbytes)


def _load(file: Any, path: Path) -> Any:
    try:
        with FakeTensorMode():  # tensors have then no memory, and know their place in the file
            return torch.load(file, weights_only=True)
    except Exception as error:
        raise SourceError(
            f"{path} cannot be read without running code in it ({str(error).splitlines()[0]}): load it with "
            "torch.load where you trust it, and save its state dict"
        ) from error


def _entry(path: Path, name: object, value: object, file_nbytes: int) -> TensorEntry:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise SourceError(f"{path} holds {type(value).__name__} {name!r} in its state dict, expected tensors")
    offset = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    dtype = SAFETENSORS_NAMES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or offset is None or not value.is_contiguous():
        raise SourceError(
            f"tensor {name!r} of {path} is not dense, or of the dtype {value.dtype}: convert it"
        )
    start = int(offset) + int(value.storage_offset()) * value.itemsize
    stop = start + value.numel() * value.itemsize
    if stop > file_nbytes:
        raise SourceError(f"tensor {name!r} ends at byte {stop} of {path}, which has {file_nbytes}")
    return TensorEntry(dtype, tuple(value.shape), start, stop)

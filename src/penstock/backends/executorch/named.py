"""ExecuTorch's named data: payload and code of regions in the `.pte`, bytes of weights in the `.ptd`."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore

from penstock.backends.executorch.region import STORAGE
from penstock.passes.weights.lifted import has_values, storage_bytes
from penstock.schedule.facts.model import Extent, Storage, WeightFile

_PIECE = 16 << 20


class StorageBytes(FileBackedData):  # type: ignore[misc]
    """The bytes behind a tensor, as ExecuTorch takes them: written from where they lie, and never copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = storage_bytes(tensor.detach().cpu()).numpy().data
        digest = hashlib.sha256()
        for start in range(0, len(self._bytes), _PIECE):
            digest.update(self._bytes[start : start + _PIECE])
        self._digest = digest.digest()

    def __len__(self) -> int:
        return len(self._bytes)

    def prefix(self, size: int) -> bytes:
        """The first bytes."""
        return bytes(self._bytes[:size])

    def sha256(self) -> bytes:
        """The hash of all bytes."""
        return self._digest

    def to_bytes(self) -> bytes:
        """A copy of all bytes, which ExecuTorch's own writers do not ask for."""
        return bytes(self._bytes)

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        """Writes all bytes."""
        outfile.write(self._bytes)

    def close(self) -> None:
        """Does nothing: the bytes belong to the tensor."""


def hashed_key(prefix: str, data: bytes) -> str:
    """The key of bytes, which has their hash."""
    return prefix + hashlib.sha256(data).hexdigest()


def add_storages(
    store: NamedDataStore,
    storages: Sequence[Storage],
    values: Sequence[torch.Tensor],
    data_file: str,
    block: int,
) -> tuple[tuple[Storage, ...], tuple[WeightFile, ...]]:
    """Adds the bytes of storages to what the `.ptd` will hold; returns where they lie.

    If a storage has no values, none is added. A state that begins as zeros is not stored.
    """
    if not all(has_values(value) for value in values):
        return tuple(storages), ()
    files: dict[str, WeightFile] = {}
    numbers: dict[str, int] = {}
    placed = []
    for storage, value in zip(storages, values, strict=True):
        if not storage.nbytes or (storage.kind == "mutable" and not storage_bytes(value).any()):
            placed.append(storage)
            continue
        data = StorageBytes(value)
        digest = data.sha256().hex()
        key = STORAGE + digest
        if key not in files:
            store.add_named_data(key, data, alignment=block, external_tag=data_file)
            files[key] = WeightFile(data_file, len(data), 0, 0, "", "", "named", key)
        extent = Extent(numbers.setdefault(key, len(numbers)), 0, 0, storage.nbytes)
        placed.append(replace(storage, extents=(extent,), sha256=digest))
    return tuple(placed), tuple(files.values())

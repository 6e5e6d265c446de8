"""Reads tensors from a safetensors file into memory of their own, and compares them with what is there.

Nothing is mapped: where somebody makes a mapped file shorter, its last page reads as zeros, and the pages
after that end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.runtime.files.safetensors_file import (
    TORCH_NAMES,
    TensorEntry,
    open_for_reading,
    read_exactly,
    read_open_header,
)
from penstock.schedule.facts.errors import SourceError

_PIECE = 4 << 20
"""How much is read at once, beside the memory of a tensor."""


class TensorFile:
    """A safetensors file that is open: the names of its tensors, its metadata, and its tensors by name."""

    def __init__(self, fd: int, path: Path) -> None:
        header = read_open_header(fd, path)
        self.entries: Mapping[str, TensorEntry] = header.entries
        self.metadata: Mapping[str, str] = header.metadata
        self._fd, self._path = fd, path

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own, on the CPU. Raises KeyError for an unknown name, and SourceError."""
        stored = self.entries[name]
        if stored.dtype not in TORCH_NAMES:
            raise SourceError(f"{self._path} has {name!r} in {stored.dtype}, which torch has no dtype for")
        read = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        for start, chunk in self._chunks(stored):
            read[start : start + chunk.numel()] = chunk
        return read.view(getattr(torch, TORCH_NAMES[stored.dtype])).view(stored.shape)

    def holds(self, name: str, expected: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are those in `expected`, which are one-dimensional, on any device."""
        stored = self.entries[name]
        return stored.nbytes == expected.numel() and all(
            torch.equal(expected[start : start + chunk.numel()].cpu(), chunk)
            for start, chunk in self._chunks(stored)
        )

    def _chunks(self, stored: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, stored.nbytes, _PIECE):
            nbytes = min(_PIECE, stored.nbytes - start)
            data = bytearray(read_exactly(self._fd, stored.start + start, nbytes, self._path))
            yield start, torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Opens a safetensors file while the block runs. Raises SourceError for one that cannot be read."""
    with open_for_reading(path) as fd:
        yield TensorFile(fd, path)

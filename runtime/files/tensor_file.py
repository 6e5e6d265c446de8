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
        entry = self.entries[name]
        if entry.dtype not in TORCH_NAMES:
            raise SourceError(f"{self._path} has {name!r} in {entry.dtype}, which torch has no dtype for")
        found = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        for start, chunk in self._chunks(entry):
            found[start : start + chunk.numel()] = chunk
        return found.view(getattr(torch, TORCH_NAMES[entry.dtype])).view(entry.shape)

    def holds(self, name: str, held: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are those in `held`, which are one-dimensional, on any device."""
        entry = self.entries[name]
        return entry.nbytes == held.numel() and all(
            torch.equal(held[start : start + chunk.numel()].cpu(), chunk)
            for start, chunk in self._chunks(entry)
        )

    def _chunks(self, entry: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, entry.nbytes, _PIECE):
            nbytes = min(_PIECE, entry.nbytes - start)
            data = bytearray(read_exactly(self._fd, entry.start + start, nbytes, self._path))
            yield start, torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Opens a safetensors file while the block runs. Raises SourceError for one that cannot be read."""
    with open_for_reading(path) as fd:
        yield TensorFile(fd, path)

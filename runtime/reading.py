"""Reads extents of weight files into memory, by several readers, while the caller goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from penstock.runtime.source import Source
from penstock.schedule.model import Extent, Storage

_PIECE = 16 << 20


class HeldStorages:
    """Storages held whole in ordinary memory, which torch aligns to 64 bytes, and which arrives in the background.

    `buffers[s]` is the memory of storage s; its bytes are there once `wait` has returned. The source must
    stay open until `close`.
    """

    def __init__(
        self, storages: Sequence[Storage], chosen: Sequence[int], source: Source, readers: int
    ) -> None:
        self.buffers = {s: torch.empty(storages[s].nbytes, dtype=torch.uint8) for s in chosen}
        self._source = source
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="penstock-load")
        extents = ((e, self.buffers[s].data_ptr()) for s in chosen for e in storages[s].extents)
        self._reads: Sequence[Future[None]] = [self._pool.submit(self._read, *p) for p in _pieces(extents)]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages held."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def wait(self) -> None:
        """Return once every byte is there. SourceError, at every call, where one could not be read."""
        for read in self._reads:
            read.result()
        self._reads = ()

    def close(self) -> None:
        """Begin no further read and wait for those that run; may be called again."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, file: int, offset: int, address: int, nbytes: int) -> None:
        self._source.read_into(file, offset, address, nbytes)


def _pieces(work: Iterable[tuple[Extent, int]]) -> Iterable[tuple[int, int, int, int]]:
    """File, offset, address and bytes of each read, for extents and where their storages begin."""
    for extent, address in work:
        for at in range(0, extent.nbytes, _PIECE):
            nbytes = min(_PIECE, extent.nbytes - at)
            yield extent.file, extent.file_offset + at, address + extent.storage_offset + at, nbytes

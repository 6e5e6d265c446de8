"""Reads extents of weight files into memory, by several readers, while the caller goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import HUGE_PAGE, MADV_HUGEPAGE, hint, round_up
from penstock.runtime.system.threads import ReaderThreads
from penstock.schedule.facts.model import Extent, Storage

_PIECE = 16 << 20

_MAPPED_ALONE = 33 << 20
"""Bytes from which glibc's malloc always maps memory by itself, so that advice to the kernel ends with it."""


class HeldStorages:
    """Storages held whole in ordinary memory (at their phases), which are read in the background.

    `buffers[s]` is the memory of storage s; its bytes are there once `wait` has returned. The source must
    stay open until `close`.
    """

    def __init__(
        self, storages: Sequence[Storage], chosen: Sequence[int], source: Source, readers: int
    ) -> None:
        self.buffers = {s: bytes_at(storages[s].phase, storages[s].nbytes) for s in chosen}
        self._source, self._owner = source, os.getpid()
        extents = ((e, self.buffers[s].data_ptr()) for s in chosen for e in storages[s].extents)
        self._left = deque(_pieces(extents))
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._readers = ReaderThreads(min(readers, len(self._left)), self._read, "load")
        self._readers.start(self.close)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages held."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the readers, which cannot wait for themselves."""
        return self._readers.includes_caller

    def wait(self) -> None:
        """Return once every byte is there. SourceError, at every call, where one could not be read."""
        # Threads are not joined, because an interrupt would make the pool forget those that still run.
        with self._changed:
            self._changed.wait_for(lambda: not self._left and not self._running)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Begin no further read, and wait for those that run. It may be called again."""
        if os.getpid() != self._owner:
            return  # a forked child has no readers, and may have their lock
        with self._changed:
            self._left.clear()
            self._changed.wait_for(lambda: not self._running)

    def _read(self) -> None:
        while True:
            with self._changed:
                if not self._left:
                    return
                piece = self._left.popleft()
                self._running += 1
            try:
                self._source.read_into(*piece)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._left.clear()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


def bytes_at(phase: int, nbytes: int) -> torch.Tensor:
    """Flat bytes of new memory whose address is `phase` modulo 64, as is that of the tensor's own storage.

    Large memory has huge pages wherever a whole one lies in it: direct reads into small pages run at half the
    speed, and a product over huge ones takes some hundredths less time.
    """
    whole = torch.empty(phase + nbytes, dtype=torch.uint8, device="cpu")  # torch aligns it to 64 bytes
    if whole.nbytes >= _MAPPED_ALONE:
        start = round_up(whole.data_ptr(), HUGE_PAGE)
        hint(start, (whole.data_ptr() + whole.nbytes) // HUGE_PAGE * HUGE_PAGE - start, MADV_HUGEPAGE)
    if not phase or not nbytes:
        return whole[phase:]
    return torch.frombuffer(whole.numpy(), dtype=torch.uint8, offset=phase)


def _pieces(work: Iterable[tuple[Extent, int]]) -> Iterable[tuple[int, int, int, int]]:
    """File, offset, address and bytes of each read, for extents and the addresses of their storages."""
    for extent, address in work:
        for at in range(0, extent.nbytes, _PIECE):
            nbytes = min(_PIECE, extent.nbytes - at)
            yield extent.file, extent.file_offset + at, address + extent.storage_offset + at, nbytes

"""The disk behind a host as a stream: reads on threads of their own, in the order that waits give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from penstock.runtime.device import FileRead
from penstock.runtime.queue import PIECE
from penstock.runtime.rates import READERS
from penstock.runtime.source import Source


@dataclass(frozen=True)
class DiskEvent:
    """Complete once all reads that `submitted` results in are, or one of them has failed."""

    submitted: Future[list[Future[None]]]

    def query(self) -> bool:
        return self.submitted.done() and all(read.done() for read in self.submitted.result())

    def synchronize(self) -> None:
        """Raises what the first read that failed raised."""
        reads = self.submitted.result()
        wait(reads)
        for read in reads:
            read.result()


class DiskStream:
    """One thread keeps the order and waits; `READERS` others read, a piece of 2 MiB at a time.

    After an error nothing is read: every event raises it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._order = ThreadPoolExecutor(1, thread_name_prefix="penstock-disk")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="penstock-reader")
        self._reads: list[Future[None]] = []  # that may still run, and the first that failed

    def read(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._order.submit(self._submit, target, reads)

    def wait(self, synchronize: Callable[[], None]) -> None:
        """Reads enqueued from now on start once `synchronize` has returned."""
        self._order.submit(self._wait, synchronize)

    def record(self) -> DiskEvent:
        return DiskEvent(self._order.submit(lambda: list(self._reads)))

    def close(self) -> None:
        """Wait for what was enqueued. Idempotent."""
        self._order.shutdown()
        self._readers.shutdown()

    def _submit(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._reads = [read for read in self._reads if not read.done() or read.exception()]
        if any(read.done() for read in self._reads):
            return
        for one in reads:
            for at in range(0, one.nbytes, PIECE):
                piece = FileRead(one.file, one.offset + at, one.target + at, min(PIECE, one.nbytes - at))
                self._reads.append(self._readers.submit(self._read, target, piece))

    def _read(self, target: torch.Tensor, one: FileRead) -> None:
        """Keeps the memory alive that is read into."""
        self._source.read_into(one.file, one.offset, target.data_ptr() + one.target, one.nbytes)

    def _wait(self, synchronize: Callable[[], None]) -> None:
        failed: Future[None] = Future()
        try:
            synchronize()
        except BaseException as error:
            failed.set_exception(error)
            self._reads.append(failed)

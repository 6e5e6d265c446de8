"""Treats the disk behind a host as a stream: threads read, and only waits order what they read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from penstock.runtime.device.protocol import FileRead
from penstock.runtime.files.source import Source
from penstock.runtime.stream.queue import PIECE
from penstock.runtime.system.threads import READERS, WorkerPool
from penstock.schedule.facts.errors import StreamError


@dataclass(frozen=True)
class DiskEvent:
    """An event that is complete once all reads in the result of `submitted` have ended."""

    stream: DiskStream
    submitted: Future[list[Future[None]]]

    def query(self) -> bool:
        return self.submitted.done() and all(read.done() for read in self.submitted.result())

    def synchronize(self) -> None:
        """Wait for the reads. Raises the first error of the stream."""
        wait(self.submitted.result())
        if self.stream.error is not None:
            raise self.stream.error


class DiskStream:
    """A stream of reads: one thread keeps the order and waits, and `READERS` others read 2 MiB at a time.

    After an error nothing more is read, and every event raises it.
    """

    def __init__(self, source: Source) -> None:
        self.error: BaseException | None = None
        self._source, self._process = source, os.getpid()
        self._order = WorkerPool(1, "disk")
        self._readers = WorkerPool(READERS, "reader")
        self._reads: list[Future[None]] = []  # may still run; for the ordering thread only

    def read(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._order.submit(self._guarded, lambda: self._submit(target, reads))

    def wait(self, synchronize: Callable[[], None]) -> None:
        """Have the reads that are enqueued from now on start once `synchronize` has returned."""
        self._order.submit(self._guarded, synchronize)

    def record(self) -> DiskEvent:
        return DiskEvent(self, self._order.submit(lambda: list(self._reads)))

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the stream's own threads, which cannot wait for themselves."""
        return self._order.includes_caller or self._readers.includes_caller

    def close(self) -> None:
        """Wait for the pieces that are being read, and read no others. A second call does nothing."""
        if os.getpid() != self._process:
            return  # the threads are the parent's, and so is what their locks say
        self.error = self.error or StreamError("the streamed module is closed: load the program again")
        self._order.shutdown()
        self._readers.shutdown()

    def _submit(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._reads = [read for read in self._reads if not read.done()]
        for read in reads:
            for at in range(0, read.nbytes, PIECE):
                piece = FileRead(read.file, read.offset + at, read.target + at, min(PIECE, read.nbytes - at))
                work = self._reader(target, piece)
                self._reads.append(self._readers.submit(self._guarded, work))

    def _reader(self, target: torch.Tensor, piece: FileRead) -> Callable[[], None]:
        """Returns what reads a piece, and keeps the memory alive that it reads into."""
        return lambda: self._source.read_into(
            piece.file, piece.offset, target.data_ptr() + piece.target, piece.nbytes
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do some work, unless work before it has failed. Its error is the stream's from then on."""
        if self.error is None:
            try:
                work()
            except BaseException as error:
                self.error = error


class DiskedDevice(ABC):
    """Base of devices with a real disk behind their host. Subclasses order all other streams."""

    def __init__(self) -> None:
        self._disks: list[DiskStream] = []
        self._process = os.getpid()

    def open_disk(self, source: Source) -> DiskStream:
        self._disks.append(DiskStream(source))
        return self._disks[-1]

    def read(self, disk: DiskStream, target: torch.Tensor, reads: Sequence[FileRead], label: object) -> None:
        disk.read(target, reads)

    def record(self, stream: Any) -> Any:
        return stream.record() if isinstance(stream, DiskStream) else self._record(stream)

    def mark(self, stream: Any, spent: Any) -> Any:
        return self._record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        if isinstance(stream, DiskStream):
            stream.wait(event.synchronize)
        elif isinstance(event, DiskEvent):
            event.synchronize()
        else:
            self._wait(stream, event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def free_host(self, memory: torch.Tensor) -> None:
        del memory  # ordinary memory goes with its last tensor

    def trim(self) -> None:
        return

    @property
    def capturing(self) -> bool:
        return False

    @property
    def in_reader(self) -> bool:
        return any(disk.in_reader for disk in self._disks)

    @abstractmethod
    def _record(self, stream: Any) -> Any:
        """Returns an event behind what was enqueued on a stream of the device."""

    @abstractmethod
    def _wait(self, stream: Any, event: Any) -> None:
        """Have a stream of the device wait for an event of another."""

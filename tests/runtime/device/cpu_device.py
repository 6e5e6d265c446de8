"""A CPU as a device: each stream copies on a thread of its own, and kernels run where they are called.

The shortest implementation of the protocol, with which the suite of devices compares the others.
`load(device="cpu")` does not stream this way: where device and host share one memory, mapping the
files is faster than copying them (runtime/arena/mapping.py).
"""

import os
import threading
from dataclasses import dataclass

import torch

from penstock.runtime.device.accelerator import DiskedDevice
from penstock.runtime.device.protocol import aligned_bytes
from penstock.runtime.system.threads import WorkerPool


class CpuStream:
    """Runs work in order, on a thread or (without a name) on the caller's; after an error it runs no more."""

    def __init__(self, name):
        self.pool = WorkerPool(1, name) if name else None
        self.error = None

    def run(self, work):
        if self.pool is None:
            work()
        else:
            self.pool.submit(self._run, work)

    def _run(self, work):
        try:
            if self.error is None:
                work()
        except BaseException as error:
            self.error = error


@dataclass(frozen=True)
class CpuEvent:
    """Set by its stream, also when the stream has failed: waiting for it then raises the stream's error."""

    stream: CpuStream
    reached: threading.Event

    def query(self):
        return self.reached.is_set()

    def synchronize(self):
        self.reached.wait()
        if self.stream.error is not None:
            raise self.stream.error


class CpuDevice(DiskedDevice):
    """Ordinary memory. Streams are threads."""

    def __init__(self):
        super().__init__()
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self._caller = CpuStream(None)
        self._streams = []

    def allocate(self, nbytes, purpose):
        return aligned_bytes(nbytes)

    def allocate_host(self, nbytes, *, once=False):
        return aligned_bytes(nbytes)

    def open_stream(self, name):
        self._streams.append(CpuStream(name))
        return self._streams[-1]

    def current_stream(self):
        return self._caller

    def copy(self, stream, target, moves, label):
        def work():
            for move in moves:
                arriving = move.source[move.start : move.start + move.nbytes]
                target[move.target : move.target + move.nbytes].copy_(arriving)

        stream.run(work)

    def copy_out(self, stream, source, moves, label):
        def work():
            for move in moves:
                leaving = source[move.target : move.target + move.nbytes]
                move.source[move.start : move.start + move.nbytes].copy_(leaving)

        stream.run(work)

    def fill(self, stream, target, start, stop, value):
        stream.run(lambda: target[start:stop].fill_(value))

    @property
    def in_reader(self):
        pools = [stream.pool for stream in self._streams if stream.pool is not None]
        return super().in_reader or any(pool.includes_caller for pool in pools)

    def _record(self, stream):
        event = CpuEvent(stream, threading.Event())
        if stream.pool is None:
            event.reached.set()
        else:
            stream.pool.submit(event.reached.set)
        return event

    def _wait(self, stream, event):
        stream.run(event.synchronize)

    def finish(self):
        for stream in self._streams:
            self._record(stream).synchronize()

    def close(self):
        for stream in self._streams:
            if stream.pool is not None and os.getpid() == self._process:
                stream.pool.shutdown()
        for disk in self._disks:
            disk.close()
        self._streams.clear()
        self._disks.clear()

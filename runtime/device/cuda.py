"""Drives a CUDA device with torch's streams and events, one allocation, and page-locked host memory.

Nothing here runs without a GPU, so it holds nothing but calls of torch. What decides is in streamer.py, which
is tested with the simulated device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from penstock.runtime.device.disk import DiskedDevice
from penstock.runtime.device.protocol import Move, aligned_bytes
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size

_ALIGNMENT = 4096


class CudaDevice(DiskedDevice):
    """A CUDA device by its index, by default the current one. Raises StreamError where torch finds none.

    Without `page_lock` host memory is ordinary: the driver copies from it in pieces of its own, and the host
    waits for that.
    """

    def __init__(self, index: int | None = None, *, page_lock: bool = True) -> None:
        if not torch.cuda.is_available():
            why = (
                "this torch is built without CUDA"
                if torch.version.cuda is None
                else "there is no driver or GPU"
            )
            name = "cuda" if index is None else f"cuda:{index}"
            raise StreamError(
                f"there is no device {name!r} here ({why}): the device sim:h200 runs plans without one"
            )
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if index is None else index
        if index >= count:
            raise StreamError(f"there is no device 'cuda:{index}': this machine has {count}")
        super().__init__()
        self.name = f"cuda:{index}"
        self._page_lock = page_lock
        self.torch_device = torch.device("cuda", index)
        self._streams: list[torch.cuda.Stream] = []
        self._locked: list[torch.Tensor] = []

    @classmethod
    def of(cls, name: str, *, page_lock: bool = True) -> CudaDevice:
        """Opens the device of a name such as `cuda` or `cuda:1`."""
        index = name.partition(":")[2]
        return cls(int(index) if index else None, page_lock=page_lock)

    @property
    def product(self) -> str:
        """The model and the memory of the device, which its index does not tell."""
        facts = torch.cuda.get_device_properties(self.torch_device)
        return f"{facts.name}, {facts.total_memory} bytes"

    @property
    def held_by_others(self) -> int:
        """Bytes of the device that are taken, but not by torch's allocator in this process."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device))

    @property
    def allocated(self) -> int:
        """Bytes that torch's allocator has given out in this process."""
        return torch.cuda.memory_allocated(self.torch_device)

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise StreamError(
                f"{self.name} is out of memory: {format_size(nbytes)} for {purpose} do not fit into the "
                f"{format_size(free)} that are free of {format_size(total)}: lower the budget by "
                f"{format_size(max(nbytes - free, 1 << 20))} at least"
            ) from error

    def allocate_host(self, nbytes: int, *, once: bool = False) -> torch.Tensor:
        """Returns exactly `nbytes`, registered, where torch's own allocator rounds up to powers of two."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = aligned_bytes(nbytes, _ALIGNMENT)
        if not self._page_lock:
            return memory
        code = int(_runtime().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            with suppress(RuntimeError):  # the next kernel would raise what is left of this error
                torch.zeros(1, device=self.torch_device)
            raise StreamError(
                f"{format_size(nbytes)} of host memory could not be page-locked (CUDA error {code}): raise "
                "the limit on locked memory (ulimit -l, a container's memory), load with less of it "
                "(host_memory=), or with ordinary memory, which copies at a fraction of the rate "
                "(page_lock=False)"
            )
        self._locked.append(memory)
        return memory

    def open_stream(self, name: str) -> torch.cuda.Stream:
        self._streams.append(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]
        return self._streams[-1]

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def copy(
        self, stream: torch.cuda.Stream, target: torch.Tensor, moves: Sequence[Move], label: str
    ) -> None:
        with torch.cuda.stream(stream):
            for move in moves:
                arriving = move.source[move.start : move.start + move.nbytes]
                target[move.target : move.target + move.nbytes].copy_(arriving, non_blocking=True)

    def copy_out(
        self, stream: torch.cuda.Stream, source: torch.Tensor, moves: Sequence[Move], label: str
    ) -> None:
        with torch.cuda.stream(stream):
            for move in moves:
                leaving = source[move.target : move.target + move.nbytes]
                move.source[move.start : move.start + move.nbytes].copy_(leaving, non_blocking=True)

    def fill(
        self, stream: torch.cuda.Stream, target: torch.Tensor, start: int, stop: int, value: int
    ) -> None:
        with torch.cuda.stream(stream):
            target[start:stop].fill_(value)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child cannot use CUDA
        for disk in self._disks:
            disk.close()
        for stream in self._streams:
            with suppress(RuntimeError):  # a device that was lost does not answer
                stream.synchronize()
        self._streams.clear()
        self._disks.clear()
        while self._locked:
            _runtime().cudaHostUnregister(self._locked.pop().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""Drives a CUDA device: as any accelerator, with host memory to the page, and waits that do not spin."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch

from penstock.runtime.device.accelerator import PAGE, AcceleratorDevice, refused_lock
from penstock.runtime.device.protocol import aligned_bytes


class CudaDevice(AcceleratorDevice):
    """A CUDA device by its name. Its host memory is registered with the driver; torch would round it up."""

    def __init__(self, name: str, *, page_lock: bool = True) -> None:
        super().__init__(name, page_lock=page_lock)
        self._locked = _Locked(self.torch_device)
        finalize(self, self._locked.clear).atexit = False

    def current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.torch_device)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _lock(self, nbytes: int) -> torch.Tensor:
        # torch takes memory for page-locked, and captures copies from it, if its storage begins in a
        # registered range. A page behind is this memory's too, so that no page is registered twice.
        memory = aligned_bytes(nbytes + PAGE, PAGE)[:nbytes]
        self._take(memory)  # by many threads; registering takes pages one by one
        if code := self._locked.add(memory):
            raise refused_lock(nbytes, f"CUDA error {code}")
        return memory

    def free_host(self, memory: torch.Tensor) -> None:
        self._locked.remove(_start(memory))

    def _new_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch.Event always spins
        event.record(stream)
        return event

    def close(self) -> None:
        super().close()
        self._locked.clear()


class _Locked:
    """Host memory that this process has registered with the driver, by where its storage begins.

    An interrupt may come behind any call. So memory is listed before it is registered and until it is not any
    more: what is listed may not be registered, which to unregister is an error of no consequence.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._owner = device, os.getpid()
        self._memory: dict[int, torch.Tensor] = {}

    def add(self, memory: torch.Tensor) -> int:
        """Register memory, from where its storage begins. Returns CUDA's error, or 0."""
        start = _start(memory)
        self._memory[start] = memory
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostRegister(start, memory.data_ptr() + memory.numel() - start, 0))
        if code:
            self._forget_error()
            del self._memory[start]
        return code

    def remove(self, start: int) -> None:
        """Unregister the memory that begins there, if it is listed."""
        if start in self._memory:
            if int(_runtime().cudaHostUnregister(start)):
                self._forget_error()
            del self._memory[start]

    def clear(self) -> None:
        """Unregister all, unless this is a forked child, which cannot use CUDA."""
        while self._memory and os.getpid() == self._owner:
            self.remove(next(reversed(self._memory)))

    def _forget_error(self) -> None:
        with suppress(RuntimeError):  # the next kernel would raise what is left of an error
            torch.zeros(1, device=self._device)


def _start(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

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
        self._locked: dict[int, torch.Tensor] = {}
        finalize(self, _unlock, self._locked, os.getpid()).atexit = False

    def current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.torch_device)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _lock(self, nbytes: int) -> torch.Tensor:
        # torch takes memory for page-locked, and captures copies from it, if its storage begins in a
        # registered range. A page behind is this memory's too, so that no page is registered twice.
        memory = aligned_bytes(nbytes + PAGE, PAGE)[:nbytes]
        memory.zero_()  # by all threads; registering takes pages one by one
        start = _start(memory)
        with torch.cuda.device(self.torch_device):
            code = int(_runtime().cudaHostRegister(start, memory.data_ptr() + nbytes - start, 0))
        if code:
            with suppress(RuntimeError):  # the next kernel would raise what is left of this error
                torch.zeros(1, device=self.torch_device)
            raise refused_lock(nbytes, f"CUDA error {code}")
        self._locked[start] = memory
        return memory

    def free_host(self, memory: torch.Tensor) -> None:
        if self._locked.pop(_start(memory), None) is not None:
            _runtime().cudaHostUnregister(_start(memory))

    def _new_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch.Event always spins
        event.record(stream)
        return event

    def close(self) -> None:
        super().close()
        _unlock(self._locked, self._process)


def _start(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _unlock(locked: dict[int, torch.Tensor], owner: int) -> None:
    """Unregister memory, in the process that registered it: a forked child cannot use CUDA."""
    while locked and os.getpid() == owner:
        _runtime().cudaHostUnregister(locked.popitem()[0])


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""Loads the weights that always stay on a device, through two halves of host memory in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.runtime.device.protocol import Device, Event, FileRead, Move, Stream

BLOCK = 4096
"""Where file offset and address agree modulo this, reads can go past the page cache."""


@dataclass(frozen=True)
class Load:
    """`nbytes` from byte `offset` of a file, for byte `start` of device memory `target`."""

    target: torch.Tensor
    start: int
    file: int
    offset: int
    nbytes: int

    def cut(self, at: int, nbytes: int) -> Load:
        """At most `nbytes` from byte `at` on."""
        start, offset = self.start + at, self.offset + at
        return replace(self, start=start, offset=offset, nbytes=min(nbytes, self.nbytes - at))


Batch = list[tuple[Load, int]]
"""Loads that are read together, each with its offset in host memory."""


def load_resident(device: Device, disk: Stream, memory: torch.Tensor, work: Sequence[Load]) -> None:
    """Load all of `work` through `memory`: one half is read into while the other is copied."""
    copied: Event | None = None
    before: tuple[Batch, Event] | None = None
    for batch in _batches(work, memory):
        if copied is not None:
            device.wait(disk, copied)
        reads = [FileRead(load.file, load.offset, at, load.nbytes) for load, at in batch]
        device.read(disk, memory, reads, "a read of resident weights")
        read = device.record(disk)
        if before is not None:
            copied = _copy(device, memory, *before)
        before = batch, read
    if before is not None:
        device.synchronize(_copy(device, memory, *before))


def _copy(device: Device, memory: torch.Tensor, batch: Batch, read: Event) -> Event:
    stream = device.current_stream()
    device.wait(stream, read)
    for load, at in batch:
        move = Move(memory, at, load.start, load.nbytes)
        device.copy(stream, load.target, [move], "the load of resident weights")
    return device.record(stream)


def _batches(work: Sequence[Load], memory: torch.Tensor) -> Iterator[Batch]:
    half = memory.numel() // 2 // BLOCK * BLOCK or memory.numel() // 2
    which, position = 0, 0
    batch: Batch = []
    most = half - BLOCK if half > 2 * BLOCK else half  # so that there is room to align
    for load in (whole.cut(at, most) for whole in work for at in range(0, whole.nbytes, most)):
        skip = (load.offset - memory.data_ptr() - position) % BLOCK
        if position + skip + load.nbytes > half:
            if batch:
                yield batch
                batch, which = [], 1 - which
            position, skip = 0, 0
        batch.append((load, which * half + position + skip))
        position += skip + load.nbytes
    if batch:
        yield batch

"""Loads the weights that always stay on a device, through two halves of host memory in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from penstock.runtime.device.protocol import Device, Event, FileRead, Move, Stream
from penstock.runtime.files.ranges import FileRange

BLOCK = 4096
"""Reads can go past the page cache if file offset and address are equal modulo this number of bytes."""


Load = tuple[torch.Tensor, FileRange]
"""Device memory, and a range of a file to read into it; addresses count from the memory's start."""

Batch = list[tuple[Load, int]]
"""Loads that are read together, each with its offset in host memory."""


def load_resident(device: Device, disk: Stream, memory: torch.Tensor, work: Sequence[Load]) -> None:
    """Load all of `work` through `memory`: one half is read into while the other is copied.

    Nothing is copied from `memory` any more when this returns, or raises.
    """
    try:
        _load(device, disk, memory, work)
    except BaseException:
        with suppress(Exception):  # of a device that has failed, or was interrupted: the first error says why
            _settle(device)
        raise
    _settle(device)


def _settle(device: Device) -> None:
    device.synchronize(device.record(device.current_stream()))


def _load(device: Device, disk: Stream, memory: torch.Tensor, work: Sequence[Load]) -> None:
    copied: Event | None = None
    before: tuple[Batch, Event] | None = None
    for batch in _batches(work, memory):
        if copied is not None:
            device.wait(disk, copied)
        reads = [FileRead(piece.file, piece.file_offset, at, piece.nbytes) for (_, piece), at in batch]
        device.read(disk, memory, reads, "a read of resident weights")
        read = device.record(disk)
        if before is not None:
            copied = _copy(device, memory, *before)
        before = batch, read
    if before is not None:
        _copy(device, memory, *before)


def _copy(device: Device, memory: torch.Tensor, batch: Batch, read: Event) -> Event:
    stream = device.current_stream()
    device.wait(stream, read)
    for (target, piece), at in batch:
        move = Move(memory, at, piece.address, piece.nbytes)
        device.copy(stream, target, [move], "the load of resident weights")
    return device.record(stream)


def _batches(work: Sequence[Load], memory: torch.Tensor) -> Iterator[Batch]:
    half = memory.numel() // 2 // BLOCK * BLOCK or memory.numel() // 2
    half_number, position = 0, 0
    batch: Batch = []
    most = half - BLOCK if half > 2 * BLOCK else half  # so that there is room to align
    starts = ((target, whole, at) for target, whole in work for at in range(whole.start, whole.stop, most))
    for target, piece in ((target, whole.cut(at, at + most)) for target, whole, at in starts):
        skip = (piece.file_offset - memory.data_ptr() - position) % BLOCK
        if position + skip + piece.nbytes > half:
            if batch:
                yield batch
                batch, half_number = [], 1 - half_number
            position, skip = 0, 0
        batch.append(((target, piece), half_number * half + position + skip))
        position += skip + piece.nbytes
    if batch:
        yield batch

"""The weights of a plan in a device's memory, and behind it in the host's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from penstock.runtime.arena_anonymous import Piece, Pieces
from penstock.runtime.device import Device, Move
from penstock.runtime.rates import READERS
from penstock.runtime.reading import read_extents
from penstock.runtime.source import Source
from penstock.schedule.model import Part, Plan, Range, Storage


class DeviceWeights:
    """`arena` on the device, and all that streams into it in `host`, where layout offsets are addresses.

    Tensors are views made once. The storages outside the arena are whole on the device.
    """

    def __init__(self, plan: Plan, storages: Sequence[Storage], device: Device, source: Source) -> None:
        self._plan, self._storages = plan, storages
        self.outside = {s: device.allocate(storages[s].nbytes, "resident weights") for s in plan.outside}
        self.arena = device.allocate(plan.arena_bytes, "the arena")
        inside = [s for s, place in enumerate(plan.addresses) if place >= 0] if plan.arena_bytes else []
        layout = plan.arena.layout
        nbytes = max((layout[s] + storages[s].nbytes for s in inside), default=0)
        self.host = device.allocate_host(nbytes)
        read_extents(
            source,
            [(e, self.host.data_ptr() + layout[s]) for s in inside for e in storages[s].extents],
            READERS,
        )
        self._pieces = Pieces(
            [
                Piece(layout[s], layout[s] + storages[s].nbytes, 0, layout[s], plan.addresses[s])
                for s in inside
                if storages[s].nbytes
            ],
            gap=0,
        )
        self._by_start = sorted((layout[s], s) for s in inside)
        self._load_outside(device, source)

    def moves(self, item: Range) -> list[Move]:
        """The copies that bring a range of the layout: as few as addresses allow."""
        return [
            Move(piece.file_offset, piece.address, piece.stop - piece.start)
            for piece in self._pieces.within(item.start, item.stop)
        ]

    def name_of(self, item: Range) -> str:
        """The name of the first weight in a range, for messages."""
        at = bisect_right(self._by_start, (item.start, len(self._storages))) - 1
        storage = self._by_start[max(0, at)][1]
        return self._plan.names[storage] if self._plan.names else f"storage {storage}"

    def ranges_of(self, storage: int) -> tuple[torch.Tensor, int, int] | None:
        """The memory that a storage is in, and the first and last byte there; None where it has none."""
        nbytes = self._storages[storage].nbytes
        if storage in self.outside:
            return self.outside[storage], 0, nbytes
        if self._plan.arena_bytes and self._plan.addresses[storage] >= 0:
            place = self._plan.addresses[storage]
            return self.arena, place, place + nbytes
        return None

    def tensor(self, part: Part) -> torch.Tensor:
        """The tensor that the program reads a part through."""
        dtype = getattr(torch, part.dtype)
        found = self.ranges_of(part.storage)
        if found is None or 0 in part.shape:
            # No step reads it: a placeholder of its shape, whose memory is never touched.
            return torch.empty_strided(part.shape, part.stride, dtype=dtype, device=self.arena.device)
        memory, start, stop = found
        flat = memory[start + part.offset : stop]
        whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(part.shape, part.stride)

    def _load_outside(self, device: Device, source: Source) -> None:
        stream = device.current_stream()
        for s, target in self.outside.items():
            staged = torch.empty(target.numel(), dtype=torch.uint8)  # not locked: given back at once
            read_extents(source, [(e, staged.data_ptr()) for e in self._storages[s].extents], READERS)
            whole = [Move(0, 0, target.numel())]
            device.copy(stream, target, staged, whole, f"the load of resident storage {s}")
            device.synchronize(device.record(stream))

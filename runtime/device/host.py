"""Holds weights in the memory of a host: some in a slab of exact size, and the rest in passing, in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from penstock.runtime.device.protocol import Device, FileRead
from penstock.runtime.files.ranges import FileRanges
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.host import copied_ranges
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import subtract


@dataclass(frozen=True)
class HostRange:
    """Layout bytes `start` to `stop`, which lie in host memory from byte `offset` on."""

    start: int
    stop: int
    memory: torch.Tensor
    offset: int

    def cut(self, start: int, stop: int) -> HostRange:
        """Returns the part between two layout offsets."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return HostRange(start, stop, self.memory, self.offset + start - self.start)


class HostWeights:
    """The weights in a host's memory: `slab` holds what stays there, and the rest passes through `ring`.

    The slab holds the plan's host tier, or, if the plan has none, all bytes that are ever copied. All other
    bytes are read from the files. Here layout offsets are used in place of addresses.
    """

    def __init__(self, plan: Plan, storages: Sequence[Storage], device: Device) -> None:
        self._held = list(plan.host.resident if plan.host else copied_ranges(plan))
        self.slab = device.allocate_host(sum(r.nbytes for r in self._held))
        self.ring = device.allocate_host(max((s.staging_bytes for s in plan.schedules), default=0), once=True)
        offsets = accumulate((r.nbytes for r in self._held), initial=0)
        self._slabs = [
            HostRange(piece.start, piece.stop, self.slab, offset)
            for piece, offset in zip(self._held, offsets, strict=False)
        ]
        self._stop = max((segment.stop for segment in plan.arena.segments), default=0)
        # A plan copies the same ranges again and again.
        self._held_of: dict[Range, tuple[HostRange, ...]] = {}
        self._missing_of: dict[Range, list[Range]] = {}
        self._files = FileRanges.of(storages, plan.arena.layout, plan.arena.layout)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of host memory of slab and ring."""
        return self.slab.numel() + self.ring.numel()

    def close(self) -> None:
        """Give slab and ring back. A second call does nothing."""
        for memory in (self.slab, self.ring):
            memory.untyped_storage().resize_(0)

    def held(self, wanted: Range) -> tuple[HostRange, ...]:
        """Returns the parts of a range that are in the slab."""
        if wanted not in self._held_of:
            inside = (slab for slab in self._slabs if slab.start < wanted.stop and wanted.start < slab.stop)
            self._held_of[wanted] = tuple(slab.cut(wanted.start, wanted.stop) for slab in inside)
        return self._held_of[wanted]

    def missing(self, wanted: Range) -> list[Range]:
        """Returns the parts of a range that are not in the slab."""
        if wanted not in self._missing_of:
            self._missing_of[wanted] = subtract([wanted], self._held)
        return self._missing_of[wanted]

    def file_offset(self, start: int) -> int:
        """Returns the file offset of layout byte `start`, or of the next byte that is in a file."""
        piece = next(self._files.within(start, self._stop), None)
        return piece.file_offset if piece else 0

    def reads(self, placed: Sequence[HostRange]) -> list[FileRead]:
        """Returns the reads that fill host memory. Bytes between storages are in no file, and stay."""
        return [
            FileRead(piece.file, piece.file_offset, part.offset, part.stop - part.start)
            for placed_read in placed
            for piece in self._files.within(placed_read.start, placed_read.stop)
            for part in [placed_read.cut(piece.start, piece.stop)]
        ]

    def fill_slab(self) -> list[FileRead]:
        """Returns the reads that fill the slab."""
        return self.reads(self._slabs)

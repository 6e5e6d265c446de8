"""The weights of a plan on a device and on its host: those that stay, and the places of copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from penstock.passes.weights.lifted import tensor_in
from penstock.runtime.device.protocol import Device, Event, FileRead, Move, Moves, Stream, aligned_bytes
from penstock.runtime.files.direct_file import with_places
from penstock.runtime.files.source import FileRange, FileRanges, Source
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Part, Range, Storage
from penstock.schedule.host import copied_ranges
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import merged, subtract


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


LOADED_THROUGH = 16 << 20
"""Bytes of host memory through which resident weights are loaded if the slab is smaller."""


class DeviceWeights:
    """The `arena` of a device, the `host` behind it, and the files, which `disk` reads.

    Tensors are views that are made once. Storages outside the arena are on the device as a whole, or those
    `on_host` in ordinary memory of the host. When this has been made, everything that always stays is loaded.

    All tensors in the arena share its storage, unless `own_storages` asks for one for each: for programs in
    which `as_strided` counts offsets from where the storage of a weight begins.
    """

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        device: Device,
        source: Source,
        *,
        on_host: Collection[int] = (),
        own_storages: bool = False,
    ) -> None:
        self._plan, self._storages, self._on_host = plan, storages, on_host
        self._own_storages = own_storages
        self.outside = {
            s: aligned_bytes(storages[s].nbytes)
            if s in on_host
            else device.allocate(storages[s].nbytes, "resident weights")
            for s in plan.outside
        }
        self.arena = device.allocate(plan.arena_bytes, "the arena")
        layout = plan.arena.layout
        places = plan.addresses if plan.arena_bytes else (-1,) * len(storages)
        self._by_start = sorted((layout[s], s) for s, place in enumerate(places) if place >= 0)
        placed = with_places(storages, plan, len(source.files))  # what is produced is in no file
        self._moves_of: dict[Range, Moves] = {}
        self._pieces = FileRanges.of(placed, layout, places)
        self.host = HostWeights(plan, storages, device)
        self.disk = device.open_disk(source)
        self._load_resident(device)
        device.read(self.disk, self.host.slab, self.host.fill_slab(), "the load of the host's weights")
        device.synchronize(device.record(self.disk))

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory for weights."""
        there = (memory.numel() for s, memory in self.outside.items() if s not in self._on_host)
        return self.arena.numel() + sum(there)

    def close(self) -> None:
        """Give arena, slab and ring back. What is outside the arena stays: a call may have returned it."""
        if self._own_storages:  # which cannot be told that their memory is gone
            self.arena = torch.empty(0, dtype=torch.uint8)
        self.arena.untyped_storage().resize_(0)
        self._moves_of.clear()
        self.host.close()

    def check_held(self, items: Iterable[Range]) -> None:
        """Raise StreamError unless the host has room of its own for what leaves the arena."""
        for wanted in items:
            if self.host.missing(wanted):
                raise StreamError(
                    f"layout bytes {wanted.start} to {wanted.stop} leave the arena, and the plan gives them "
                    "no room in the host's memory: plan with more host_memory="
                )

    def moves(self, wanted: Range, staged: Sequence[HostRange] = ()) -> Moves:
        """Returns the copies that bring a layout range from the host, as few as the addresses allow."""
        if staged:
            return self._moves(wanted, staged)
        if wanted not in self._moves_of:  # a plan copies the same ranges again and again
            self._moves_of[wanted] = self._moves(wanted, ())
        return self._moves_of[wanted]

    def _moves(self, wanted: Range, staged: Sequence[HostRange]) -> Moves:
        return Moves(
            Move(part.memory, part.offset, piece.address + part.start - piece.start, part.stop - part.start)
            for placed in (*self.host.held(wanted), *staged)
            for piece in self._pieces.within(placed.start, placed.stop)
            for part in [placed.cut(piece.start, piece.stop)]
        )

    def places(self, wanted: Range) -> Iterator[tuple[int, int]]:
        """Yields where the bytes of a layout range lie in the arena, as half-open ranges."""
        for piece in self._pieces.within(wanted.start, wanted.stop):
            yield piece.address, piece.address + piece.nbytes

    def name_of(self, wanted: Range) -> str:
        """Returns the name of the first weight in a range, for messages."""
        at = bisect_right(self._by_start, (wanted.start, len(self._storages))) - 1
        storage = self._by_start[max(0, at)][1]
        return self._plan.names[storage] if self._plan.names else f"storage {storage}"

    def ranges_of(self, storage: int) -> tuple[torch.Tensor, int, int] | None:
        """Returns the memory that holds a storage, and its half-open range there; None where it has none."""
        nbytes = self._storages[storage].nbytes
        if storage in self.outside:
            return self.outside[storage], 0, nbytes
        if self._plan.arena_bytes and self._plan.addresses[storage] >= 0:
            address = self._plan.addresses[storage]
            return self.arena, address, address + nbytes
        return None

    def tensor(self, part: Part) -> torch.Tensor:
        """Returns the tensor through which the program reads a part of a storage."""
        place = self.ranges_of(part.storage)
        if place is None or 0 in part.shape:
            # No step reads this weight: a placeholder of its shape, whose memory is never touched, will do.
            dtype = getattr(torch, part.dtype)
            device = "cpu" if part.storage in self._on_host else self.arena.device
            if self._own_storages and self.arena.numel() and 0 not in part.shape:
                # A device would give the memory that is never touched: it is one value of the arena instead.
                placeholder, strides = torch.empty(0, dtype=dtype, device=device), (0,) * len(part.shape)
                return placeholder.set_(self.arena.untyped_storage(), 0, part.shape, strides)
            return torch.empty_strided(part.shape, part.stride, dtype=dtype, device=device)
        memory, start, stop = place
        if not self._own_storages:
            return tensor_in(memory[start:stop], part)
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr() + start, memory.device, stop - start
        )
        vars(storage)["memory"] = memory  # which then lives for as long as the storage
        return tensor_in(torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage), part)

    def _staying(self) -> Iterator[Load]:
        for s, memory in self.outside.items():
            whole = FileRanges.of(self._storages[s : s + 1], (0,), (0,))
            yield from ((memory, piece) for piece in whole.within(0, self._storages[s].nbytes))
        for resident in merged(self._plan.resident) if self._plan.arena_bytes else ():
            yield from ((self.arena, piece) for piece in self._pieces.within(resident.start, resident.stop))

    def _load_resident(self, device: Device) -> None:
        """Load what stays through the slab or the ring, which are empty yet, or through more host memory."""
        staying = list(self._staying())
        largest = max(self.host.slab, self.host.ring, key=lambda memory: memory.numel())
        free = self._plan.host.nbytes - self.host.pinned_bytes if self._plan.host else LOADED_THROUGH
        if free <= largest.numel() or not staying:
            load_resident(device, self.disk, largest, staying)
            return
        memory = device.allocate_host(min(free, LOADED_THROUGH))
        load_resident(device, self.disk, memory, staying)
        device.free_host(memory)

"""Holds the weights of a plan in a device's memory: loads those that stay, and gives the places of copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from penstock.passes.weights.values import tensor_in
from penstock.runtime.device.host import HostRange, HostWeights
from penstock.runtime.device.protocol import Device, Move, Moves, aligned_bytes
from penstock.runtime.device.resident import Load, load_resident
from penstock.runtime.files.ranges import FileRanges
from penstock.runtime.files.source import Source
from penstock.runtime.files.spill_file import with_places
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Part, Range, Storage
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import merged

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
            place = self._plan.addresses[storage]
            return self.arena, place, place + nbytes
        return None

    def tensor(self, part: Part) -> torch.Tensor:
        """Returns the tensor that the program reads a part through."""
        ranges = self.ranges_of(part.storage)
        if ranges is None or 0 in part.shape:
            # No step reads this weight: a placeholder of its shape, whose memory is never touched, will do.
            dtype = getattr(torch, part.dtype)
            where = "cpu" if part.storage in self._on_host else self.arena.device
            if self._own_storages and self.arena.numel() and 0 not in part.shape:
                # A device would give the memory that is never touched: it is one value of the arena instead.
                nowhere, strides = torch.empty(0, dtype=dtype, device=where), (0,) * len(part.shape)
                return nowhere.set_(self.arena.untyped_storage(), 0, part.shape, strides)
            return torch.empty_strided(part.shape, part.stride, dtype=dtype, device=where)
        memory, start, stop = ranges
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

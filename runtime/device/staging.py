"""Reads weights from disk into a ring of host memory, ahead of the copies that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle

from penstock.runtime.device.host import HostRange, HostWeights
from penstock.runtime.device.protocol import Device, Event, Stream
from penstock.runtime.device.resident import BLOCK
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Range

_LARGE = 256 * BLOCK
"""The bytes of a read from which on it is aligned, at the cost of some room in the ring."""


@dataclass
class StagedRead:
    """A read into the ring of the bytes that the host lacks for a copy of `item`.

    It takes `nbytes` of the ring. The event `read` completes when the read is done, and `copied` when the
    copy is done; `copied` is None until the copy is enqueued.
    """

    item: Range
    placed: tuple[HostRange, ...]
    nbytes: int
    read: Event
    copied: Event | None = None


class Staging:
    """The ring of a streamer. Its reads follow the order of the copies, which never changes.

    Reads are enqueued as far ahead as the ring has room for, each behind the copies that free its room.
    """

    def __init__(self, device: Device, disk: Stream, copies: Stream, host: HostWeights) -> None:
        self._device, self._disk, self._copies, self._host = device, disk, copies, host
        self._slots: deque[StagedRead] = deque()  # the reads in the ring, oldest first
        self._ready: deque[StagedRead] = deque()  # the reads in the ring that wait for their copy
        self._used, self._head = 0, 0
        self._upcoming: Iterator[Range] = iter(())
        self._next: Range | None = None

    def restart(self, first: Sequence[Range], steady: Sequence[Range]) -> None:
        """Begin to read the bytes for the coming copies: those of `first`, then those of `steady` repeatedly.

        The ring is emptied behind all reads and copies so far, also if an interrupt has left reads in it.
        """
        if not self._host.ring.numel():
            return
        for stream in (self._copies, self._disk):
            self._device.wait(self._disk, self._device.record(stream))
        self._slots.clear()
        self._ready.clear()
        self._used = 0
        missing = [[wanted for wanted in items if self._host.missing(wanted)] for items in (first, steady)]
        self._upcoming = chain(missing[0], cycle(missing[1]))
        self._next = next(self._upcoming, None)
        self._read_ahead()

    def slot_of(self, wanted: Range) -> StagedRead | None:
        """Returns the read for the next copy, which is of `item`, or None where the host holds all of it."""
        if not self._host.missing(wanted):
            return None
        if not self._ready or self._ready[0].item != wanted:
            raise StreamError(
                f"layout bytes {wanted.start} to {wanted.stop} are neither held by the host nor read: "
                "plan it again"
            )
        return self._ready[0]

    def copied(self, slot: StagedRead, event: Event) -> None:
        """Read ahead into the room of a copy that has just been enqueued, and `event` recorded behind it."""
        slot.copied = event
        self._ready.popleft()
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._next is not None:
            missing = self._host.missing(self._next)
            nbytes = sum(r.nbytes for r in missing)
            if not self._make_room(nbytes):
                return
            nbytes += self._align(missing[0], nbytes)
            placed = tuple(self._place(missing))
            label = f"the read of layout bytes {self._next.start} to {self._next.stop}"
            self._device.read(self._disk, self._host.ring, self._host.reads(placed), label)
            slot = StagedRead(self._next, placed, nbytes, self._device.record(self._disk))
            self._slots.append(slot)
            self._ready.append(slot)
            self._used += nbytes
            self._next = next(self._upcoming, None)

    def _align(self, wanted: Range, nbytes: int) -> int:
        """Skip bytes of the ring, so that a large read can go past the page cache, and return how many."""
        ring = self._host.ring
        skip = (self._host.file_offset(wanted.start) - ring.data_ptr() - self._head) % BLOCK
        if nbytes < _LARGE or self._used + nbytes + skip > ring.numel():
            return 0
        self._head = (self._head + skip) % ring.numel()
        return skip

    def _make_room(self, nbytes: int) -> bool:
        """Have the disk wait for the oldest copies until there is room in the ring.

        Returns False where one of those copies is still to be enqueued.
        """
        while self._used + nbytes > self._host.ring.numel():
            if not self._slots or self._slots[0].copied is None:
                return False
            slot = self._slots.popleft()
            self._device.wait(self._disk, slot.copied)
            self._used -= slot.nbytes
        return True

    def _place(self, missing: list[Range]) -> Iterator[HostRange]:
        """Yields places for ranges behind those in the ring; at its end they go on at its start."""
        size = self._host.ring.numel()
        for wanted in missing:
            start = wanted.start
            while start < wanted.stop:
                stop = min(wanted.stop, start + size - self._head)
                yield HostRange(start, stop, self._host.ring, self._head)
                self._head = (self._head + stop - start) % size
                start = stop

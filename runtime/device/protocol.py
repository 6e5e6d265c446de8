"""The one interface between a streamer and the device that it streams to.

A device is memory, and streams on which copies and kernels run in order; events order one stream
after another. It offers what CUDA offers and no more: waiting on an event that nobody recorded
does nothing, and a copy runs at any time between the moment it is enqueued and the
moment something waits for it. The disk behind the host is a stream too, on which reads run at the same
time, each after the waits enqueued before it. No kernel or copy can wait for a disk, so the host does.

accelerator.py and sim/device.py implement it, and in the tests a CPU that copies on threads of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock.schedule.facts.errors import StreamError

if TYPE_CHECKING:
    import torch

    from penstock.runtime.files.source import Source

Stream: TypeAlias = Any
Event: TypeAlias = Any
"""The results of `Device.open_stream`, `open_disk` and `record`, which only their device can interpret."""


@dataclass(frozen=True)
class Move:
    """`nbytes` from byte `start` of the host memory `source` to byte `target` of device memory."""

    source: torch.Tensor
    start: int
    target: int
    nbytes: int


class Moves(tuple[Move, ...]):
    """The moves of a repeated transfer; `views` is for what a device makes of them for two memories."""

    views: Any = None


@dataclass(frozen=True)
class FileRead:
    """`nbytes` from byte `offset` of a weight file to byte `target` of host memory."""

    file: int
    offset: int
    target: int
    nbytes: int


def aligned_bytes(nbytes: int, alignment: int = 64) -> torch.Tensor:
    """Returns flat bytes of ordinary memory that begin at a multiple of `alignment`."""
    import torch

    if alignment == 64:  # as torch aligns all memory
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    whole = torch.empty(nbytes + alignment, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % alignment
    return whole[start : start + nbytes]


class Device(Protocol):
    """Memory and streams. Every method is called on the thread that calls the program.

    The text of a label is for messages, and made only for them.
    """

    @property
    def name(self) -> str:
        """The name of the device, as in `load(device=...)`."""

    @property
    def torch_device(self) -> torch.device:
        """The device of its tensors, on which the program's kernels run."""

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        """Returns flat, uninitialised bytes of the device. Raises StreamError with `purpose` without room."""

    def allocate_host(self, nbytes: int, *, once: bool = False) -> torch.Tensor:
        """Returns flat bytes of the host, 64-byte aligned at least, that copies read while the host goes on.

        `once` promises that bytes which a copy has read are not read again before a disk has written them.
        """

    def free_host(self, memory: torch.Tensor) -> None:
        """Take back memory of `allocate_host` that nothing reads any more, before the device is closed."""

    def trim(self) -> None:
        """Give memory of the device that was freed back to the system, for others to take."""

    def open_stream(self, name: str) -> Stream:
        """Opens a stream."""

    def current_stream(self) -> Stream:
        """Returns the stream on which the caller's kernels run now."""

    def open_disk(self, source: Source) -> Stream:
        """Opens a stream of reads of the files of `source`, which must stay open as long as the device."""

    def read(self, disk: Stream, target: torch.Tensor, reads: Sequence[FileRead], label: object) -> None:
        """Enqueue reads into host memory `target`; it never blocks."""

    def copy(self, stream: Stream, target: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        """Enqueue one transfer from host memory to device memory `target`; it never blocks."""

    def copy_out(self, stream: Stream, source: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        """Enqueue a transfer to the host's memory: from each move's `target` in `source`, to its `start`."""

    def fill(self, stream: Stream, target: torch.Tensor, start: int, stop: int, value: int) -> None:
        """Enqueue the setting of bytes `start` to `stop`."""

    def record(self, stream: Stream) -> Event:
        """Returns an event that completes once everything enqueued on the stream so far has completed."""

    def mark(self, stream: Stream, spent: Event | None) -> Event:
        """Returns an event as `record` does, for which only streams of the device wait, and no host.

        `spent` is an event of `mark` on the same stream that nothing will be told to wait for again. The
        device may record it anew.
        """

    def wait(self, stream: Stream, event: Event) -> None:
        """Have what is enqueued on the stream from now on run after the event; the host goes on.

        For an event of a disk, and a stream that is no disk, the host waits.
        """

    def query(self, event: Event) -> bool:
        """Tells whether the event has completed, which it also has where its stream has failed."""

    def synchronize(self, event: Event) -> None:
        """Wait for the event on the host. Raises what its stream raised."""

    def finish(self) -> None:
        """Wait for all streams of the device, also for those that others opened."""

    @property
    def capturing(self) -> bool:
        """Tells whether what is enqueued now is captured, to be replayed later, and not run."""

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the device's own threads, which cannot wait for themselves."""

    def close(self) -> None:
        """Wait for all streams, and give the memory back. A second call does nothing."""


def lost(device: Device, error: Exception) -> StreamError:
    """Returns the error for a device that fails before it is asked for anything new."""
    return StreamError(f"{device.name} is lost ({error}): close the module and load it again")

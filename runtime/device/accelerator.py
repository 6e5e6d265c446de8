"""Drives any accelerator that torch knows, by torch's own streams, events and allocators.

A CUDA device has host memory to the page besides, and waits that do not spin.
"""

from __future__ import annotations

import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import finalize

import torch

from penstock.runtime.device.protocol import FileRead, Move, Moves, aligned_bytes, lost
from penstock.runtime.files.source import Source
from penstock.runtime.stream.engine import PIECE
from penstock.runtime.system.first_touch import take_near
from penstock.runtime.system.memory import HUGE_PAGE
from penstock.runtime.system.threads import READERS, WorkerPool
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size


@dataclass(frozen=True)
class PageableEvent:
    """An event of a thread's stream; `recorded` gives torch's own, or raises the stream's error."""

    recorded: Future[torch.Event]

    def query(self) -> bool:
        if not self.recorded.done():
            return False
        return self.recorded.exception() is not None or self.recorded.result().query()

    def synchronize(self) -> None:
        self.recorded.result().synchronize()


class PageableStream:
    """Drives `stream` on a thread, whose events `record` makes. After an `error` it does nothing more."""

    def __init__(self, stream: torch.Stream, record: Callable[[torch.Stream], torch.Event]) -> None:
        self._stream, self._record = stream, record
        self.error: BaseException | None = None
        self._thread = WorkerPool(1, "copies")

    def run(self, work: Callable[[], object]) -> None:
        """Do some work on the thread, while the stream is current there."""
        self._thread.submit(self._guarded, work)

    def record(self) -> PageableEvent:
        return PageableEvent(self._thread.submit(self._recorded))

    def wait_event(self, event: torch.Event | PageableEvent) -> None:
        """Have the stream wait for an event; where it is another thread's, this one waits for that."""
        self.run(lambda: self._stream.wait_event(as_recorded(event)))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        """Wait for the thread, and end it. A second call does nothing."""
        self._thread.shutdown()

    @property
    def includes_caller(self) -> bool:
        """Tells whether the caller is the stream's own thread, which cannot wait for itself."""
        return self._thread.includes_caller

    def _recorded(self) -> torch.Event:
        if self.error is not None:
            raise self.error
        return self._record(self._stream)

    def _guarded(self, work: Callable[[], object]) -> None:
        if self.error is None:
            try:
                with self._stream:
                    work()
            except BaseException as error:
                self.error = error


def as_recorded(event: torch.Event | PageableEvent) -> torch.Event:
    """Returns torch's own event, once the thread that records it has come to it. Raises what that raised."""
    return event.recorded.result() if isinstance(event, PageableEvent) else event


@dataclass(frozen=True)
class DiskEvent:
    """An event that is complete once all reads in the result of `submitted` have ended."""

    stream: DiskStream
    submitted: Future[list[Future[None]]]

    def query(self) -> bool:
        return self.submitted.done() and all(read.done() for read in self.submitted.result())

    def synchronize(self) -> None:
        """Wait for the reads. Raises the first error of the stream."""
        wait(self.submitted.result())
        if self.stream.error is not None:
            raise self.stream.error


class DiskStream:
    """A stream of reads: one thread keeps the order and waits, and `READERS` others read 2 MiB at a time.

    After an error nothing more is read, and every event raises it.
    """

    def __init__(self, source: Source) -> None:
        self.error: BaseException | None = None
        self._source, self._process = source, os.getpid()
        self._order = WorkerPool(1, "disk")
        self._readers = WorkerPool(READERS, "reader")
        self._reads: list[Future[None]] = []  # may still run; for the ordering thread only

    def read(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._order.submit(self._guarded, lambda: self._submit(target, reads))

    def wait(self, synchronize: Callable[[], None]) -> None:
        """Have the reads that are enqueued from now on start once `synchronize` has returned."""
        self._order.submit(self._guarded, synchronize)

    def record(self) -> DiskEvent:
        return DiskEvent(self, self._order.submit(lambda: list(self._reads)))

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the stream's own threads, which cannot wait for themselves."""
        return self._order.includes_caller or self._readers.includes_caller

    def close(self) -> None:
        """Wait for the pieces that are being read, and read no others. A second call does nothing."""
        if os.getpid() != self._process:
            return  # the threads are the parent's, and so is what their locks say
        self.error = self.error or StreamError("the streamed module is closed: load the program again")
        self._order.shutdown()
        self._readers.shutdown()

    def _submit(self, target: torch.Tensor, reads: Sequence[FileRead]) -> None:
        self._reads = [read for read in self._reads if not read.done()]
        for read in reads:
            for at in range(0, read.nbytes, PIECE):
                piece = FileRead(read.file, read.offset + at, read.target + at, min(PIECE, read.nbytes - at))
                work = self._reader(target, piece)
                self._reads.append(self._readers.submit(self._guarded, work))

    def _reader(self, target: torch.Tensor, piece: FileRead) -> Callable[[], None]:
        """Returns what reads a piece, and keeps the memory alive that it reads into."""
        return lambda: self._source.read_into(
            piece.file, piece.offset, target.data_ptr() + piece.target, piece.nbytes
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do some work, unless work before it has failed. Its error is the stream's from then on."""
        if self.error is None:
            try:
                work()
            except BaseException as error:
                self.error = error


class DiskedDevice(ABC):
    """Base of devices with a real disk behind their host. Subclasses order all other streams."""

    def __init__(self) -> None:
        self._disks: list[DiskStream] = []
        self._process = os.getpid()

    def open_disk(self, source: Source) -> DiskStream:
        self._disks.append(DiskStream(source))
        return self._disks[-1]

    def read(self, disk: DiskStream, target: torch.Tensor, reads: Sequence[FileRead], label: object) -> None:
        disk.read(target, reads)

    def record(self, stream: Any) -> Any:
        return stream.record() if isinstance(stream, DiskStream) else self._record(stream)

    def mark(self, stream: Any, spent: Any) -> Any:
        return self._record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        if isinstance(stream, DiskStream):
            stream.wait(event.synchronize)
        elif isinstance(event, DiskEvent):
            event.synchronize()
        else:
            self._wait(stream, event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def free_host(self, memory: torch.Tensor) -> None:
        del memory  # ordinary memory goes with its last tensor

    def trim(self) -> None:
        return

    @property
    def capturing(self) -> bool:
        return False

    @property
    def in_reader(self) -> bool:
        return any(disk.in_reader for disk in self._disks)

    @abstractmethod
    def _record(self, stream: Any) -> Any:
        """Returns an event behind what was enqueued on a stream of the device."""

    @abstractmethod
    def _wait(self, stream: Any, event: Any) -> None:
        """Have a stream of the device wait for an event of another."""


Stream: TypeAlias = torch.Stream | PageableStream

PAGE = max(4096, mmap.PAGESIZE)
"""The bytes of host memory that are locked together, and never shared by two registrations."""

COPY_PIECE = 32 << 20
"""The most bytes of one copy: about a millisecond of a PCIe link."""

_log = logging.getLogger(__name__)

_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY")
"""What the driver, cuBLAS, cuDNN and their like say when they load a kernel or take workspace in vain."""


def find_accelerator(name: str) -> torch.device:
    """The accelerator of a name such as `xpu:1` (`xpu`: the current). Raises StreamError for others."""
    asked, here = torch.device(name), torch.accelerator.current_accelerator()
    if here is None or here.type != asked.type or not torch.accelerator.is_available():
        why = "there is no driver, or no device"
        if here is None or here.type != asked.type:
            built = "none" if here is None else repr(here.type)
            why = f"the accelerator that this torch is built for is {built}"
        raise StreamError(
            f"there is no device {name!r} here ({why}): the device sim:h200 runs plans without one"
        )
    count = torch.accelerator.device_count()
    index = asked.index if ":" in name else torch.accelerator.current_device_index()
    if index >= count:
        raise StreamError(f"there is no device '{asked.type}:{index}': this machine has {count}")
    return torch.device(asked.type, index)


class AcceleratorDevice(DiskedDevice):
    """An accelerator by its name. Raises StreamError where torch finds none.

    Host memory is page-locked by torch's own allocator, which may round it up to a power of two. Without
    `page_lock` it is ordinary, and threads make the copies of the streams that are opened (pageable.py).
    """

    def __init__(self, name: str, *, page_lock: bool = True) -> None:
        self.torch_device = find_accelerator(name)
        super().__init__()
        self.name = str(self.torch_device)
        self._page_lock = page_lock
        self._streams: list[Stream] = []

    @property
    def model(self) -> str:
        """The device's name by its maker, or only its type where torch does not know one."""
        return str(getattr(self._properties, "name", self.torch_device.type))

    @property
    def pci_address(self) -> str | None:
        """The device's address on the PCI bus, such as `0000:3b:00.0`; None where torch does not know it."""
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        domain, bus, slot = (getattr(self._properties, name, None) for name in names)
        return None if None in (domain, bus, slot) else f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    @property
    def _properties(self) -> object:
        """What torch tells of the device; None where it tells nothing."""
        facts = getattr(torch.get_device_module(self.torch_device), "get_device_properties", None)
        return facts(self.torch_device) if facts else None

    @property
    def product(self) -> str:
        """The model and the memory of the device, which its index does not tell."""
        return f"{self.model}, {self.memory_info[1]} bytes"

    @property
    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that nobody holds, and all its bytes."""
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return free, total

    @property
    def held_by_others(self) -> int:
        """Bytes of the device that are taken, but not by torch's allocator in this process."""
        free, total = self.memory_info
        return max(0, total - free - torch.accelerator.memory_reserved(self.torch_device))

    @property
    def allocated(self) -> int:
        """Bytes that torch's allocator has given out in this process."""
        return torch.accelerator.memory_allocated(self.torch_device)

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            free, total = self.memory_info
            raise StreamError(
                f"{self.name} is out of memory: {format_size(nbytes)} for {purpose} do not fit into the "
                f"{format_size(free)} that are free of {format_size(total)}: lower the budget by "
                f"{format_size(max(nbytes - free, 1 << 20))} at least"
            ) from error

    def allocate_host(self, nbytes: int, *, once: bool = False) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if self._page_lock:
            return self._lock(nbytes)
        memory = aligned_bytes(nbytes + PAGE, PAGE)[:nbytes]  # a page behind is this memory's too
        self._take(memory)
        return memory

    def open_stream(self, name: str) -> Stream:
        stream = self._new_stream()
        self._streams.append(stream if self._page_lock else PageableStream(stream, self._event))
        return self._streams[-1]

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch_device)

    def copy(self, stream: Stream, target: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        pairs = _views(target, moves)

        def work() -> None:
            for arriving, source in pairs:
                arriving.copy_(source, non_blocking=True)

        self._run(stream, work)

    def copy_out(self, stream: Stream, source: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        pairs = _views(source, moves)

        def work() -> None:
            for leaving, target in pairs:
                target.copy_(leaving, non_blocking=True)

        self._run(stream, work)

    def fill(self, stream: Stream, target: torch.Tensor, start: int, stop: int, value: int) -> None:
        self._run(stream, lambda: target[start:stop].fill_(value))

    def trim(self) -> None:
        with suppress(RuntimeError):  # not while something is captured, or on a lost device
            torch.accelerator.empty_cache()

    def finish(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has none of the threads
        for stream in self._streams:  # a thread may have work that the device does not know of
            stream.synchronize()
        torch.accelerator.synchronize(self.torch_device)

    @property
    def in_reader(self) -> bool:
        return super().in_reader or any(stream.includes_caller for stream in self._threads)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child cannot use the device
        for disk in self._disks:
            disk.close()
        for stream in self._streams:
            with suppress(Exception):  # a device that was lost does not answer, or a thread has failed
                stream.synchronize()
        for thread in self._threads:
            thread.close()
        self._streams.clear()
        self._disks.clear()

    @property
    def _threads(self) -> list[PageableStream]:
        return [stream for stream in self._streams if isinstance(stream, PageableStream)]

    def _lock(self, nbytes: int) -> torch.Tensor:
        try:
            whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise refused_lock(nbytes, str(error)) from error
        if nbytes >= HUGE_PAGE:
            _log.info(
                "%s of host memory for %s are on the NUMA node and in the pages that torch's allocator "
                "chose: it takes memory and locks it in one call",
                format_size(nbytes),
                self.name,
            )
        start = -whole.data_ptr() % PAGE
        return whole[start : start + nbytes]

    def _take(self, memory: torch.Tensor) -> None:
        """Take fresh memory of the host, in huge pages and near the device where that is possible."""
        take_near(memory.data_ptr(), memory.numel(), self.pci_address, self.name)

    def _new_stream(self) -> torch.Stream:
        # Streams of a pool are handed out again: of this priority, none is one that the caller computes on.
        return torch.Stream(self.torch_device, priority=-1)

    def _run(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueue work on a stream: here, or on the thread that drives it."""
        if not isinstance(stream, PageableStream):
            with stream:
                work()
        else:
            self._check_thread(stream)
            stream.run(work)

    def _check_thread(self, stream: PageableStream) -> None:
        """Raise StreamError for a thread that has failed, and in a capture, of which it must see no event."""
        if self.capturing:
            raise StreamError("a graph cannot copy from ordinary memory: load without page_lock=False")
        if isinstance(stream.error, Exception):
            raise lost(self, stream.error) from stream.error

    def _record(self, stream: Stream) -> torch.Event | PageableEvent:
        return stream.record() if isinstance(stream, PageableStream) else self._event(stream)

    def mark(self, stream: Stream, spent: torch.Event | PageableEvent | None) -> torch.Event | PageableEvent:
        if isinstance(stream, PageableStream):
            return stream.record()
        event = torch.Event(self.torch_device) if spent is None else as_recorded(spent)
        event.record(stream)
        return event

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.torch_device)
        event.record(stream)
        return event

    def _wait(self, stream: Stream, event: torch.Event | PageableEvent) -> None:
        if isinstance(stream, PageableStream):
            self._check_thread(stream)
            stream.wait_event(event)
        else:
            stream.wait_event(as_recorded(event))


class EventClock:
    """Times kernels by events of their stream, in nanoseconds: the host calls them long before they run."""

    def __init__(self, device: AcceleratorDevice) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device.torch_device, enable_timing=True)
        event.record(self._device.current_stream())
        return event

    def ns_between(self, start: torch.Event, stop: torch.Event) -> int:
        stop.synchronize()
        return int(start.elapsed_time(stop) * 1e6)


Views: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


def _views(there: torch.Tensor, moves: Sequence[Move]) -> Views:
    """Returns, for each copy, the bytes on the device and those of the host; copies are cut at PIECE.

    Between pieces a copy of the caller's own finds its turn. Making two views takes 2 us, so moves that come
    again keep them.
    """
    if isinstance(moves, Moves) and moves.views is not None and moves.views[0] is there:
        views_made: Views = moves.views[1]
        return views_made
    target = _alias(there) if isinstance(moves, Moves) else there
    views = [
        (target[move.target + at : move.target + end], move.source[move.start + at : move.start + end])
        for move in moves
        for at in range(0, move.nbytes, COPY_PIECE)
        for end in [min(at + COPY_PIECE, move.nbytes)]
    ]
    if isinstance(moves, Moves):
        moves.views = there, views
    return views


def _alias(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes under another storage: `apply` would take views of the first for a caller's."""
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, memory.untyped_storage().nbytes()
    )
    vars(storage)["memory"] = memory  # which then lives for as long as the storage
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage)


def out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that a device has no memory left, which libraries say in their words."""
    is_out_of_memory = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return is_out_of_memory or isinstance(error, torch.OutOfMemoryError)


def refused_lock(nbytes: int, why: str) -> StreamError:
    """Returns the error for host memory that the system does not lock."""
    return StreamError(
        f"{format_size(nbytes)} of host memory could not be page-locked ({why}): raise the limit on locked "
        "memory (ulimit -l, a container's memory), load with less of it (host_memory=), or with ordinary "
        "memory, which copies at a fraction of the rate (page_lock=False)"
    )


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

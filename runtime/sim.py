"""A device that is simulated: real bytes in host memory, streams that run when they like, a virtual clock.

A copy runs at a time of the policy's choosing between the moment it is enqueued and the moment something
waits for it: `earliest`, `latest`, `random` (with a seed), or `lagging`, where the copies of one stream are
late and those of the others are not. The caller's kernels run at once, as they are called. Whatever the
order, vector clocks (happens_before.py) tell whether an event orders every two accesses of the same bytes;
a wait that is missing is found even where the data came out right.

The virtual clock runs on a `Hardware`: a transfer takes latency and bytes over bandwidth, kernels the
times of their trace. Nothing here takes real time into account.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from penstock.runtime.device import Move, aligned_bytes
from penstock.runtime.happens_before import Clock, RaceDetector
from penstock.schedule.errors import StreamError
from penstock.schedule.model import Hardware
from penstock.schedule.sizes import format_size

Policy = Literal["earliest", "latest", "random", "lagging"]
HOST = "the host"
KERNELS = "the stream of the kernels"


@dataclass
class SimEvent:
    """Recorded on `stream`; complete once that has run `position` operations. Times are virtual."""

    stream: SimStream
    position: int
    known: Clock
    time_ns: int


@dataclass
class SimStream:
    """Operations still to run, and how far the virtual clock of the stream is.

    An operation is a function, and the event it must wait for before it runs, if any.
    """

    name: str
    waiting: deque[tuple[Callable[[], object], tuple[SimEvent, ...]]] = field(default_factory=deque)
    pending: list[SimEvent] = field(default_factory=list)
    enqueued: int = 0
    done: int = 0
    time_ns: int = 0


class SimDevice:
    """`hardware` gives the clock and the memory; without one there is no limit and copies take no time."""

    def __init__(
        self, hardware: Hardware | None = None, *, policy: Policy = "latest", seed: int = 0, name: str = "sim"
    ) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.hardware = hardware
        self.detector = RaceDetector()
        self.copied_ns = 0
        self._policy, self._chance = policy, random.Random(seed)
        self._kernels = SimStream(KERNELS)
        self._streams = [self._kernels]
        self._held: dict[str, int] = {}
        self._names: dict[int, str] = {}

    # Memory.

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        self.reserve(nbytes, purpose)
        return self._named(aligned_bytes(nbytes), f"{purpose} on {self.name}")

    def reserve(self, nbytes: int, purpose: str) -> None:
        """Count memory that the device holds, such as activations, which nobody allocates here."""
        most = self.hardware.memory_nbytes if self.hardware else None
        held = sum(self._held.values())
        if most is not None and held + nbytes > most:
            parts = ", ".join(f"{format_size(n)} for {what}" for what, n in self._held.items())
            raise StreamError(
                f"{self.name} is out of memory: {format_size(nbytes)} for {purpose} do not fit beside "
                f"{parts or 'nothing'}; it has {format_size(most)}, so lower the budget"
            )
        self._held[purpose] = self._held.get(purpose, 0) + nbytes

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return self._named(aligned_bytes(nbytes), "host memory")

    def _named(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        taken = set(self._names.values())
        self._names[memory.data_ptr()] = name if name not in taken else f"{name} ({len(taken)})"
        return memory

    # Streams.

    def open_stream(self, name: str) -> SimStream:
        stream = SimStream(f"stream {name!r}")
        self._streams.append(stream)
        return stream

    def current_stream(self) -> SimStream:
        return self._kernels

    def copy(
        self, stream: SimStream, target: torch.Tensor, source: torch.Tensor, moves: Sequence[Move], label: str
    ) -> None:
        self._operation(stream)
        for move in moves:
            self._access(stream, source, move.source, move.nbytes, label, writes=False)
            self._access(stream, target, move.target, move.nbytes, label, writes=True)
        if self.hardware is not None:
            taken = self.hardware.copy_ns(sum(move.nbytes for move in moves))
            stream.time_ns += taken
            self.copied_ns += taken

        def run() -> None:
            for move in moves:
                arriving = source[move.source : move.source + move.nbytes]
                target[move.target : move.target + move.nbytes].copy_(arriving)

        self._enqueue(stream, run)

    def fill(self, stream: SimStream, target: torch.Tensor, start: int, stop: int, value: int) -> None:
        self._operation(stream)
        self._access(stream, target, start, stop - start, "overwriting what was dropped", writes=True)
        self._enqueue(stream, lambda: target[start:stop].fill_(value))

    def record(self, stream: SimStream) -> SimEvent:
        self._operation(stream)
        return SimEvent(stream, stream.enqueued, self.detector.clock_of(stream.name), stream.time_ns)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        self._operation(stream)
        self.detector.join(stream.name, event.known)
        stream.time_ns = max(stream.time_ns, event.time_ns)
        if stream is self._kernels:
            self._run(event)
        else:
            stream.pending.append(event)

    def synchronize(self, event: SimEvent) -> None:
        self.detector.join(HOST, event.known)
        self._run(event)

    def close(self) -> None:
        for stream in self._streams:
            while stream.waiting:
                self._step(stream)
        self._held.clear()

    # What the program's kernels do, told by the module that runs on this device.

    def compute(self, ns: int) -> None:
        """The kernels take `ns` of virtual time."""
        self._kernels.time_ns += ns

    def read(self, memory: torch.Tensor, start: int, stop: int, label: str) -> None:
        """The kernels read bytes `start` to `stop`."""
        self._operation(self._kernels)
        self._access(self._kernels, memory, start, stop - start, label, writes=False)

    @property
    def now_ns(self) -> int:
        """Virtual time at which the kernels enqueued so far have ended."""
        return self._kernels.time_ns

    # How operations come to run.

    def _operation(self, stream: SimStream) -> None:
        """The host enqueues another operation, which comes after all that the host knows of."""
        self.detector.tick(HOST)
        self.detector.join(stream.name, self.detector.clock_of(HOST))
        self.detector.tick(stream.name)

    def _access(
        self, stream: SimStream, memory: torch.Tensor, start: int, nbytes: int, label: str, *, writes: bool
    ) -> None:
        name = self._names.get(memory.data_ptr(), "memory of another device")
        if start < 0 or start + nbytes > memory.numel():
            raise StreamError(
                f"{label} touches bytes {start} to {start + nbytes} of {name}, which has {memory.numel()}"
            )
        self.detector.access(name, start, start + nbytes, stream.name, label, writes=writes)

    def _enqueue(self, stream: SimStream, run: Callable[[], object]) -> None:
        stream.waiting.append((run, tuple(stream.pending)))
        stream.pending.clear()
        stream.enqueued += 1
        if stream is self._kernels:
            self._step(stream)
            return
        late = stream is self._streams[1] if self._policy == "lagging" else self._policy == "latest"
        if late:
            return
        count = len(stream.waiting)
        for _ in range(self._chance.randint(0, count) if self._policy == "random" else count):
            self._step(stream)

    def _step(self, stream: SimStream) -> None:
        """Run the stream's next operation, and before it all that it waits for."""
        run, events = stream.waiting.popleft()
        for event in events:
            self._run(event)
        run()
        stream.done += 1

    def _run(self, event: SimEvent) -> None:
        while event.stream.done < event.position:
            self._step(event.stream)

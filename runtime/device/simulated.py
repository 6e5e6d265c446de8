"""A simulated device on a virtual clock, which finds the races of a streamer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from penstock.runtime.arena.reading import POISON
from penstock.runtime.device.protocol import FileRead, Move, aligned_bytes
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.device.weights import BLOCK, DeviceWeights
from penstock.runtime.files.source import Source
from penstock.runtime.stream.engine import Counters
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Hardware, Step, Trace
from penstock.schedule.facts.sizes import format_size

Clock = dict[str, int]
"""For each thread, the number of its operations that are known to come before."""


class RaceError(StreamError):
    """Two accesses of the same bytes that no event orders."""


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `stop` of memory `memory`, touched by operation `stamp` of `thread`."""

    memory: str
    start: int
    stop: int
    thread: str
    stamp: int
    writes: bool
    label: object

    def __str__(self) -> str:
        return f"{self.label}, which {'writes' if self.writes else 'reads'} on {self.thread}"


class RaceDetector:
    """The clocks of all threads, and the last accesses of every byte."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._last: dict[str, list[Access]] = {}

    @property
    def remembered(self) -> int:
        """The number of accesses that are kept to compare later ones with."""
        return sum(map(len, self._last.values()))

    def copy(self) -> RaceDetector:
        """Returns another detector, which knows what this one knows now."""
        copied = RaceDetector()
        copied._clocks = {thread: dict(clock) for thread, clock in self._clocks.items()}
        copied._last = {memory: list(accesses) for memory, accesses in self._last.items()}
        return copied

    def tick(self, thread: str) -> int:
        """Count another operation of the thread, and return its stamp."""
        clock = self._clocks.setdefault(thread, {})
        clock[thread] = clock.get(thread, 0) + 1
        return clock[thread]

    def clock_of(self, thread: str) -> Clock:
        """Returns a copy of the thread's clock, for others to join later."""
        return dict(self._clocks.get(thread, {}))

    def join(self, thread: str, known: Clock) -> None:
        """Have the thread come after all operations that `known` has counted."""
        clock = self._clocks.setdefault(thread, {})
        for other, stamp in known.items():
            if stamp > clock.get(other, 0):
                clock[other] = stamp

    def begin(self, thread: str, by: str) -> None:
        """Count another operation of the thread, which comes after all that the one that asks knows."""
        self.tick(by)
        self.join(thread, self._clocks[by])
        self.tick(thread)

    def access(self, memory: str, start: int, stop: int, thread: str, label: object, *, writes: bool) -> None:
        """Note that the thread's newest operation touches these bytes. Raises RaceError for a race."""
        clock = self._clocks.setdefault(thread, {})
        now = Access(memory, start, stop, thread, clock.get(thread, 0), writes, label)
        if start >= stop:
            return
        remaining: list[Access] = []
        for before in self._last.get(memory, ()):
            if before.stop <= start or stop <= before.start:
                remaining.append(before)
                continue
            ordered = clock.get(before.thread, 0) >= before.stamp
            if not ordered and (before.writes or writes):
                low, high = max(before.start, start), min(before.stop, stop)
                raise RaceError(
                    f"bytes {low} to {high} of {memory}: nothing orders {before}, and {now}; "
                    "an event is missing, or is waited for too late"
                )
            # Accesses that a write overwrites, or that the same thread repeats, need not be remembered.
            covered = ordered and (writes or (not before.writes and before.thread == thread))
            remaining += _outside(before, start, stop) if covered else (before,)
        remaining.append(now)
        self._last[memory] = remaining


def _outside(access: Access, start: int, stop: int) -> Iterator[Access]:
    if access.start < start:
        yield replace(access, stop=start)
    if stop < access.stop:
        yield replace(access, start=stop)


HOST = "the host"
KERNELS = "the stream of the kernels"

_ALL = 1 << 62
"""More bytes than any memory has."""


@dataclass
class SimEvent:
    """An event that is complete once the streams in `reached` have run so many operations, and `after` are.

    Times are virtual, in nanoseconds. Nothing may wait for an event that is `spent`: an accelerator may have
    recorded it anew.
    """

    reached: tuple[tuple[SimStream, int], ...]
    after: tuple[SimEvent, ...]
    known: Clock
    time_ns: int
    of_disk: bool = False
    spent: bool = False


@dataclass
class SimStream:
    """A stream with the operations that it has still to run, and its virtual clock.

    An operation is a function, and the events it must wait for before it runs. After an error none runs.
    `of_kernels` says that the stream is the caller's, whose kernels run when they are called. `waited_ns` is
    the time of the latest event that the stream has waited for.
    """

    name: str
    of_kernels: bool = False
    waiting: deque[tuple[Callable[[], object], tuple[SimEvent, ...]]] = field(default_factory=deque)
    pending: list[SimEvent] = field(default_factory=list)
    enqueued: int = 0
    done: int = 0
    time_ns: int = 0
    waited_ns: int = 0
    error: BaseException | None = None


@dataclass
class SimDisk:
    """A disk with several lanes for its reads. On the clock they run in sequence; only waits order them."""

    lanes: tuple[SimStream, ...]
    read_into: Callable[[int, int, int, int], None]
    count: int = 0
    time_ns: int = 0


def _make_event(
    streams: Sequence[SimStream], known: Clock, time_ns: int, *, of_disk: bool = False
) -> SimEvent:
    reached = tuple((stream, stream.enqueued) for stream in streams)
    after = tuple(event for stream in streams for event in stream.pending)
    return SimEvent(reached, after, known, time_ns, of_disk)


Operation = TypeVar("Operation", bound=Callable[..., Any])


def _whole(operation: Operation) -> Operation:
    """Have a device refuse every operation after an interrupt that left one half done."""

    @wraps(operation)
    def run(self: SimDevice, *args: Any, **kwargs: Any) -> Any:
        if self._interrupted:
            raise StreamError(f"an interrupt came while {self.name} worked: load the program again")
        try:
            return operation(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise

    return cast(Operation, run)


class SimDevice:
    """`hardware` gives the clock and the memory; without one there is no limit and copies take no time.

    `waits` counts how often the host has waited, by for what: `a disk`, `a stream` or `the device`.
    `launched_ns` is the virtual time at which the calling thread has launched all streamed steps so far.
    """

    def __init__(self, hardware: Hardware | None = None, *, name: str = "sim") -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.hardware = hardware
        self.detector = RaceDetector()
        self.copied_ns = self.launched_ns = 0
        self.waits: Counter[str] = Counter()
        self._kernels = SimStream(KERNELS, of_kernels=True)  # the one that is current
        self._of_kernels = [self._kernels]
        self._streams: list[SimStream] = []
        self._held: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._read_once: set[int] = set()
        self._interrupted = False

    # Memory.

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        self.reserve(nbytes, purpose)
        # What nothing was copied to is nobody's, not what happened to lie there, such as the same weights.
        return self._named(aligned_bytes(nbytes).fill_(POISON), f"{purpose} on {self.name}")

    def reserve(self, nbytes: int, purpose: str) -> None:
        """Count memory that the device holds, such as activations, which nobody allocates here."""
        most = self.hardware.memory_nbytes if self.hardware else None
        taken = sum(self._held.values())
        if most is not None and taken + nbytes > most:
            parts = ", ".join(f"{format_size(n)} for {title}" for title, n in self._held.items())
            raise StreamError(
                f"{self.name} is out of memory: {format_size(nbytes)} for {purpose} do not fit beside "
                f"{parts or 'nothing'}; it has {format_size(most)}: lower the budget by "
                f"{format_size(taken + nbytes - most)}"
            )
        self._held[purpose] = self._held.get(purpose, 0) + nbytes

    def allocate_host(self, nbytes: int, *, once: bool = False) -> torch.Tensor:
        # Aligned to blocks of a disk as on a real device, since loading depends on where memory begins.
        memory = aligned_bytes(nbytes, BLOCK if nbytes else 64).fill_(POISON)
        memory = self._named(memory, "staging memory" if once else "host memory")
        if once:
            self._read_once.add(memory.data_ptr())
        return memory

    def free_host(self, memory: torch.Tensor) -> None:
        self._give_back(self._names.pop(memory.data_ptr(), ""))

    def trim(self) -> None:
        pass

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

    def open_kernels(self, name: str) -> SimStream:
        """Opens another stream of the caller's."""
        self._of_kernels.append(SimStream(f"stream {name!r} of kernels", of_kernels=True))
        return self._of_kernels[-1]

    @contextmanager
    def kernels_on(self, stream: SimStream) -> Iterator[None]:
        """Have kernels be called on a stream of the caller's, which is current until the end."""
        before, self._kernels = self._kernels, stream
        try:
            yield
        finally:
            self._kernels = before

    def open_disk(self, source: Source) -> SimDisk:
        lanes = tuple(SimStream(f"the disk's reader {number}") for number in range(READERS))
        self._streams += lanes
        return SimDisk(lanes, source.read_into)

    @_whole
    def read(self, disk: SimDisk, target: torch.Tensor, reads: Sequence[FileRead], label: object) -> None:
        lane = disk.lanes[disk.count % len(disk.lanes)]
        disk.count += 1
        self._operation(lane)
        for read in reads:
            self._access(lane, target, read.target, read.nbytes, label, writes=True)
        if self.hardware is not None and self.hardware.disk_bytes_per_s is not None:
            disk.time_ns += self.hardware.disk_ns(sum(read.nbytes for read in reads))

        def run() -> None:
            for read in reads:
                disk.read_into(read.file, read.offset, target.data_ptr() + read.target, read.nbytes)

        self._enqueue(lane, run)

    @_whole
    def copy(self, stream: SimStream, target: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        self._operation(stream)
        for move in moves:
            once = move.source.data_ptr() in self._read_once
            self._access(stream, move.source, move.start, move.nbytes, label, writes=once)
            self._access(stream, target, move.target, move.nbytes, label, writes=True)
        if self.hardware is not None:
            taken = self.hardware.copy_ns(sum(move.nbytes for move in moves))
            flows_ns = stream.waited_ns + self.hardware.link_fill_ns
            stream.time_ns = max(stream.time_ns, flows_ns) + taken
            self.copied_ns += taken

        def run() -> None:
            for move in moves:
                leaving = move.source[move.start : move.start + move.nbytes]
                target[move.target : move.target + move.nbytes].copy_(leaving)
                if move.source.data_ptr() in self._read_once:
                    leaving.fill_(POISON)

        self._enqueue(stream, run)

    @_whole
    def copy_out(self, stream: SimStream, source: torch.Tensor, moves: Sequence[Move], label: object) -> None:
        self._operation(stream)
        for move in moves:
            self._access(stream, source, move.target, move.nbytes, label, writes=False)
            self._access(stream, move.source, move.start, move.nbytes, label, writes=True)
        if self.hardware is not None:
            taken = self.hardware.write_ns(sum(move.nbytes for move in moves))
            stream.time_ns += taken
            self.copied_ns += taken

        def run() -> None:
            for move in moves:
                leaving = source[move.target : move.target + move.nbytes]
                move.source[move.start : move.start + move.nbytes].copy_(leaving)

        self._enqueue(stream, run)

    @_whole
    def fill(self, stream: SimStream, target: torch.Tensor, start: int, stop: int, value: int) -> None:
        self._operation(stream)
        self._access(stream, target, start, stop - start, "overwriting what was dropped", writes=True)
        self._enqueue(stream, lambda: target[start:stop].fill_(value))

    @_whole
    def record(self, stream: SimStream | SimDisk) -> SimEvent:
        if isinstance(stream, SimDisk):
            for lane in stream.lanes:
                self._operation(lane)
                self.detector.join("all readers", self.detector.clock_of(lane.name))
            known = self.detector.clock_of("all readers")
            return _make_event(stream.lanes, known, stream.time_ns, of_disk=True)
        self._operation(stream)
        return _make_event((stream,), self.detector.clock_of(stream.name), stream.time_ns)

    def mark(self, stream: SimStream | SimDisk, spent: SimEvent | None) -> SimEvent:
        if spent is not None:
            spent.spent = True
        return self.record(stream)

    @_whole
    def wait(self, stream: SimStream | SimDisk, event: SimEvent) -> None:
        if event.spent:
            raise StreamError(f"{stream} waits for an event that has been recorded anew since")
        stream.time_ns = max(stream.time_ns, event.time_ns)
        if isinstance(stream, SimStream):
            stream.waited_ns = max(stream.waited_ns, event.time_ns)
        for lane in stream.lanes if isinstance(stream, SimDisk) else (stream,):
            self._operation(lane)
            self.detector.join(lane.name, event.known)
            if not lane.of_kernels:
                lane.pending.append(event)
        if isinstance(stream, SimDisk):
            return
        if event.of_disk:
            self.synchronize(event)
        elif stream.of_kernels:
            self._run(event)

    @_whole
    def query(self, event: SimEvent) -> bool:
        if any(stream.done < position for stream, position in event.reached):
            return False
        done = all(map(self.query, event.after))
        event.after = () if done else event.after
        return done

    @_whole
    def synchronize(self, event: SimEvent) -> None:
        if not event.of_disk:
            self.waits["a stream"] += 1
        elif not self.query(event):
            self.waits["a disk"] += 1
        self.detector.join(HOST, event.known)
        self._run(event)

    def finish(self) -> None:
        self.waits["the device"] += 1
        self._run_all([*self._streams, *self._of_kernels])

    @property
    def capturing(self) -> bool:
        return False

    @property
    def in_reader(self) -> bool:
        return False  # The device has no threads of its own: all work runs on the caller's thread.

    def close(self) -> None:
        """Wait for the streams that were opened here, but not for kernels. A second call does nothing."""
        if not self._interrupted:
            self._run_all(self._streams)
        self._held.clear()
        while self._names:
            self._give_back(self._names.popitem()[1])

    # The accesses of the program's kernels, reported by the module that runs on this device.

    def compute(self, ns: int) -> None:
        """Advance the virtual clock of the stream that is current by `ns` ns, from the latest launch on."""
        self._kernels.time_ns = max(self._kernels.time_ns, self.launched_ns) + ns

    def launch(self) -> None:
        """Count the time that the calling thread takes to launch a streamed step."""
        self.launched_ns += self.hardware.host_step_ns if self.hardware else 0

    @_whole
    def kernels_touch(
        self, memory: torch.Tensor, start: int, stop: int, label: str, *, writes: bool = False
    ) -> None:
        """Have the kernels read bytes `start` to `stop`, or write them."""
        self._operation(self._kernels)
        self._access(self._kernels, memory, start, stop - start, label, writes=writes)

    @property
    def now_ns(self) -> int:
        """The virtual time at which the kernels enqueued so far have ended."""
        return max(stream.time_ns for stream in self._of_kernels)

    # How operations come to run.

    def _operation(self, stream: SimStream) -> None:
        """Count an operation that the host enqueues, which comes after all that the host knows of."""
        self.detector.begin(stream.name, HOST)

    def _access(
        self, stream: SimStream, memory: torch.Tensor, start: int, nbytes: int, label: object, *, writes: bool
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
        if stream.of_kernels:
            self._step(stream)

    def _run_all(self, streams: Sequence[SimStream]) -> None:
        """Run all that is enqueued on streams, as the host knows then."""
        for stream in streams:
            while stream.waiting:
                self._step(stream)
            self.detector.join(HOST, self.detector.clock_of(stream.name))

    def _give_back(self, name: str) -> None:
        """Have the host touch all bytes of memory that goes back to the system, where others write to it."""
        if self._interrupted:
            return  # what is half done is behind nothing, and nothing waits for it
        self.detector.tick(HOST)
        self.detector.access(name, 0, _ALL, HOST, "giving the memory back", writes=True)

    def _step(self, stream: SimStream) -> None:
        """Run the stream's next operation, and before it all that it waits for."""
        run, events = stream.waiting.popleft()
        stream.done += 1
        try:
            for event in events:
                self._run(event)
            if stream.error is None:
                run()
        except Exception as error:
            if stream.of_kernels:
                raise
            stream.error = error

    def _run(self, event: SimEvent) -> None:
        for before in event.after:
            self._run(before)
        for stream, position in event.reached:
            while stream.done < position:
                self._step(stream)
            if stream.error is not None:
                raise stream.error
        event.after = ()  # events in a long row would ask one another again and again


class SimStreamer:
    """Stands between a program's probes and its streamer, and touches what a step's kernels read or write.

    The trace and the places of weights say which bytes these are, independently of the streamer. So bytes
    that the streamer did not bring, or overwrites too early, are found.
    """

    def __init__(
        self, streamer: DeviceStreamer, device: SimDevice, weights: DeviceWeights, traces: Sequence[Trace]
    ) -> None:
        self._streamer, self._device, self._weights = streamer, device, weights
        self._traces = {trace.graph: trace for trace in traces}
        self._reached = 0  # steps of this pass whose kernels are enqueued

    @property
    def counters(self) -> Counters:
        """The streamer's counters."""
        return self._streamer.counters

    def probed(self, graph: int) -> tuple[int, ...]:
        """The steps at which the plan acts in a pass of method `graph`, ascending."""
        return self._streamer.probed(graph)

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the streamer's own threads."""
        return self._streamer.in_reader

    def begin(self, graph: int) -> None:
        self._device.compute(self._traces[graph].gap_ns)
        self._reached = 0
        self._streamer.begin(graph)

    def acquire(self, graph: int, step: int) -> None:
        steps = self._traces[graph].steps
        self._pass_over(graph, step)
        self._device.compute(steps[step].lead_ns)
        self._device.launch()
        self._streamer.acquire(graph, step)
        self._touch(steps[step])

    def release(self, graph: int, step: int) -> None:
        this = self._traces[graph].steps[step]
        self._device.compute(this.read_ns)
        self._touch(this)  # until now
        self._reached = max(self._reached, step + 1)
        self._streamer.release(graph, step)

    def end(self, graph: int) -> None:
        trace = self._traces[graph]
        self._pass_over(graph, len(trace.steps))
        self._device.compute(trace.tail_ns)
        self._streamer.end(graph)

    def abort(self) -> None:
        self._streamer.abort()

    def close(self) -> None:
        self._streamer.close()

    def _pass_over(self, graph: int, step: int) -> None:
        """Run the steps without probes before `step`: their weights always stay."""
        probed = self._streamer.probed(graph)
        for number in range(self._reached, step):
            if number not in probed:
                this = self._traces[graph].steps[number]
                self._touch(this)
                self._device.compute(this.lead_ns + this.read_ns)

    def _touch(self, step: Step) -> None:
        for storage in (*step.reads, *step.writes):
            place = self._weights.ranges_of(storage)
            if place is not None:
                memory, start, stop = place
                writes = storage in step.writes
                label = f"step {step.name!r} {'writing' if writes else 'reading'} storage {storage}"
                self._device.kernels_touch(memory, start, stop, label, writes=writes)

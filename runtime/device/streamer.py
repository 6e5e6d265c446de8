"""Streams to a device by copies on its own streams, ordered by events. The host only enqueues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, cycle
from time import perf_counter_ns

from penstock.runtime.arena.reading import POISON
from penstock.runtime.device.protocol import Device, Event, Moves, Stream, lost
from penstock.runtime.device.weights import BLOCK, DeviceWeights, HostRange, HostWeights
from penstock.runtime.stream.engine import MethodTable, Piece, Queue, StreamEngine, cut
from penstock.schedule.facts.errors import PenstockError, StreamError
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.plan import Plan


class PassOrder:
    """The end of the last pass on `device`. `captured` says that a pass may be replayed by its caller."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ended: Event | None = None
        self._known = True  # false while a pass runs, and where an interrupt came before its end was recorded
        self.captured = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold while the kernels of one pass are called, on the stream that is current."""
        device = self._device
        if device.capturing:  # in which nothing from outside can be waited for
            self.captured = True
            yield
            return
        try:
            if not self._known:
                device.finish()
            elif self._ended is not None:
                device.wait(device.current_stream(), self._ended)
        except Exception as error:  # nothing of this pass has run: it is the device itself
            raise lost(device, error) from error
        self._known = False
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the device may be lost, and the error says so
                self._record()
            raise
        self._record()

    def close(self) -> None:
        """Wait for the kernels of all passes, also if they fail, and of replays. It may be called again."""
        with suppress(Exception):
            if self.captured or not self._known:
                self._device.finish()
            elif self._ended is not None:
                self._device.synchronize(self._ended)

    def _record(self) -> None:
        self._ended = self._device.record(self._device.current_stream())
        self._known = True


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
        """Returns the read for the next copy, which is of `wanted`; None where the host holds all of it."""
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
        """Have the disk wait until the ring has room; False if a copy to wait for is not enqueued yet."""
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


@dataclass(frozen=True)
class _Pass:
    """Events of one pass: by step, when its kernels have run; by mark, when the last transfer has (queue.py).

    `entry` stands for a pass that was none: all kernels enqueued before the first one.
    """

    ended: dict[int, Event] = field(default_factory=dict)
    arrived: dict[int, Event] = field(default_factory=dict)
    entry: Event | None = None

    def end_of(self, step: int) -> Event:
        return self.ended[step] if self.entry is None else self.entry


@dataclass(frozen=True)
class _Label:
    """A transfer in words, for messages: for a step, on demand where that is None, or out before its end."""

    weights: DeviceWeights
    item: Range
    step: int | None
    out: bool = False

    def __str__(self) -> str:
        piece = f"layout bytes {self.item.start} to {self.item.stop} ({self.weights.name_of(self.item)})"
        if self.out:
            return f"the copy of {piece} out before the end of step {self.step}"
        return f"the transfer of {piece} " + ("on demand" if self.step is None else f"for step {self.step}")


@dataclass(frozen=True)
class _Transfer:
    """One piece of a queue as a device copies it; `host_has_all`: no byte comes from a disk."""

    moves: Moves
    label: _Label
    nbytes: int
    host_has_all: bool


class DeviceStreamer(StreamEngine):
    """Streams the weights of one plan into `weights.arena`.

    With `poison`, dropped ranges are overwritten with bytes that are NaN in every format.
    """

    _before: _Pass
    _this: _Pass
    _next: _Pass
    _arrived: Event | None  # behind the last copy enqueued in this pass
    _reuses: bool  # whether events are recorded anew in later passes
    _restarted: bool  # whether this pass, or the next if none runs, starts from the resident ranges

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        device: Device,
        weights: DeviceWeights,
        *,
        poison: bool = False,
    ) -> None:
        super().__init__(plan, storages, piece=None)
        self._device, self._weights, self._poison = device, weights, poison
        self._copies = device.open_stream("copies")
        self._ring_bytes = weights.host.ring.numel() or None
        steady = (piece for method in self.methods.values() for piece in method.steady.pieces)
        weights.check_held(Range(piece.start, piece.stop) for piece in steady if piece.out)
        self._staging = Staging(device, weights.disk, self._copies, weights.host)
        self._spent: tuple[list[Event], list[Event]] = [], []  # of kernels, of copies: to be recorded anew
        self._stream: Stream = None  # the one on which the kernels of the step run that was acquired last
        self._closed = False
        self._before = self._this = _Pass()
        self._reuses = True
        self._start_over(plan.schedules[0].graph)

    def abort(self) -> None:
        """Forget everything but the resident ranges; the next pass starts from the boundary again.

        It starts behind all that is enqueued. Nothing is enqueued before, which a pass that fails while it is
        captured would make a part of the capture.
        """
        self._running = True

    def close(self) -> None:
        """Wait for the copies on their way, also if they fail. A second call does nothing.

        The kernels are not waited for: they may be on any stream (pass_order.py).
        """
        if not self._closed:
            self._closed = True
            with suppress(Exception):
                self._device.synchronize(self._device.record(self._copies))
            for queue in (self._position.queue, *(method.steady for method in self.methods.values())):
                queue.made.clear()  # whose views keep the arena alive

    @property
    def in_reader(self) -> bool:
        """Tells whether this runs on a thread of the device: of a disk, or of copies on a CPU."""
        return self._device.in_reader

    # The pass.

    def _check(self) -> None:
        if self._closed:
            raise StreamError("the streamed module is closed: load the program again")
        if self._device.capturing:
            self._check_capture()

    def _check_capture(self) -> None:
        """Raise StreamError if replays of a pass would not do what the pass does."""
        if self._ring_bytes:
            raise StreamError(
                "a pass that reads weights from disk cannot be captured as a graph, whose replays would copy "
                "old bytes: load with more host_memory="
            )
        crosses = any(method.crosses_calls for method in self.methods.values())
        if crosses and self._plan.wrap == "overlap":
            raise StreamError(
                "a pass that brings weights for the next one cannot be captured as a graph: make the plan "
                "with wrap='barrier'"
            )

    def _start(self, method: MethodTable) -> None:
        self._enter(method)
        if self._device.capturing:  # whose events are none outside of it
            self._reuses = False
            self._spent = [], []
        self._retire(self._before.ended, self._before.arrived)
        self._before, self._this, self._next = self._this, self._next, _Pass()
        self._arrived = None
        self._issue()

    def _retire(self, ended: dict[int, Event], arrived: dict[int, Event]) -> None:
        """Take back events for which nothing will be told to wait again. A ring keeps those of its copies."""
        if self._reuses:
            self._spent[0].extend(ended.values())
            if not self._ring_bytes:
                self._spent[1].extend(arrived.values())

    def _wait(self, step: int) -> None:
        self._stream = self._device.current_stream()
        self._await(step, step)

    def _wait_out(self, step: int) -> None:
        self._await(step, self._position.method.steps + 1 + step)

    def _take(self, ranges: Sequence[Range]) -> None:
        """The arena is one allocation; the kernels run behind all that was there before."""

    def _await(self, step: int, mark: int) -> None:
        """Make the kernels that are called next run after the transfers which are counted at `mark`."""
        left = self._position.left
        if left[mark]:
            self._issue(lambda: left[mark] > 0)
            if left[mark]:
                raise StreamError(
                    f"step {step} of graph {self._position.method.graph} needs a transfer that waits for a "
                    "later step: plan it again"
                )
        event = self._this.arrived.get(mark)
        if event is not None:
            self._device.wait(self._stream, event)

    def _leave(self, step: int, drops: Sequence[Range]) -> None:
        if self._poison:
            self._overwrite(drops)
        spent = self._spent[0]
        self._this.ended[step] = self._device.mark(self._stream, spent.pop() if spent else None)
        self._position.ended = step + 1
        self._issue()

    def _finish(self, method: MethodTable) -> None:
        self._position.ended = method.steps
        # What a captured pass loads before it is not loaded until its caller replays it.
        self._running = self._restarted and self._device.capturing
        self._restarted = False
        barrier = self._plan.wrap == "barrier"
        self._issue(lambda: barrier)
        if barrier and self._arrived is not None:
            # From now on, no event of another pass is waited for, so each pass can be captured as a graph.
            self._device.wait(self._device.current_stream(), self._arrived)
            self._retire({}, self._next.arrived)
            self._next.arrived.clear()

    # Between passes.

    def _can_follow(self, graph: int) -> bool:
        # The ring has read ahead for the method that was expected.
        expected = self._position.queue.graph == graph
        return (expected or not self._ring_bytes) and super()._can_follow(graph)

    def _start_over(self, graph: int) -> None:
        try:
            self._restart(graph)
        except PenstockError:
            raise
        except Exception as error:  # nothing has been copied or computed: it is the device itself
            raise lost(self._device, error) from error

    def _restart(self, graph: int) -> None:
        self._position = self._position_before(graph, resident_loaded=True, piece=self._ring_bytes)
        queues = [self.methods[graph].ahead]
        while queues[-1].graph != graph:
            queues.append(self.methods[queues[-1].graph].ahead)
        self._staging.restart(_ranges(self._position.queue), list(chain(*map(_ranges, queues))))
        self._this = _Pass(entry=self._device.record(self._device.current_stream()))
        self._next = _Pass()
        self._forget_pass()
        self._restarted = True

    # What is enqueued.

    def _issue(self, block: Callable[[], bool] = lambda: False) -> None:
        """Enqueue the next transfers, in issue order, as long as they wait for steps that have ended.

        Stops at a transfer whose bytes the disk still reads, unless `block` says to wait for the disk. This
        is what a streamed step costs the host: python -m benchmarks.calls.steps --device null measures it.
        """
        position, device, spent = self._position, self._device, self._spent[1]
        while position.may_start(position.index):
            queue = position.queue
            piece = queue.pieces[position.index]
            transfer: _Transfer = (queue.made or self._make_transfers(queue))[position.index]
            slot = None if transfer.host_has_all else self._staging.slot_of(transfer.label.item)
            if slot is not None and not self._has_read(slot, block):
                return
            device.wait(self._copies, self._freed(piece))
            if piece.out:
                self._copy_out(transfer)
            elif slot is None:
                self._copy(transfer.moves, transfer.nbytes, transfer.label)
            else:
                self._copy_staged(slot, transfer.label)
            reading, left = self._next, position.left_ahead
            if not position.ahead:
                reading, left = self._this, position.left
            if self._ring_bytes:  # whose disk waits for copies, on the host
                self._arrived = device.record(self._copies)
            else:
                self._arrived = device.mark(self._copies, spent.pop() if spent else None)
            reading.arrived[piece.mark] = self._arrived
            if slot is not None:
                self._staging.copied(slot, self._arrived)
            left[piece.mark] -= 1
            position.advance(1)

    def _make_transfers(self, queue: Queue) -> list[_Transfer]:
        queue.made[:] = map(self._transfer, queue.pieces)
        return queue.made

    def _transfer(self, piece: Piece) -> _Transfer:
        whole = Range(piece.start, piece.stop)
        moves, label = self._weights.moves(whole), _Label(self._weights, whole, piece.step, piece.out)
        host_has_all = not self._weights.host.missing(whole)
        return _Transfer(moves, label, sum(move.nbytes for move in moves), host_has_all)

    def _has_read(self, slot: StagedRead, block: Callable[[], bool]) -> bool:
        """Make the next copies run after a read of the disk, for which only the host can wait."""
        late = not self._device.query(slot.read)
        if late and not block():
            return False
        began = perf_counter_ns()
        self._device.wait(self._copies, slot.read)
        self.counters.stall_ns += perf_counter_ns() - began if late else 0
        return True

    def _freed(self, piece: Piece) -> Event:
        """Returns the event of the step that a piece waits for.

        A piece that waits for a step of the pass before is enqueued during that pass, unless the disk was
        late.
        """
        if piece.after >= 0:
            return self._this.ended[piece.after]
        position = self._position
        passed = self._this if position.ahead else self._before
        before = self.methods[self.methods[position.queue.graph].before]
        return passed.end_of(piece.after + before.steps)

    def _copy(self, moves: Moves, nbytes: int, label: _Label) -> None:
        self._device.copy(self._copies, self._weights.arena, moves, label)
        self.counters.bytes_moved += nbytes

    def _copy_staged(self, slot: StagedRead, label: _Label) -> None:
        """Copy what the host holds and what the disk has read."""
        moves = self._weights.moves(label.item, slot.placed)
        self._copy(moves, sum(move.nbytes for move in moves), label)

    def _copy_out(self, transfer: _Transfer) -> None:
        self._device.copy_out(self._copies, self._weights.arena, transfer.moves, transfer.label)
        self.counters.bytes_written += transfer.nbytes

    def _overwrite(self, items: Sequence[Range]) -> None:
        stream = self._device.current_stream()
        for filled in items:
            for start, stop in self._weights.places(filled):
                self._device.fill(stream, self._weights.arena, start, stop, POISON)

    def _load_on_demand(self, needed: Sequence[Range]) -> None:
        """Copy the ranges that a step needs behind all that is enqueued, and make the kernels wait."""
        stream = self._device.current_stream()
        self._device.wait(self._copies, self._device.record(stream))
        pieces = cut(needed, self._ring_bytes or self._weights.arena.numel())
        self._staging.restart(pieces, ())
        for wanted in pieces:
            slot = self._staging.slot_of(wanted)
            if slot is not None:
                self._has_read(slot, lambda: True)
            label = _Label(self._weights, wanted, None)
            if slot is None:
                moves = self._weights.moves(wanted)
                self._copy(moves, sum(move.nbytes for move in moves), label)
            else:
                self._copy_staged(slot, label)
                self._staging.copied(slot, self._device.record(self._copies))
        self._device.wait(stream, self._device.record(self._copies))
        self._demand = needed
        self.counters.misses += 1


def _ranges(queue: Queue) -> list[Range]:
    return [Range(piece.start, piece.stop) for piece in queue.pieces]

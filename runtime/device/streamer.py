"""Streams weights with a device's own streams and events; the host only enqueues.

One pass of a method is: `begin`, then `acquire` and `release` of each probed step in the order of its
trace, then `end`. A release records an event on the stream of the caller's kernels, and enqueues the
transfers that may start then, each behind the event of the step it waits for; an acquire makes the
kernels wait for the transfers of its step. A transfer is enqueued only after the host has recorded the
event that it waits for: a wait on an event that was never recorded would be none. Where a host holds a
part of the weights only, it is enqueued once the disk has read the rest, and an acquire waits for that.

Another order of steps is a miss: what the step needs is copied on demand, and the pass after begins
from the resident ranges again. Slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter_ns

from penstock.runtime.arena.anonymous import POISON
from penstock.runtime.device.memory import DeviceWeights
from penstock.runtime.device.protocol import Device, Event
from penstock.runtime.device.staging import Slot, Staging
from penstock.runtime.stream.interface import Counters
from penstock.runtime.stream.position import Position
from penstock.runtime.stream.queue import MethodTable, Piece, Queue, first_pass, tabulate
from penstock.runtime.stream.ranges import cut
from penstock.schedule.facts.errors import PenstockError, StreamError
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.plan import Plan


@dataclass(frozen=True)
class _Pass:
    """Events of one pass, by step: when its kernels have read, when the last of its transfers arrived.

    `entry` stands for a pass that was none: all kernels enqueued before the first one.
    """

    ended: dict[int, Event] = field(default_factory=dict)
    arrived: dict[int, Event] = field(default_factory=dict)
    entry: Event | None = None

    def end_of(self, step: int) -> Event:
        return self.ended[step] if self.entry is None else self.entry


class DeviceStreamer:
    """Streams the weights of one plan, which has at least one schedule, into `weights.arena`.

    With `poison`, what a plan drops is overwritten with bytes that are NaN in every format.
    """

    _position: Position
    _before: _Pass
    _this: _Pass
    _next: _Pass
    _arrived: Event | None  # behind the last copy enqueued in this pass
    _expected: list[int]  # the probed steps still to come in this pass, the next one last
    _demand: Sequence[Range] | None  # what was loaded last, once this pass left the planned order
    _running: bool

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        device: Device,
        weights: DeviceWeights,
        *,
        poison: bool = False,
    ) -> None:
        self.counters = Counters()
        traces = {trace.graph: trace for trace in plan.traces}
        self.methods: dict[int, MethodTable] = {
            s.graph: tabulate(plan, s, traces[s.graph], storages, piece=None) for s in plan.schedules
        }
        self._plan, self._device, self._weights, self._poison = plan, device, weights, poison
        self._copies = device.open_stream("copies")
        self._ring_bytes = weights.host.ring.numel() or None
        self._staging = Staging(device, weights.disk, self._copies, weights.host)
        self._closed = False
        self._lost: Exception | None = None
        self._before = self._this = _Pass()
        self._restart(plan.schedules[0].graph)

    # The pass.

    def begin(self, graph: int) -> None:
        """Start a pass of method `graph`."""
        if self._closed:
            raise StreamError("the streamed module is closed: load the program again")
        if self._lost is not None:
            raise StreamError(
                f"{self._device.name} is lost ({self._lost}): close the module and load it again"
            ) from self._lost
        method = self.methods[graph]
        if self._running or not self._can_follow(graph):
            self._restart(graph)
        self._position.begin(method)
        self._before, self._this, self._next = self._this, self._next, _Pass()
        self._expected = list(reversed(method.probed))
        self._arrived = None
        self._running = True
        self._issue()

    def acquire(self, graph: int, step: int) -> None:
        """The kernels that follow run once everything that `step` reads is in the arena."""
        if self._demand is None and self._expected and self._expected[-1] == step:
            self._issue(lambda: self._position.left[step] > 0)
            if self._position.left[step]:
                raise StreamError(
                    f"step {step} of graph {graph} needs a transfer that waits for a later step: "
                    "plan it again"
                )
            self._await(step)
        else:
            self._load_on_demand(self.methods[graph].needs[step])

    def release(self, graph: int, step: int) -> None:
        """The kernels of `step` are enqueued: enqueue the transfers that wait for it behind them."""
        if self._demand is not None:
            return
        if not self._expected or self._expected[-1] != step:
            raise StreamError(f"step {step} of graph {graph} was released without being acquired")
        self._expected.pop()
        if self._poison:
            self._overwrite(self.methods[graph].drops.get(step, ()))
        self._this.ended[step] = self._device.record(self._device.current_stream())
        self._position.ended = step + 1
        self._issue()

    def end(self, graph: int) -> None:
        """The pass is enqueued; with `wrap="barrier"` what it has started for the next joins it."""
        if self._demand is not None or self._expected:
            self.abort()
            return
        self._position.ended = self.methods[graph].steps
        self._running = False
        barrier = self._plan.wrap == "barrier"
        self._issue(lambda: barrier)
        if barrier and self._arrived is not None:
            # Of other passes nothing is waited for from now on, so that each can be captured as a graph.
            self._device.wait(self._device.current_stream(), self._arrived)
            self._next.arrived.clear()

    def abort(self) -> None:
        """Forget everything but the resident ranges; the next pass starts from the boundary again.

        Nothing is waited for: what the next pass copies runs behind what is enqueued.
        """
        if self._closed or self._lost is not None:
            return
        try:
            self._restart(self._position.method.graph)
        except PenstockError:
            raise
        except Exception as error:  # the pass has failed because the device has
            self._lost = error

    def close(self) -> None:
        """Wait for what is on its way, also if it fails. Idempotent."""
        if not self._closed:
            self._closed = True
            for stream in (self._copies, self._device.current_stream()):
                with suppress(Exception):
                    self._device.synchronize(self._device.record(stream))
            for event in self._last_read():
                with suppress(Exception):
                    self._device.synchronize(event)

    @property
    def in_reader(self) -> bool:
        """Whether this runs on a thread of the device: of a disk, or of copies on a CPU."""
        return self._device.in_reader

    # Between passes.

    def _can_follow(self, graph: int) -> bool:
        """Whether what is on its way for the pass expected next serves a pass of `graph` as well."""
        now = self._position
        if now.method.graph == graph:
            return True
        if self._ring_bytes:
            return False
        crossing = self.methods[graph].crosses_calls or now.method.crosses_calls
        return not crossing and now.index == 0 and now.queue is now.method.steady

    def _restart(self, graph: int) -> None:
        method = self.methods[graph]
        for event in self._last_read():  # passes before may have run on another stream than the next
            self._device.wait(self._copies, event)
        queue = first_pass(self._plan, method, resident_loaded=True, piece=self._ring_bytes)
        self._position = Position.before(queue, method)
        self._staging.restart(_ranges(queue), _ranges(method.steady))
        self._this = _Pass(entry=self._device.record(self._device.current_stream()))
        self._next = _Pass()
        self._expected, self._demand = [], None
        self._running = False

    def _last_read(self) -> list[Event]:
        """The event behind the last step whose kernels were enqueued."""
        passes = (self._this, self._before)
        return [event for one in passes for event in list(one.ended.values())[-1:]][:1]

    # What is enqueued.

    def _issue(self, block: Callable[[], bool] = lambda: False) -> None:
        """Enqueue every transfer whose turn it is and that waits for a step that has ended.

        One whose bytes the disk still reads ends this, unless `block` tells to wait for it.
        """
        position = self._position
        while position.may_start(position.index):
            piece = position.queue.pieces[position.index]
            item = Range(piece.start, piece.stop)
            slot = self._staging.slot_of(item)
            if slot is not None and not self._has_read(slot, block):
                return
            self._device.wait(self._copies, self._freed(piece))
            self._copy(item, f"for step {piece.step}", slot)
            reading = self._next if position.ahead else self._this
            self._arrived = reading.arrived[piece.step] = self._device.record(self._copies)
            if slot is not None:
                self._staging.copied(slot, self._arrived)
            position.counts[piece.step] -= 1
            position.advance(1)

    def _has_read(self, slot: Slot, block: Callable[[], bool]) -> bool:
        """Have the copies that come run after the disk's read, which only the host can wait for."""
        began = perf_counter_ns()
        if not self._device.query(slot.read):
            if not block():
                return False
            self._device.synchronize(slot.read)
            self.counters.stall_ns += perf_counter_ns() - began
        self._device.wait(self._copies, slot.read)
        return True

    def _freed(self, piece: Piece) -> Event:
        """The event of the step that a piece waits for.

        What waits for a step of the pass before is enqueued in that pass, ahead, unless the disk was late.
        """
        if piece.after >= 0:
            return self._this.ended[piece.after]
        passed = self._this if self._position.ahead else self._before
        return passed.end_of(piece.after + self._position.method.steps)

    def _await(self, step: int) -> None:
        event = self._this.arrived.get(step)
        if event is not None:
            self._device.wait(self._device.current_stream(), event)

    def _copy(self, item: Range, label: str, slot: Slot | None = None) -> None:
        weights = self._weights
        moves = weights.moves(item, slot.placed if slot else ())
        label = f"the transfer of layout bytes {item.start} to {item.stop} ({weights.name_of(item)}) {label}"
        self._device.copy(self._copies, weights.arena, moves, label)
        self.counters.bytes_moved += sum(move.nbytes for move in moves)

    def _overwrite(self, items: Sequence[Range]) -> None:
        stream = self._device.current_stream()
        for item in items:
            for start, stop in self._weights.places(item):
                self._device.fill(stream, self._weights.arena, start, stop, POISON)

    def _load_on_demand(self, needed: Sequence[Range]) -> None:
        """A miss: copy what the step needs behind all that is enqueued, and have the kernels wait."""
        stream = self._device.current_stream()
        self._device.wait(self._copies, self._device.record(stream))
        pieces = cut(needed, self._ring_bytes or self._weights.arena.numel())
        self._staging.restart(pieces, ())
        for item in pieces:
            slot = self._staging.slot_of(item)
            if slot is not None:
                self._has_read(slot, lambda: True)
            self._copy(item, "on demand", slot)
            if slot is not None:
                self._staging.copied(slot, self._device.record(self._copies))
        self._device.wait(stream, self._device.record(self._copies))
        self._demand = needed
        self.counters.misses += 1


def _ranges(queue: Queue) -> list[Range]:
    return [Range(piece.start, piece.stop) for piece in queue.pieces]

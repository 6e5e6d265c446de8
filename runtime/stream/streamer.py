"""Readers that fill the arena ahead of the reads, and the two probes that the program calls.

One pass of a method is: `begin`, then for each probed step `acquire` and `release` in the order of
its trace, then `end`. Readers take pieces of transfers strictly in issue order; a piece starts once
the step it waits for has ended, also when that step belongs to the pass before, so prefetch runs
across calls. Whatever does not happen as planned (another order of steps, a failed read, an
exception in the model) ends in `abort`, which forgets all but the resident ranges and starts over
from the plan's boundary: slower, never wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.runtime.arena.opening import WeightArena
from penstock.runtime.files.rates import READERS
from penstock.runtime.stream.interface import Counters
from penstock.runtime.stream.position import Position
from penstock.runtime.stream.queue import MethodTable, Piece, first_pass, tabulate
from penstock.runtime.stream.ranges import merge
from penstock.runtime.system.threads import ReaderThreads
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import subtract

_CHECK_EVERY_NS = 5_000_000


class Streamer:
    """Streams the weights of one plan, which has at least one schedule, into one arena.

    Raises from `begin` or `acquire` whatever the arena raised while it was filled. With `drop_at_once`
    bytes are dropped when their step ends, not when their room is needed.
    """

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        arena: WeightArena,
        *,
        readers: int = READERS,
        drop_at_once: bool = False,
    ) -> None:
        self.counters = Counters()
        traces = {trace.graph: trace for trace in plan.traces}
        self.methods: dict[int, MethodTable] = {
            s.graph: tabulate(plan, s, traces[s.graph], storages) for s in plan.schedules
        }
        self._plan, self._arena, self._drop_at_once = plan, arena, drop_at_once
        lock = threading.RLock()  # closing may run anywhere, as garbage is collected
        self._work = threading.Condition(lock)  # readers wait for a piece that may start
        self._arrived = threading.Condition(lock)  # the caller waits for what readers copy
        self._checked_ns = 0
        self._in_flight = 0
        self._closed = False
        self._error: BaseException | None = None
        self._resident_loaded = False
        self._expected: list[int] = []  # the probed steps still to come in this pass, the next one last
        self._dropping: list[Range] = []  # what ended steps have dropped while nothing needs its room
        self._demand: list[Range] | None = None  # what is loaded, once this pass left the planned order
        self._running = False
        self._paused = False
        self._position = self._first_position(plan.schedules[0].graph)
        self._readers = ReaderThreads(readers, self._read, "reader")
        self._readers.start(self.close)  # those that have started fill memory that the caller gives back

    # The pass, on the caller's thread.

    def begin(self, graph: int) -> None:
        """Start a pass of method `graph`; returns once every resident range is loaded."""
        self._check()
        method = self.methods[graph]
        # Paused or running: an interrupt has kept an abort from finishing.
        unclear = self._error is not None or self._running or self._paused
        if unclear or not self._can_follow(graph):
            self._drain()
            self._restart(graph)
        with self._work:
            self._position.begin(method)
            self._expected = list(reversed(method.probed))
            self._running = True
            self._fill_ready()
        self._wait(method.steps)
        self._resident_loaded = True

    def acquire(self, graph: int, step: int) -> None:
        """Wait until everything that `step` reads is in the arena."""
        if time.perf_counter_ns() - self._checked_ns > _CHECK_EVERY_NS:
            self._check()
        if self._demand is None and self._expected and self._expected[-1] == step:
            self._wait(step)
        else:
            self._load_on_demand(self.methods[graph].needs[step])

    def release(self, graph: int, step: int) -> None:
        """Step `step` has ended: let the transfers that wait for it start; drop what the plan drops first.

        Until one starts, nothing needs the room: neighbours dropped by several steps then go in one
        system call, which interrupts every core.
        """
        if self._demand is not None:
            return
        if not self._expected or self._expected[-1] != step:
            raise StreamError(f"step {step} of graph {graph} was released without being acquired")
        self._expected.pop()
        self._dropping += self.methods[graph].drops.get(step, ())
        with self._work:
            self._position.ended = step + 1
            if self._drop_at_once or self._startable():
                self._drop()
            self._fill_ready()

    def end(self, graph: int) -> None:
        """The pass is over; with `wrap="barrier"`, wait for what it has started for the next.

        Raises SourceError where a file changed under the pass, whose output is then worth nothing.
        """
        self._check()  # what was mapped in this pass is what the files still hold
        if self._demand is not None or self._expected:
            self.abort()
            return
        with self._work:
            self._position.ended = self.methods[graph].steps
            self._running = False
            self._drop()
            self._fill_ready()
        if self._plan.wrap == "barrier":
            self._wait_for(lambda: not self._startable() and not self._in_flight)

    def abort(self) -> None:
        """Forget everything but the resident ranges; the next pass starts from the boundary again."""
        if not self._closed:
            self._drain()
            self._restart(self._position.method.graph)

    def close(self) -> None:
        """Stop the readers and wait for them. Idempotent."""
        with self._work:
            self._closed = True
            self._work.notify_all()
            self._arrived.notify_all()
        self._readers.join()

    @property
    def in_reader(self) -> bool:
        """Whether the caller is one of the readers, which cannot wait for themselves."""
        return self._readers.includes_caller

    # Between passes.

    def _can_follow(self, graph: int) -> bool:
        """Whether what is on its way for the pass expected next serves a pass of `graph` as well."""
        now = self._position
        if now.method.graph == graph:
            return True
        crossing = self.methods[graph].crosses_calls or now.method.crosses_calls
        # A first pass's queue brings the boundary, which the other method's steady one would not.
        return not crossing and now.index == 0 and now.queue is now.method.steady

    def _drain(self) -> None:
        """Stop issuing, wait for what is being copied, drop all but the resident ranges."""
        with self._work:
            self._paused = True
            while self._in_flight:
                self._arrived.wait()
        kept = merge(self._plan.resident) if self._resident_loaded else []
        self._dropping.clear()
        for item in subtract(self._plan.arena.segments, kept):
            self._arena.drop(item.start, item.stop)

    def _restart(self, graph: int) -> None:
        position = self._first_position(graph)
        with self._work:
            self._position = position
            self._expected, self._demand, self._error = [], None, None
            self._running = self._paused = False
            self._wake_reader()

    def _first_position(self, graph: int) -> Position:
        method = self.methods[graph]
        return Position.before(first_pass(self._plan, method, resident_loaded=self._resident_loaded), method)

    # The readers' threads.

    def _read(self) -> None:
        while (taken := self._take()) is not None:
            pieces, left = taken
            error: BaseException | None = None
            moved = 0
            try:
                for piece in pieces:
                    moved += self._arena.fill(piece.start, piece.stop)
            except BaseException as raised:  # raised again on the caller's thread
                error = raised
            with self._work:
                self._in_flight -= 1
                self.counters.bytes_moved += moved
                if error is None:
                    for piece in pieces:
                        left[piece.step] -= 1
                else:
                    self._error = self._error or error
                self._arrived.notify_all()

    def _take(self) -> tuple[Sequence[Piece], list[int]] | None:
        """The next pieces, once one may start, and the counts they belong to; None once closed.

        Small pieces of one pass that may all start are taken together, up to the size of a large one.
        """
        with self._work:
            while not self._closed and not self._startable():
                self._work.wait()
            if self._closed:
                return None
            pieces, left = self._position.small_pieces(), self._position.counts
            self._in_flight += 1
            self._position.advance(len(pieces))
            self._wake_reader()
            return pieces, left

    def _wake_reader(self) -> None:
        """Wake one reader if a piece may start; it wakes the next: all would fight for the interpreter."""
        if self._startable():
            self._work.notify()

    def _startable(self) -> bool:
        usable = not self._paused and self._error is None
        return usable and self._position.may_start(self._position.index)

    # On the caller's thread, beside the pass.

    def _drop(self) -> None:
        for item in merge(self._dropping):
            self._arena.drop(item.start, item.stop)
        self._dropping.clear()

    def _fill_ready(self) -> None:
        """Fill what needs no waiting, which costs less here than to wake a reader; leave the rest to one."""
        while self._startable():
            pieces = self._position.adjacent_pieces()
            moved = self._arena.fill_ready(pieces[0].start, pieces[-1].stop)
            if moved is None:
                self._wake_reader()
                return
            for piece in pieces:
                self._position.counts[piece.step] -= 1
            self.counters.bytes_moved += moved
            self._position.advance(len(pieces))

    def _check(self) -> None:
        """Whether what is held can still be read; a system call for each file, so not at every step."""
        self._arena.check()
        self._checked_ns = time.perf_counter_ns()

    def _wait(self, step: int) -> None:
        left = self._position.left
        if left[step] or self._error is not None:
            self._wait_for(lambda: not left[step])

    def _wait_for(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter_ns()
        with self._work:
            while not done() and self._error is None and not self._closed:
                if not self._in_flight and not self._startable():
                    raise StreamError(
                        "what is waited for needs a transfer that waits for a later step: plan it again"
                    )
                self._arrived.wait()
        self.counters.stall_ns += time.perf_counter_ns() - began
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StreamError("the streamed module was closed while it ran")

    def _load_on_demand(self, needed: Sequence[Range]) -> None:
        """A miss: drop whatever else streams, then load `needed` before returning."""
        if self._error is not None:
            raise self._error
        if self._demand is None:
            self._drain()
        for item in self._demand or ():
            self._arena.drop(item.start, item.stop)
        self._demand = list(needed)
        began = time.perf_counter_ns()
        for item in needed:
            self.counters.bytes_moved += self._arena.fill(item.start, item.stop)
        self.counters.stall_ns += time.perf_counter_ns() - began
        self.counters.misses += 1

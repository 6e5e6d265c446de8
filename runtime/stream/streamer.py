"""Streams on a CPU: readers fill the arena ahead of the reads, and the two probes wait for them.

Readers take pieces of transfers strictly in issue order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.runtime.arena.reading import WeightArena
from penstock.runtime.stream.engine import MethodTable, Piece, StreamEngine
from penstock.runtime.system.threads import READERS, ReaderThreads
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import merged, subtract

_CHECK_EVERY_NS = 5_000_000


class ArenaStreamer(StreamEngine):
    """Streams the weights of one plan into one arena.

    `begin` and `acquire` raise the error that the arena raised while it was filled. With `drop_at_once`,
    bytes are dropped when their step ends, and not only when their memory is needed.
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
        super().__init__(plan, storages)
        self._arena, self._drop_at_once = arena, drop_at_once
        lock = threading.RLock()  # closing may run anywhere, as garbage is collected
        self._work = threading.Condition(lock)  # readers wait for a piece that may start
        self._arrived = threading.Condition(lock)  # the caller waits for what readers copy
        self._checked_ns = 0
        self._in_flight = 0
        self._closed = False
        self._error: BaseException | None = None
        self._resident_loaded = False
        self._dropping: list[Range] = []  # dropped by ended steps; nothing needs their memory yet
        self._paused = False
        self._position = self._position_before(plan.schedules[0].graph, resident_loaded=False)
        self._readers = ReaderThreads(readers, self._read, "reader")
        self._readers.start(self.close)  # started readers fill memory that the caller would give back

    # The pass, on the caller's thread.

    def acquire(self, graph: int, step: int) -> None:
        """Wait until everything that `step` reads is in the arena."""
        if time.perf_counter_ns() - self._checked_ns > _CHECK_EVERY_NS:
            self._check()
        super().acquire(graph, step)

    def end(self, graph: int) -> None:
        """End the pass, and with `wrap="barrier"` wait for what it has started for the next one.

        Raises SourceError where a file changed under the pass, whose output is then worth nothing.
        """
        self._check()  # raises unless the files still hold the bytes that were mapped in this pass
        super().end(graph)

    def abort(self) -> None:
        if not self._closed:
            self._start_over(self._position.method.graph)

    def close(self) -> None:
        """Stop the readers and wait for them. A second call does nothing."""
        with self._work:
            self._closed = True
            self._work.notify_all()
            self._arrived.notify_all()
        self._readers.join()

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the readers, which cannot wait for themselves."""
        return self._readers.includes_caller

    def _start(self, method: MethodTable) -> None:
        with self._work:
            self._enter(method)
            self._wake_reader()
        self._wait(method.steps)
        self._resident_loaded = True

    def _leave(self, step: int, drops: Sequence[Range]) -> None:
        """Drop what the plan drops with a step, and let the transfers that wait for it start.

        Until one starts, nothing needs the room: neighbours dropped by several steps then go in one
        system call, which interrupts every core.
        """
        self._dropping += drops
        with self._work:
            self._position.ended = step + 1
            if self._drop_at_once or self._startable():
                self._drop()
            self._wake_reader()

    def _take(self, ranges: Sequence[Range]) -> None:
        with self._work:
            self._drop()
        for piece in ranges:
            self._arena.take(piece.start, piece.stop)

    def _wait_out(self, step: int) -> None:
        mark = self._position.method.steps + 1 + step
        if self._position.left[mark]:
            self._wait(mark)

    def _finish(self, method: MethodTable) -> None:
        with self._work:
            self._position.ended = method.steps
            self._running = False
            self._drop()
            self._wake_reader()
        if self._plan.wrap == "barrier":
            self._wait_for(lambda: not self._startable() and not self._in_flight)

    # Between passes.

    @property
    def _is_unclear(self) -> bool:
        # Paused means that an interrupt has kept an abort from finishing.
        return self._running or self._paused or self._error is not None

    def _start_over(self, graph: int) -> None:
        self._drain()
        self._restart(graph)

    def _drain(self) -> None:
        """Issue nothing more, wait for what is being copied, and drop all but the resident ranges."""
        with self._work:
            self._paused = True
            while self._in_flight:
                self._arrived.wait()
        resident = merged(self._plan.resident) if self._resident_loaded else []
        self._dropping.clear()
        for piece in subtract(self._plan.arena.segments, resident):
            self._arena.drop(piece.start, piece.stop)

    def _restart(self, graph: int) -> None:
        position = self._position_before(graph, resident_loaded=self._resident_loaded)
        with self._work:
            self._position = position
            self._forget_pass()
            self._error, self._paused = None, False
            self._wake_reader()

    # The readers' threads.

    def _read(self) -> None:
        while (taken := self._next()) is not None:
            pieces, left = taken
            error: BaseException | None = None
            moved = written = 0
            try:
                for piece in pieces:
                    if piece.out:
                        written += self._arena.write_out(piece.start, piece.stop)
                    else:
                        moved += self._arena.fill(piece.start, piece.stop)
            except BaseException as raised:  # raised again on the caller's thread
                error = raised
            with self._work:
                self._in_flight -= 1
                self.counters.bytes_moved += moved
                self.counters.bytes_read += moved
                self.counters.bytes_written += written
                if error is None:
                    for piece in pieces:
                        left[piece.mark] -= 1
                else:
                    self._error = self._error or error
                self._arrived.notify_all()

    def _next(self) -> tuple[Sequence[Piece], list[int]] | None:
        """Wait until a piece may start, and return the next pieces and their counts; None once closed.

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
        """Wake one reader if a piece may start. It wakes the next: all would fight for the interpreter."""
        if self._startable():
            self._work.notify()

    def _startable(self) -> bool:
        usable = not self._paused and self._error is None
        return usable and self._position.may_start(self._position.index)

    # On the caller's thread, beside the pass.

    def _drop(self) -> None:
        for piece in merged(self._dropping):
            self._arena.drop(piece.start, piece.stop)
        self._dropping.clear()

    def _check(self) -> None:
        """Raise SourceError if bytes in the arena cannot be read any more; a system call for each file."""
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
        """Drop all other ranges that stream, then load `needed` before returning."""
        if self._error is not None:
            raise self._error
        if self._demand is None:
            self._drain()
        for piece in self._demand or ():
            self._arena.drop(piece.start, piece.stop)
        self._demand = list(needed)
        began = time.perf_counter_ns()
        for piece in needed:
            self.counters.bytes_moved += self._arena.fill(piece.start, piece.stop)
        self.counters.stall_ns += time.perf_counter_ns() - began
        self.counters.misses += 1

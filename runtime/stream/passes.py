"""Holds loaded weights, and runs one pass over them at a time, in the process that loaded them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from penstock.passes.probes import Probes, streaming
from penstock.runtime.device.pass_order import PassOrder
from penstock.runtime.sparse.base import PooledUnits
from penstock.runtime.stream.interface import Counters, MemoryUse, Stats, Streamer, sum_of
from penstock.runtime.stream.probe_calls import Clock, HostClock
from penstock.runtime.system.threads import ParkedTeam
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.plan import Plan


@dataclass
class Resources:
    """Gives back what a load has taken, in order: the streamer, the memory that it writes, the files.

    Every closer may be called again. `in_reader` tells whether the caller is a thread that reads what does
    not stream.
    """

    streamer: Streamer | None
    closers: tuple[Callable[[], None], ...]
    in_reader: Callable[[], bool] = lambda: False
    closed: bool = False
    owner: int = field(default_factory=os.getpid)

    def close_first(self, close: Callable[[], None]) -> None:
        """Have `close` called before all other closers, once the streamer is closed."""
        self.closers = (close, *self.closers)

    def close(self) -> None:
        """Give everything back, also after an interrupt. A forked child has no readers and may only close."""
        self.closed = True
        if os.getpid() == self.owner:
            streamer = self.streamer
            # The object was collected on a thread of its own readers, which cannot wait for itself.
            if self.in_reader() or (streamer is not None and streamer.in_reader):
                threading.Thread(target=self.close, name="penstock-close").start()
                return
            if streamer is not None:
                streamer.close()
        for close in self.closers:
            close()


@dataclass(eq=False, kw_only=True)
class LoadedWeights:
    """The weights of a plan as tensors by FQN, and their streamer. They are closed when they are collected.

    The streamer waits for the weights that stream whole, and `units` for those that are read by units; `wait`
    returns when all others are in memory.
    `out_of_memory` says which part of a device's memory was too small. `team` sleeps while readers bring much
    of what a pass takes; what is mapped from the page cache needs none of them. `order` is that of the passes
    on a device, and `clock` times what they call.
    """

    plan: Plan
    tensors: dict[str, torch.Tensor]
    resources: Resources
    usage: Callable[[], MemoryUse]
    wait: Callable[[], None] = lambda: None
    team: ParkedTeam | None = None
    units: PooledUnits | None = None
    order: PassOrder | None = None
    clock: Clock = field(default_factory=HostClock)
    out_of_memory: Callable[[], str] = lambda: "activations outgrew what was left beside weights"

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, self.resources.close)

    @property
    def streamer(self) -> Streamer | None:
        """The streamer of the weights, or None if all weights stay in memory."""
        return self.resources.streamer

    @property
    def counters(self) -> Counters:
        """The counters of the streamer and of the units so far."""
        some = [counted.counters for counted in (self.streamer, self.units) if counted is not None]
        return sum_of(*some)

    @property
    def unit_wait_ns(self) -> int:
        """Nanoseconds that steps have waited for units so far, within their reads."""
        return self.units.counters.stall_ns if self.units else 0

    def probed(self, graph: int) -> tuple[int, ...]:
        """The steps of a method at which the plan acts."""
        return self.streamer.probed(graph) if self.streamer else ()

    def run(self, graph: int, probes: Probes | None, run: Callable[[], Any]) -> Any:
        """Run one pass of method `graph`, whose probes call `probes`, and return what `run` returns."""
        with streaming(probes), self.order.turn() if self.order else nullcontext():
            try:
                before = self.begin(graph)
                output = run()
                self.end(graph, before)
            except BaseException:
                self.abort()
                raise
            return output

    def begin(self, graph: int) -> Counters:
        """Begin a pass of method `graph`; returns the counters, for `end`."""
        before = self.counters
        if self.units is not None:
            self.units.begin()
        if self.streamer is not None:
            self.streamer.begin(graph)
        return before

    def end(self, graph: int, before: Counters) -> None:
        """End a pass, before which the counters were `before`."""
        if self.streamer is not None:
            self.streamer.end(graph)
        self._calm(before, self.counters)

    def abort(self) -> None:
        """End a pass that did not run as planned."""
        if self.streamer is not None:
            self.streamer.abort()

    def _calm(self, before: Counters, now: Counters) -> None:
        """Have the team sleep in the next pass if readers brought a quarter of what came in this one."""
        if self.team is None:
            return
        if 4 * (now.bytes_read - before.bytes_read) > now.bytes_moved - before.bytes_moved:
            with suppress(StreamError):  # the pass has its output; without a thread the next one is slower
                self.team.park()
        else:
            self.team.wake()

    def stats(self, passes: int) -> Stats:
        """Returns what was streamed in `passes` passes, and the memory that it takes."""
        counters = self.counters
        return Stats(
            passes=passes,
            bytes_moved=counters.bytes_moved,
            bytes_written=counters.bytes_written,
            misses=counters.misses,
            stall_seconds=counters.stall_ns / 1e9,
            budget=self.plan.budget,
            arena=_describe_arena(self.plan),
            **asdict(self.usage()),
        )

    def close(self) -> None:
        """Stop the readers and give all memory back. It may be called again.

        Where a pass was captured, its replays may still read and write all memory, which is therefore given
        back only when the weights are collected.
        """
        if self.order is not None and self.order.captured:
            self.resources.closed = True
            self.order.close()
            return
        self.resources.close()
        self._finalizer.detach()


def _describe_arena(plan: Plan) -> str:
    """Says in words where the weights of a plan live."""
    if not plan.arena_bytes:
        return "ordinary memory: everything fits"
    backing = f" {plan.arena.backing}" if plan.arena.kind == "paged" else ""
    return f"a {plan.arena.kind}{backing} arena of {format_size(plan.arena_bytes)}; {plan.hardware.note}"


class Gate:
    """Admits one call at a time, in the process that made it; what else is tried is refused with StreamError.

    `what` is what calls run, and `again` what a caller has to do for another thread or process.
    """

    def __init__(self, title: str, again: str) -> None:
        self._what, self._again = title, again
        self._owner = os.getpid()
        self._running = False
        # Re-entrant, so that a call from within a call is refused, too, and does not wait for itself.
        self._lock = threading.RLock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Hold the gate while one call runs."""
        if os.getpid() != self._owner:
            raise StreamError(f"a forked child cannot run {self._what}: {self._again} in the child")
        with self._holding(f"another thread is running this module: {self._again} once per thread"):
            self._refuse_running("called")
            try:
                try:
                    self._running = True
                    yield
                finally:
                    self._running = False
            finally:  # an interrupt may have come before the line above
                self._running = False

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Hold the gate while the module is closed, in which no call may be running."""
        if os.getpid() != self._owner:  # where the lock may be held by a thread of the parent only
            yield
            return
        with self._holding("the module cannot be closed while a call runs in it: wait for that call"):
            self._refuse_running("closed")
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the gate while what later calls run is changed, once the call of another thread has ended."""
        with self._lock:
            yield

    @contextmanager
    def _holding(self, refusal: str) -> Iterator[None]:
        """Hold the lock. Raises StreamError if another thread does.

        The lock is tried, and then taken by a `with`: wherever an interrupt comes, that gives it back.
        """
        if not self._lock.acquire(blocking=False) or self._lock.release():  # type: ignore[func-returns-value]
            raise StreamError(refusal)
        with self._lock:
            yield

    def _refuse_running(self, done: str) -> None:
        if self._running:
            raise StreamError(f"the module cannot be {done} while a call runs in it: wait for that call")

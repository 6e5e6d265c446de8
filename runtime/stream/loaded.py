"""Passes over loaded weights, and what the probes of a program call in them."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from penstock.passes.probes import NOTHING_STREAMS, CompiledCalls, Probes, streaming
from penstock.passes.trace import with_measured
from penstock.passes.weights.lifted import tensor_in
from penstock.runtime.arena.reading import WeightArena
from penstock.runtime.device.streamer import PassOrder
from penstock.runtime.stream.engine import Counters, MemoryUse, PooledReads, Stats, Streamer, sum_of
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.system.threads import ParkedTeam
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Part, Storage, Trace
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.codec import ProbeOrder
from penstock.schedule.plan import Plan

Bodies = Mapping[str, fx.GraphModule]
_EDGE = -1
_Result = TypeVar("_Result")


def probe_calls(
    order: ProbeOrder,
    probed: Collection[int],
    streamer: Probes | None,
    by_units: Mapping[int, Callable[..., Any]] = MappingProxyType({}),
    bodies: Bodies = MappingProxyType({}),
) -> CompiledCalls:
    """Returns the target of a compiled program's calls.

    `streamer` streams the steps `probed`, and `by_units` has by number the reads that a pool serves.
    `bodies` are those of the program's graph.
    """
    if streamer is None and not order.units:
        return NOTHING_STREAMS
    return ProbeCalls(order, probed, streamer or NOTHING_STREAMS, by_units, bodies)


class ProbeCalls(CompiledCalls):
    """Stands between a compiled program and the streamer, which sees only the steps `probed`.

    A call may end one step and begin another. What a call raises, `enclose` raises: AOTInductor makes a
    RuntimeError of it, with its text, even of an interrupt.
    """

    def __init__(
        self,
        order: ProbeOrder,
        probed: Collection[int],
        probes: Probes,
        by_units: Mapping[int, Callable[..., Any]] = MappingProxyType({}),
        bodies: Bodies = MappingProxyType({}),
    ) -> None:
        self._graph = order.graph
        self._bodies = bodies
        self._probes = probes
        self._by_units = by_units
        self._raised: BaseException | None = None
        wanted = frozenset(probed)
        self._opens = {call: k for k, call in enumerate(order.opens) if k in wanted}
        self._closes = {call: k for k, call in enumerate(order.closes) if k in wanted}

    def acquire(self, graph: int, step: int) -> None:
        self._pass(2 * step)

    def release(self, graph: int, step: int) -> None:
        self._pass(2 * step + 1)

    def enclose(self, run: Callable[[], _Result]) -> _Result:
        self._pass_edge(self._opens, opens=True)
        raised = None
        try:
            result = run()
        except BaseException:
            raised, self._raised = self._raised, None
            if raised is None:
                raise
        if raised is not None:
            raise raised
        self._pass_edge(self._closes, opens=False)
        return result

    def read_by_units(
        self, graph: int, read: int, operator: Callable[..., Any], arguments: Sequence[Any]
    ) -> Any:
        try:
            return self._by_units.get(read, operator)(*arguments)
        except BaseException as error:
            self._raised = error
            raise

    def body(self, name: str) -> fx.GraphModule:
        return self._bodies[name] if name in self._bodies else super().body(name)

    def _pass(self, call: int) -> None:
        ended, begun = self._closes.get(call), self._opens.get(call)
        try:
            if ended is not None:
                self._probes.release(self._graph, ended)
            if begun is not None:
                self._probes.acquire(self._graph, begun)
        except BaseException as error:
            self._raised = error
            raise

    def _pass_edge(self, steps: dict[int, int], *, opens: bool) -> None:
        step = steps.get(_EDGE)
        if step is not None:
            (self._probes.acquire if opens else self._probes.release)(self._graph, step)


class Clock(Protocol):
    """Times of what is called: on a CPU when it is called, on a device when it runs there."""

    def now(self) -> Any:
        """Returns the moment behind all that was called so far."""

    def ns_between(self, start: Any, stop: Any) -> int:
        """Returns the nanoseconds from one such moment to a later one, once it has come."""


class HostClock:
    """The clock of kernels that run when they are called."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def ns_between(self, start: int, stop: int) -> int:
        return stop - start


class Stopwatch:
    """Stands between the probes of every step and the streamer, which sees only those it asked for.

    A step's read runs from the end of its acquire to its release, its lead from there to the next acquire,
    so neither has the time that a step waited for weights. The lead includes what the caller's own thread
    does for streaming: a release drops what was read, and maps what the page cache holds. The read includes
    the first touch of memory that the kernel has yet to map, which happens inside the kernels.
    """

    def __init__(
        self,
        streamer: Probes | None,
        probed: Collection[int],
        steps: int,
        *,
        clock: Clock,
        waited_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """`waited_ns` counts the time that steps have waited for units within their reads."""
        self._streamer, self._probed, self._waited_ns = streamer, frozenset(probed), waited_ns
        self._clock, self._steps = clock, steps
        self._waited: dict[int, int] = {}
        self._leads: dict[int | None, tuple[Any, Any]] = {}  # that of None is the tail
        self._reads: dict[int, tuple[Any, Any]] = {}
        self._mark: Any = None

    def time(self, run: Callable[[], object]) -> object:
        """Run the pass that is timed, and return what it returns."""
        self._mark = self._clock.now()
        result = run()
        self._leads[None] = self._mark, self._clock.now()
        return result

    def acquire(self, graph: int, step: int) -> None:
        self._leads[step] = self._mark, self._clock.now()
        if self._streamer is not None and step in self._probed:
            self._streamer.acquire(graph, step)
        self._waited[step] = -self._waited_ns()
        self._mark = self._clock.now()

    def release(self, graph: int, step: int) -> None:
        ended = self._clock.now()
        self._reads[step] = self._mark, ended
        self._waited[step] += self._waited_ns()
        self._mark = ended
        if self._streamer is not None and step in self._probed:
            self._streamer.release(graph, step)

    def trace(self, modelled: Trace) -> Trace:
        """Returns `modelled` with the times of the pass that has just ended."""
        leads = {step: self._clock.ns_between(*marks) for step, marks in self._leads.items()}
        reads = {step: self._clock.ns_between(*marks) for step, marks in self._reads.items()}
        steps = range(self._steps)
        read_ns = [max(0, reads.get(step, 0) - self._waited.get(step, 0)) for step in steps]
        return with_measured(modelled, [leads.get(step, 0) for step in steps], read_ns, leads[None])


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

    The streamer waits for the weights that stream whole, and `pooled` for those that are read by units.
    `wait` returns when all others are in memory.
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
    pooled: PooledReads | None = None
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
        some = [counted.counters for counted in (self.streamer, self.pooled) if counted is not None]
        return sum_of(*some)

    @property
    def unit_wait_ns(self) -> int:
        """Nanoseconds that steps have waited for units so far, within their reads."""
        return self.pooled.counters.stall_ns if self.pooled else 0

    def probed(self, graph: int) -> tuple[int, ...]:
        """The steps of a method at which the plan acts."""
        return self.streamer.probed(graph) if self.streamer else ()

    def run(self, graph: int, probes: Probes | None, call: Callable[[], Any]) -> Any:
        """Run `call` as a pass of method `graph`, whose probes call `probes`; return what it returns.

        The call may close the weights, of which it reads none from then on.
        """
        with streaming(probes), self.order.turn() if self.order else nullcontext():
            try:
                counters = self.begin(graph)
                output = call()
                if not self.resources.closed:
                    self.end(graph, counters)
            except BaseException:
                self.abort()
                raise
            return output

    def begin(self, graph: int) -> Counters:
        """Begin a pass of method `graph`; returns the counters, for `end`."""
        before = self.counters
        if self.pooled is not None:
            self.pooled.begin()
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
        """Hold the lock, whenever an interrupt comes. Raises StreamError if another thread holds it."""
        if not self._lock.acquire(blocking=False) or self._lock.release():  # type: ignore[func-returns-value]
            raise StreamError(refusal)
        with self._lock:
            yield

    def _refuse_running(self, done: str) -> None:
        if self._running:
            raise StreamError(f"the module cannot be {done} while a call runs in it: wait for that call")


def view_of(
    part: Part,
    storages: Sequence[Storage],
    places: Sequence[int],
    outside: Mapping[int, torch.Tensor],
    memory: WeightArena | NativeStreamer | None,
) -> torch.Tensor:
    """Returns the tensor that the program reads a part through, for as long as the module lives."""
    if part.storage in outside and 0 not in part.shape:
        return tensor_in(outside[part.storage], part)
    if memory is not None and places[part.storage] >= 0:
        if isinstance(memory, NativeStreamer):
            return memory.view(part, storages[part.storage].nbytes)
        return memory.view(part)
    # No step reads this weight, so a placeholder of its shape, whose memory is never touched, will do.
    return torch.empty_strided(part.shape, part.stride, dtype=getattr(torch, part.dtype))


def memory_use(
    plan: Plan,
    memory: WeightArena | NativeStreamer | None,
    outside: int,
    readers: int,
    pooled: PooledReads | None,
) -> MemoryUse:
    """Returns what a CPU holds: `outside` bytes, the pool and the arena; a mapped one is the page cache's."""
    in_use, peak = (memory.held_bytes, memory.peak_bytes) if memory else (0, 0)
    maps = plan.arena.kind == "paged" and plan.arena.backing == "mapped"
    mapped = in_use if maps else 0
    if pooled is not None:
        in_use, peak = in_use + pooled.held_bytes, peak + pooled.peak_bytes
    return MemoryUse(outside + in_use, outside + peak, readers, mapped_bytes=mapped)

"""Stands between a program's probes and its streamer, for the order of compiled code and to time steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from torch import fx

from penstock.passes.probes import NOTHING_STREAMS, CompiledCalls, Probes
from penstock.passes.trace import with_measured
from penstock.schedule.facts.model import Trace
from penstock.schedule.payload.codec import ProbeOrder

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
